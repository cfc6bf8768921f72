"""Many schemas of a real server: no answer, greedy or hot, is of another form than asked for."""

import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any, NamedTuple

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from launcher.demo import EXAMPLES
from tests.router.shape.made_schemas import HARD, SCHEMAS

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]

MODELS = ("loraplex/demo", "json", "pirate")
TEMPERATURES = (0, 2)
MADE = int(os.environ.get("SWEEP_SCHEMAS", "300"))
AT_ONCE = 16


class Asked(NamedTuple):
    name: str
    schema: Any
    model: str
    temperature: float


def made_schemas(count: int) -> list[dict[str, Any]]:
    """The same ones at every run."""
    found: list[dict[str, Any]] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(SCHEMAS)
    def collect(schema: dict[str, Any]) -> None:
        found.append(schema)

    collect()
    return found


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
            return schema.get("additionalProperties") is False and all(map(is_bounded, inner))
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


def outcome(http: httpx.Client, asked: Asked) -> str:
    """What became of one request; an answer that ended by itself is of its form."""
    body = {
        "model": asked.model,
        "messages": [{"role": "user", "content": EXAMPLES[0]}],
        "temperature": asked.temperature,
        "seed": 5,
        "max_tokens": 700,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "made", "schema": asked.schema},
        },
    }
    answer = http.post("/v1/chat/completions", json=body, timeout=600)
    if answer.status_code == 400:
        assert "response_format" in answer.json()["error"]["message"]
        return "refused"
    assert answer.status_code == 200, (asked, answer.text)
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] == "stop":
        value = json.loads(choice["message"]["content"])
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(asked.schema, format_checker=checker).validate(value)
    return str(choice["finish_reason"])


def test_every_answer_that_ends_has_its_form(http: httpx.Client) -> None:
    schemas = [(f"made {n}", schema) for n, schema in enumerate(made_schemas(MADE))]
    cases = [
        Asked(name, schema, model, temperature)
        for (name, schema), model, temperature in product(
            [*HARD.items(), *schemas], MODELS, TEMPERATURES
        )
    ]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        outcomes = list(threads.map(lambda asked: outcome(http, asked), cases))
    kinds = {True: Counter[str](), False: Counter[str]()}
    for asked, end in zip(cases, outcomes, strict=True):
        kinds[is_bounded(asked.schema)][end] += 1
    print(f"bounded: {dict(kinds[True])}, others: {dict(kinds[False])}")
    assert set(outcomes) <= {"stop", "length", "refused"}
    bounded = kinds[True]
    assert bounded["stop"] >= 0.8 * (bounded["stop"] + bounded["length"]) > 0
    assert outcomes.count("refused") <= 0.3 * len(cases)  # some of the made ones allow nothing
