"""One grammar of a whole answer: its reasoning, then its form or its calls. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec

from router.parts.reasoning import Reasoning
from router.shape.lark import Lark
from router.shape.rules import exact, rules
from router.shape.shape import Grammar, Shape
from router.tools.formats.format import ToolFormat
from router.tools.formats.grammar import free_text_before, keeps_schema
from router.tools.tools import Tool, Tools

_NEWLINES = r"/\n{0,2}/"
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


class Frame(msgspec.Struct, frozen=True):
    """What else than text in its form an answer may have.

    reasoning: what the model may write first; None = nothing. begun: the prompt has begun it.
    tools, tool_format: what it may call, and in which form. special_ids: of the markers of both
    that are special tokens.
    """

    reasoning: Reasoning | None = None
    begun: bool = False
    tools: Tools | None = None
    tool_format: ToolFormat | None = None
    special_ids: Mapping[str, int] = {}


_TEXT = Frame()


def grammar_of(shape: Shape | None, frame: Frame = _TEXT) -> str:
    """The grammar of an answer from its begin to its end. Raises ShapeRefused.

    With a shape the answer is text that has it, or calls alone; without, it is what `frame.tools`
    say.
    """
    if frame == _TEXT and isinstance(shape, Grammar) and shape.syntax == "lark":
        return shape.source  # so that errors name lines of the caller's
    writer = Lark(frame.special_ids)
    before = "" if frame.reasoning is None else _reasoning(frame.reasoning, frame.begun, writer)
    return writer.source(f"{before} {_answer(shape, frame, writer)}".strip())


def _reasoning(reasoning: Reasoning, begun: bool, writer: Lark) -> str:
    """Up to the answer. What the model has not begun, it may leave out."""
    inside = f"{free_text_before(writer, reasoning.closes[0])} {_NEWLINES}"
    if reasoning.turn:
        inside = f"{inside} {writer.literal(reasoning.turn)}"
    return inside if begun else f"({writer.literal(reasoning.opens[0])} {inside})?"


def _answer(shape: Shape | None, frame: Frame, writer: Lark) -> str:
    tools, tool_format = frame.tools, frame.tool_format
    if tools is None or tool_format is None:
        assert shape is not None
        return _text_of(shape, frame, writer)
    exact = _exact(tools)
    if shape is None or tools.mode == "required":
        return tool_format.rules(exact, writer)
    calls = tool_format.rules(msgspec.structs.replace(exact, mode="required"), writer)
    return writer.either((calls, _text_of(shape, frame, writer)))


def _text_of(shape: Shape, frame: Frame, writer: Lark) -> str:
    """What stands before the answer's text, the text, and what may stand behind."""
    text, reasoning = rules(shape, writer), frame.reasoning
    if reasoning is not None and reasoning.header:
        text = f"{writer.literal(reasoning.header)} {text}"
    if reasoning is not None and reasoning.footer:
        text = f"{text} ({writer.literal(reasoning.footer)})?"
    return text


def _exact(tools: Tools) -> Tools:
    """With schemas as llguidance reads them; any object where a call need not keep to one."""
    names = {tool.name for tool in tools.allowed}
    offered = tuple(
        _exact_tool(tool, keeps_schema(tools, tool), f"tools[{i}].function.parameters")
        if tool.name in names
        else tool
        for i, tool in enumerate(tools.offered)
    )
    return msgspec.structs.replace(tools, offered=offered)


def _exact_tool(tool: Tool, keeps: bool, param: str) -> Tool:
    """Raises ShapeRefused."""
    if tool.parameters is None and keeps:
        return tool
    schema = {"type": "object", **(tool.parameters or {})} if keeps else _ANY_OBJECT
    return msgspec.structs.replace(tool, parameters=exact(schema, param))
