"""Tells which schemas a grammar can hold answers to, and writes those grammars. Pure."""

from typing import Any

from loraplex.router.shape.lark import Lark
from loraplex.router.shape.schema.document import parts_of
from loraplex.router.shape.schema.json_rules import Spacing, json_rules
from loraplex.router.shape.schema.keywords import BINDING, SchemaRefused, below
from loraplex.router.shape.schema.reader import Reader
from loraplex.router.shape.texts.format import FORMATS

Schema = dict[str, Any] | bool

ONE_LINE = Spacing()
# Enough for text on one line or indented, and too little to go on for ever.
LOOSE = Spacing(",", ":", r"( |\r?\n[ \t]{0,64})?")
_MOST_DROPPED = 40
_NAMING = frozenset(("$defs", "definitions", "$id", "id", "$anchor", "$dynamicAnchor", "$schema"))
# Keywords that let fewer values through the more their schemas accept.
_NEGATIVE = ("not", "if")


def json_grammar(
    lark: Lark, schema: Schema, spacing: Spacing = ONE_LINE, param: str = "schema"
) -> str:
    """The expression of JSON that the schema accepts. Raises SchemaRefused."""
    try:
        return json_rules(lark, Reader(schema, param), spacing)
    except RecursionError:
        raise SchemaRefused(param, "", "is nested too deep to be held to") from None


def checked(schema: Schema, param: str) -> Schema:
    """The schema without annotations. Raises SchemaRefused where it cannot be held to."""
    json_grammar(Lark(), schema, param=param)
    held: Schema = _without(schema, param, frozenset())
    return held


def as_far_as_held(schema: dict[str, Any], param: str) -> tuple[Schema, tuple[str, ...]]:
    """Returns the schema without the keywords that cannot be held to, and their places."""
    dropped: dict[tuple[str, str], None] = {}
    try:
        outer = _negatives(schema, param)
        for _ in range(_MOST_DROPPED):
            left = frozenset(dropped)
            try:
                json_rules(Lark(), Reader(schema, param, left), ONE_LINE)
            except SchemaRefused as error:
                found = outer.get(error.place, (error.place, error.keyword))
                if not found[1] or found in dropped:
                    break
                dropped[found] = None
            else:
                held = checked(_without(schema, param, left), param)
                return held, tuple(below(*one) for one in dropped)
    except SchemaRefused:
        pass
    return {"type": "object"}, (param,)


def is_void(schema: Schema) -> bool:
    """Whether no value keeps to a schema that can be held to."""
    try:
        json_grammar(Lark(), schema)
    except SchemaRefused:
        return True
    return False


def _without(schema: Any, place: str, dropped: frozenset[tuple[str, str]]) -> Any:
    """A copy without these keywords, and without annotations."""
    if not isinstance(schema, dict):
        return schema
    kept = {
        keyword: value
        for keyword, value in schema.items()
        if (place, keyword) not in dropped
        and (keyword in BINDING or keyword in _NAMING or keyword == "discriminator")
        and (keyword != "format" or value in FORMATS)
    }
    for keys in parts_of(kept):
        keyword, *rest = keys
        assert isinstance(keyword, str)
        inner = _without(_at(kept, keys), below(place, *keys), dropped)
        if rest:
            kept[keyword] = kept[keyword].copy()
            kept[keyword][rest[0]] = inner
        else:
            kept[keyword] = inner
    return kept


def _at(found: Any, keys: tuple[str | int, ...]) -> Any:
    for key in keys:
        found = found[key]
    return found


def _negatives(schema: Any, param: str) -> dict[str, tuple[str, str]]:
    """The outermost place and keyword that negates, for each place below `not` and its like."""
    found: dict[str, tuple[str, str]] = {}
    waiting: list[tuple[Any, str, tuple[str, str] | None]] = [(schema, param, None)]
    while waiting:
        here, place, outer = waiting.pop()
        if outer is not None:
            found[place] = outer
        for keys in parts_of(here) if isinstance(here, dict) else ():
            is_first = outer is None and keys[0] in _NEGATIVE
            inner = (place, str(keys[0])) if is_first else outer
            waiting.append((_at(here, keys), below(place, *keys), inner))
    return found
