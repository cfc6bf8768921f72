"""Each form of an answer as an expression of a grammar. Pure.

A form that no grammar can say exactly is refused, with the field that asked for it.
"""

import re
from typing import Any, assert_never

from loraplex.router.shape.gbnf import GbnfError, gbnf_rules
from loraplex.router.shape.lark import Lark
from loraplex.router.shape.schema.held import ONE_LINE, json_grammar
from loraplex.router.shape.schema.json_rules import Spacing
from loraplex.router.shape.schema.keywords import SchemaRefused, below
from loraplex.router.shape.shape import (
    AnyJson,
    Choice,
    Grammar,
    JsonSchema,
    Regex,
    Shape,
    ShapeRefused,
    StructuralTag,
)

_OBJECT: dict[str, Any] = {"type": "object"}
# A pattern matches a whole text, so a `^` before it and a `$` after it add nothing.
_END = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")


def rules(shape: Shape, writer: Lark) -> str:
    """The expression that accepts what has the form. Raises ShapeRefused."""
    match shape:
        case AnyJson():
            return _json(_OBJECT, shape.param, writer, shape.whitespace)
        case JsonSchema():
            return _json(shape.schema, shape.param, writer, shape.whitespace)
        case Regex():
            return _regex(shape.pattern, writer)
        case Choice():
            return writer.either(map(writer.literal, dict.fromkeys(shape.texts)))
        case Grammar():
            return _grammar(shape, writer)
        case StructuralTag():
            return _tags(shape, writer)
    assert_never(shape)


def shape_refused(error: SchemaRefused) -> ShapeRefused:
    place = below(error.place, error.keyword) if error.keyword else error.place
    return ShapeRefused(error.reason, place)


def _json(
    schema: dict[str, Any] | bool, param: str, writer: Lark, whitespace: str | None = None
) -> str:
    """The expression that accepts JSON of a schema. whitespace: as in JsonSchema."""
    spacing = ONE_LINE if whitespace is None else Spacing(",", ":", whitespace)
    try:
        return json_grammar(writer, schema, spacing, param)
    except SchemaRefused as error:
        raise shape_refused(error) from None


def _regex(pattern: str, writer: Lark) -> str:
    pattern = pattern.removeprefix("^")
    if _END.search(pattern):
        pattern = pattern[:-1]
    return writer.regex(pattern) if pattern else writer.literal("")


def _grammar(shape: Grammar, writer: Lark) -> str:
    if shape.syntax == "lark":
        return writer.nested(shape.source)
    try:
        return gbnf_rules(shape.source, writer)
    except GbnfError as error:
        raise ShapeRefused(str(error), shape.param) from None


def _tags(shape: StructuralTag, writer: Lark) -> str:
    """A structural tag. Free text holds no trigger: each trigger begins one of its tags."""
    triggers = [
        trigger
        for trigger in dict.fromkeys(shape.triggers)
        if not any(trigger != other and trigger.startswith(other) for other in shape.triggers)
    ]
    heads: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for i, tag in enumerate(shape.tags):
        trigger = next((one for one in triggers if tag.begin.startswith(one)), None)
        if trigger is None:
            raise ShapeRefused(
                "expected one of `triggers` at its begin", f"{shape.param}.structures[{i}].begin"
            )
        rest = writer.literal(tag.begin[len(trigger) :])
        body = _json(tag.schema, f"{shape.param}.structures[{i}].schema", writer)
        heads[trigger].append(f"{rest} {body} {writer.literal(tag.end)}")
    found = "|".join(map(re.escape, triggers))
    inside = writer.regex(f"(?s:.*)({found})(?s:.*)")
    free = writer.terminal("free", f"{writer.regex('(?s:.*)')} & ~{inside}")
    tags = [
        writer.rule("head", f"{free} {writer.literal(trigger)}", "lazy")
        + " "
        + writer.either(bodies)
        for trigger, bodies in heads.items()
        if bodies
    ]
    return f"{writer.either(tags)}* {free}"
