"""Each binding keyword binds: without it other values are accepted, by the grammar as by others."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema.validators import validator_for
from llguidance import LLMatcher

from loraplex.adapters.grammar.compile import GrammarError
from loraplex.router.shape.schema.keywords import BINDING, SchemaRefused, parts_of
from tests.router.shape.matching import accepts, matcher_of
from tests.router.shape.test_json_schema import HELD
from tests.router.shape.test_schema_walks import FORMATS
from tests.router.shape.walks import BYTES, walk

Path = tuple[str | int, ...]
WALKS, MOST = 6, 60
# Keywords without which the same values are accepted, by the number of their schema.
REDUNDANT: set[tuple[int, str]] = {
    (10, "$defs/c/required"),
    (10, "$defs/d/required"),
    (12, "oneOf/2/additionalProperties"),
    (12, "oneOf/2/maxProperties"),
    (12, "oneOf/2/properties/n/type"),
    (13, "type"),
    (13, "anyOf/1/type"),
    (13, "$defs/a/type"),
    (14, "anyOf/0/properties/n/type"),
    (14, "anyOf/1/additionalProperties"),
    (14, "anyOf/1/properties"),
    (14, "anyOf/1/required"),
    (14, "anyOf/1/properties/n/type"),
    (15, "items/oneOf/1/additionalProperties"),
    (15, "items/oneOf/1/maxProperties"),
    (15, "items/oneOf/1/properties/n/type"),
    (15, "$defs/bee/additionalProperties"),
    (15, "$defs/bee/properties/n/type"),
    (30, "uniqueItems"),
    (37, "format"),
    (44, "type"),
    (48, "else"),
    (49, "oneOf/0/type"),
    (49, "oneOf/1/properties"),
    (49, "oneOf/1/required"),
    (49, "oneOf/1/properties/kind/const"),
    (49, "oneOf/2/type"),
    (52, "uniqueItems"),
    (63, "properties"),
    (65, "patternProperties/[0-4]$/const"),
    (66, "properties"),
    (67, "properties"),
    (69, "type"),
    (70, "properties/a/allOf/0/pattern"),
    (71, "anyOf/1/maxProperties"),
}


def at(schema: Any, path: Path) -> Any:
    for key in path:
        schema = schema[key]
    return schema


def places(schema: Any, path: Path = ()) -> Iterator[Path]:
    """Of all binding keywords, also within."""
    here = at(schema, path)
    yield from ((*path, keyword) for keyword in here if keyword in BINDING)
    for keys in parts_of(here):
        if isinstance(at(here, keys), dict):
            yield from places(schema, (*path, *keys))


def without(schema: Any, path: Path) -> Any:
    left = copy.deepcopy(schema)
    del at(left, path[:-1])[path[-1]]
    return left


def judged(schema: Any) -> Any:
    """What `jsonschema` says of a value."""
    return validator_for(schema)(schema, format_checker=FORMATS).is_valid


def drawn(matcher: LLMatcher) -> Iterator[Any]:
    for seed in range(WALKS):
        text = walk(matcher, BYTES.vocabulary, BYTES.tokens, seed, MOST)
        if text is not None:
            yield json.loads(text)


def differs(schema: Any, less: Any, values: list[Any]) -> bool:
    """Whether a value is found that only one of the schemas accepts; asserts that grammars agree.

    Grammars write the tag that distinguishes options, here `kind`, even where it is optional.
    """
    whole, left = matcher_of(schema), matcher_of(less)
    by_whole, by_left = judged(schema), judged(less)
    for value in (*values, *drawn(left), *drawn(whole)):
        verdicts = by_whole(value), by_left(value)
        if verdicts[0] == verdicts[1]:
            continue
        text = json.dumps(value, ensure_ascii=False)
        by_grammars = accepts(whole, text), accepts(left, text)
        is_tagged = by_grammars == (False, False) and "kind" not in text
        assert by_grammars == verdicts or is_tagged, (less, value)
        return True
    return False


def check(number: int) -> None:
    schema, good, bad = HELD[number]
    for path in places(schema) if isinstance(schema, dict) else ():
        try:
            found = differs(schema, without(schema, path), [*bad, *good])
        except (SchemaRefused, GrammarError):
            continue  # what is left is refused, so that there is nothing to compare
        name = "/".join(map(str, path))
        assert found is not ((number, name) in REDUNDANT), name


@pytest.mark.parametrize("number", range(0, len(HELD), 12))
def test_keywords_of_some_schemas_bind(number: int) -> None:
    check(number)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(len(HELD)))
def test_each_keyword_binds(number: int) -> None:
    check(number)
