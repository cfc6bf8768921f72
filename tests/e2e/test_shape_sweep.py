"""Many schemas of real servers: no answer, greedy or hot, is of another form than asked for."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.e2e import random_model
from tests.e2e.sweeping import TEMPERATURES, Asked, ended_share, outcomes
from tests.router.shape.drawn import drawn
from tests.router.shape.made_schemas import HARD, SCHEMAS

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]

MODELS = ("loraplex/demo", "json", "pirate")
MADE = int(os.environ.get("SWEEP_SCHEMAS", "300"))
# Of what may go on for ever; the others have the context.
UNBOUNDED_TOKENS = 250


@pytest.fixture
def random_http(tmp_path: Path) -> Iterator[httpx.Client]:
    server = random_model.start_random(tmp_path)
    try:
        with httpx.Client(base_url=server.url) as client:
            yield client
    finally:
        server.process.terminate()
        code = server.process.wait(60)
    assert code == 0, server.log.read_text()[-4000:]


def is_bounded(schema: Any) -> bool:
    """Whether texts, numbers and lists have bounds everywhere, so that each answer is short."""
    if not isinstance(schema, dict) or "$ref" in schema:
        return schema is False
    if "const" in schema or "enum" in schema:
        return True
    parts = [part for kind in ("anyOf", "oneOf", "allOf") for part in schema.get(kind, ())]
    match schema.get("type"):
        case None:
            return bool(parts) and all(map(is_bounded, parts))
        case "object":
            inner = [*parts, *schema.get("properties", {}).values()]
            is_closed = schema.get("additionalProperties") is False
            named = is_closed and "patternProperties" not in schema
            return named and all(map(is_bounded, inner))
        case "array":
            inner = [*parts, *schema.get("prefixItems", ()), schema.get("items", True)]
            return "maxItems" in schema and all(map(is_bounded, inner))
        case "integer":
            low = {"minimum", "exclusiveMinimum"} & set(schema)
            return bool(low and {"maximum", "exclusiveMaximum"} & set(schema))
        case "string":
            return "pattern" not in schema and "maxLength" in schema
        case kind:
            return kind in ("boolean", "null")


def check_value(schema: Any, text: str) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


def asked(schema: Any, model: str, temperature: float) -> Asked:
    return Asked(
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "made", "schema": schema},
            }
        },
        partial(check_value, schema),
        model,
        temperature,
        None if is_bounded(schema) else UNBOUNDED_TOKENS,
    )


def sweep(http: httpx.Client, models: Sequence[str]) -> None:
    schemas = [*HARD.values(), *drawn(SCHEMAS, MADE)]
    cases = list(product(schemas, models, TEMPERATURES))
    ends = outcomes(http, [asked(*case) for case in cases])
    kinds = {True: Counter[str](), False: Counter[str]()}
    for (schema, _, _), end in zip(cases, ends, strict=True):
        kinds[is_bounded(schema)][end] += 1
    for kind, counts in (("bounded", kinds[True]), ("others", kinds[False])):
        print(f"{kind}: {dict(counts)}, {ended_share(counts):.0%} ended")
    assert ended_share(kinds[True]) >= 0.8
    assert ends.count("refused") <= 0.3 * len(cases)  # some of the made ones allow nothing


def test_the_demo_model(http: httpx.Client) -> None:
    sweep(http, MODELS)


def test_a_random_model(random_http: httpx.Client) -> None:
    sweep(random_http, random_model.MODELS)
