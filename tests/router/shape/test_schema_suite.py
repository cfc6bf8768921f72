"""The JSON-Schema-Test-Suite, which comes with the source package of `jsonschema`."""

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.router.shape.schema.keywords import SchemaRefused
from tests.router.shape.matching import accepts, matcher_of

PACKAGE = "jsonschema==4.26.0"
CACHE = Path(__file__).parents[3] / ".cache" / "schema_suite"
DRAFT = "json/tests/draft2020-12/"
LEAST_SERVED = 320


def suite() -> Path:
    """The package's archive, which is brought once; skips where it cannot be had."""
    found = sorted(CACHE.glob("*.tar.gz"))
    if not found:
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary=:all:"]
        done = subprocess.run(
            [*command, "-d", str(CACHE), PACKAGE], capture_output=True, text=True, check=False
        )
        found = sorted(CACHE.glob("*.tar.gz"))
        if not found:
            pytest.skip(f"pip cannot bring the source of {PACKAGE}: {done.stderr[-300:]}")
    return found[0]


def cases() -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """Schemas, each with values and whether they keep to it."""
    with tarfile.open(suite()) as archive:
        for member in archive:
            _, _, name = member.name.partition("/")
            if name.startswith(DRAFT) and name.count("/") == 3 and name.endswith(".json"):
                content = archive.extractfile(member)
                assert content is not None
                for case in json.load(content):
                    yield case["schema"], case["tests"]


def as_written(value: Any) -> Any:
    """Whole numbers without a point."""
    if isinstance(value, list):
        return [as_written(one) for one in value]
    if isinstance(value, dict):
        return {key: as_written(one) for key, one in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def orders(value: Any) -> Iterator[Any]:
    """The value, and with its names in the other order: answers have the schema's."""
    yield value
    if isinstance(value, dict):
        yield dict(reversed(value.items()))


@pytest.mark.exhaustive
def test_the_suite() -> None:
    served, wrong, missed = 0, [], 0
    for schema, tests in cases():
        try:
            matcher = matcher_of(schema)
        except SchemaRefused:
            continue
        served += 1
        for test in tests:
            texts = [json.dumps(v, ensure_ascii=False) for v in orders(as_written(test["data"]))]
            is_accepted = any(accepts(matcher, text) for text in texts)
            if is_accepted and not test["valid"]:
                wrong.append((schema, test["data"]))
            # Formats are held to, where the suite has them as annotations.
            missed += test["valid"] and not is_accepted and "format" not in schema
    print(f"served {served}, invalid {len(wrong)}, valid but never written {missed}")
    assert wrong == []
    assert served >= LEAST_SERVED
    assert missed <= 4
