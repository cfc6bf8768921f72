"""Expressions that the grammars of all formats share. Pure."""

from collections.abc import Sequence
from typing import Any

from loraplex.router.shape.lark import ANY_TEXT, Lark
from loraplex.router.shape.schema.json_rules import LOOSE, json_grammar
from loraplex.router.tools.tools import Tool, Tools


def keeps_schema(tools: Tools, tool: Tool) -> bool:
    """Whether the arguments of a call keep to the tool's schema; else they are any object."""
    return tool.strict or tools.mode == "required"


def arguments_schema(tools: Tools, tool: Tool) -> dict[str, Any]:
    """The schema of a call's arguments, which are an object."""
    if not keeps_schema(tools, tool):
        return {"type": "object"}
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return tool.parameters if "type" in tool.parameters else {"type": "object", **tool.parameters}


def arguments_json(tools: Tools, tool: Tool, lark: Lark) -> str:
    """A call's arguments as one JSON object."""
    schema = arguments_schema(tools, tool)
    return (
        json_grammar(lark, schema)
        if keeps_schema(tools, tool)
        else json_grammar(lark, schema, LOOSE)
    )


def one_call_alone(tools: Tools) -> bool:
    """Whether an answer has at most one call."""
    return tools.named or not tools.parallel


def several(tools: Tools, one: str, between: str) -> str:
    """The expression for calls: one, or any number of them where allowed, with `between`."""
    return one if one_call_alone(tools) else f"{one} ({between} {one})*"


def free_text_before(lark: Lark, marker: str) -> str:
    """Text of any kind up to the first `marker`, and the marker."""
    begin = lark.literal(marker)
    if lark.has_special(marker):
        return f"{ANY_TEXT} {begin}"
    return lark.rule("before", f"{ANY_TEXT} {begin}", "lazy")


def mixed(tools: Tools, lark: Lark, called: Sequence[str], passed: Sequence[str] = ()) -> str:
    """Text and calls in turn. called: free text and the calls after it. passed: free text with
    what looks like a call and is none."""
    if one_call_alone(tools):
        skipped = f"{lark.either(passed)}* " if passed else ""
        return skipped + lark.either((*called, ANY_TEXT))
    return f"{lark.either((*called, *passed))}* {ANY_TEXT}"
