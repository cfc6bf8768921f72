"""Whatever the masks of a schema let through, `jsonschema` accepts."""

import datetime
import ipaddress
import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker

from loraplex.adapters.grammar.compile import GrammarError, compile_grammar
from loraplex.adapters.grammar.limits import GrammarLimits
from loraplex.adapters.grammar.vocabulary import make_vocabulary, token_bytes
from loraplex.router.shape.schema.keywords import SchemaRefused
from tests.router.shape.made_schemas import HARD, SCHEMAS
from tests.router.shape.matching import source
from tests.router.shape.walks import BYTES, Words
from tests.vocabularies import load

FORMATS = FormatChecker()
_CLOCK = r"\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)"
_LABEL = r"[a-zA-Z\d]([a-zA-Z\d-]{,61}[a-zA-Z\d])?"
_HOST = rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*"


def _iso(value: Any) -> bool:
    return bool(datetime.datetime.fromisoformat(value))


# Formats that jsonschema checks with other packages alone.
_CHECKS: dict[str, Any] = {
    "date-time": lambda v: re.fullmatch(rf"\d{{4}}-\d\d-\d\dT{_CLOCK}", v) and _iso(v),
    "time": lambda v: re.fullmatch(_CLOCK, v) and _iso(f"2000-01-01T{v}"),
    "duration": lambda v: re.fullmatch(
        r"P(?!$)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)", v
    ),
    "hostname": lambda v: re.fullmatch(_HOST, v),
    "email": lambda v: re.fullmatch(_HOST, v.rpartition("@")[2]) and v.count("@") == 1,
    "ipv4": ipaddress.IPv4Address,
    "uri": lambda v: re.fullmatch(
        r"[a-zA-Z][\w+.-]*:([\w.~:/?#@!$&'()*+,;=-]|%[\da-fA-F]{2})*", v, re.ASCII
    ),
}
for _name, _check in _CHECKS.items():
    FORMATS.checks(_name, raises=ValueError)(
        lambda value, check=_check: not isinstance(value, str) or bool(check(value))
    )


@pytest.fixture(scope="session")
def real() -> Words:
    document, size = load("llama-2"), 32_000
    return Words(make_vocabulary(document, size, [2]), token_bytes(document, size).by_id)


def check(schema: Any, words: Words, seeds: int, most: int) -> int:
    """How many of the walks ended, with an answer that the schema accepts."""
    validator = Draft202012Validator(schema, format_checker=FORMATS)
    answers = words.answers(source(schema), seeds, most)
    for text in answers:
        errors = [error.message for error in validator.iter_errors(json.loads(text))]
        assert not errors, (text, errors)
    return len(answers)


def can_be_held_to(schema: Any) -> bool:
    """Whether it compiles; made schemas may be refused, or accept nothing."""
    try:
        compile_grammar(BYTES.vocabulary, source(schema), GrammarLimits())
    except (SchemaRefused, GrammarError):
        return False
    return True


@pytest.mark.parametrize("name", HARD)
def test_hard_schemas(name: str) -> None:
    assert check(HARD[name], BYTES, seeds=3, most=6000) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", HARD)
def test_hard_schemas_in_words(name: str, real: Words) -> None:
    assert check(HARD[name], real, seeds=5, most=6000) > 0


@settings(max_examples=25, deadline=None, derandomize=True, database=None,
          phases=[Phase.generate], suppress_health_check=list(HealthCheck))  # fmt: skip
@given(SCHEMAS.filter(can_be_held_to))
def test_made_schemas(schema: dict[str, Any]) -> None:
    check(schema, BYTES, seeds=3, most=400)


@pytest.mark.exhaustive
@settings(max_examples=2000, deadline=None, database=None, phases=[Phase.generate],
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(SCHEMAS.filter(can_be_held_to), st.booleans())
def test_many_made_schemas(real: Words, schema: dict[str, Any], in_words: bool) -> None:
    check(schema, real if in_words else BYTES, seeds=3, most=600)
