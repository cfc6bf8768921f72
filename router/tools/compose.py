"""One grammar of a whole answer: its reasoning, then its form or its calls. Pure."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from loraplex.router.parts.reasoning import MESSAGE, Reasoning
from loraplex.router.shape.lark import Lark
from loraplex.router.shape.rules import rules, shape_refused
from loraplex.router.shape.schema.json_rules import as_far_as_held, checked
from loraplex.router.shape.schema.keywords import SchemaRefused
from loraplex.router.shape.shape import AnyJson, Grammar, JsonSchema, Shape, StructuralTag
from loraplex.router.tools.formats.format import ToolFormat
from loraplex.router.tools.formats.grammar import free_text_before, keeps_schema
from loraplex.router.tools.formats.harmony import Harmony
from loraplex.router.tools.formats.json_calls import JsonCalls
from loraplex.router.tools.formats.named_calls import NamedCalls
from loraplex.router.tools.tools import Tool, Tools
from loraplex.server.protocol import NamesOnce

_NEWLINES = r"/\n{0,2}/"
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


class Frame(msgspec.Struct, frozen=True):
    """The parts that an answer may have besides text in its form.

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


class Composed(NamedTuple):
    """A grammar for answers with calls of tools. unbound: places of schemas of tools that the
    grammar does not hold calls to. names_once: of JSON in which the grammar lets names come
    again.
    """

    grammar: str
    unbound: tuple[str, ...] = ()
    names_once: NamesOnce | None = None


def compose(shape: Shape | None, frame: Frame = _TEXT) -> Composed:
    """The grammar of an answer from its begin to its end. Raises ShapeRefused.

    With a shape the answer is text that has it, or calls alone; without, it is what `frame.tools`
    say.
    """
    if frame == _TEXT and isinstance(shape, Grammar) and shape.syntax == "lark":
        return Composed(shape.source)  # so that errors name lines of the caller's
    writer = Lark(frame.special_ids)
    begins = _json_begins(shape, frame)
    writer.names_once = bool(begins)
    before = "" if frame.reasoning is None else _reasoning(frame.reasoning, frame.begun, writer)
    unbound: list[str] = []
    if frame.tools is not None and frame.tool_format is not None:
        frame = msgspec.structs.replace(frame, tools=_exact(frame.tools, unbound))
    source = writer.source(f"{before} {_answer(shape, frame, writer)}".strip())
    opens = closes = ""
    if frame.reasoning is not None:
        opens = "" if frame.begun else frame.reasoning.opens[0]
        closes = frame.reasoning.closes[0]
    once = NamesOnce(begins, opens, closes, writer.names_run_out)
    is_needed = bool(begins) and writer.has_free_names
    return Composed(source, tuple(unbound), once if is_needed else None)


def _json_begins(shape: Shape | None, frame: Frame) -> tuple[str, ...]:
    """Begins of JSON, as in NamesOnce. () = no JSON, or JSON within other text."""
    begins: tuple[str, ...] = ()
    match shape:
        case AnyJson() | JsonSchema():
            begins = ("{", "[")
        case StructuralTag():
            begins = tuple(tag.begin for tag in shape.tags)
    match frame.tool_format if frame.tools is not None else None:
        case JsonCalls() as calls:
            begins += (*calls.opens, f'"{calls.arguments_key}":') if calls.bare else calls.opens
        case NamedCalls(to_user="") as calls:
            begins += (calls.middle if calls.middle in calls.markers else calls.open,)
        case Harmony():
            begins += (f"json{MESSAGE}",)
        case None:
            pass
        case _:
            return ()
    return begins


def _reasoning(reasoning: Reasoning, begun: bool, writer: Lark) -> str:
    """The reasoning up to the answer. It may be left out where the prompt has not begun it."""
    inside = f"{free_text_before(writer, reasoning.closes[0])} {_NEWLINES}"
    if reasoning.turn:
        inside = f"{inside} {writer.literal(reasoning.turn)}"
    return inside if begun else f"({writer.literal(reasoning.opens[0])} {inside})?"


def _answer(shape: Shape | None, frame: Frame, writer: Lark) -> str:
    tools, tool_format = frame.tools, frame.tool_format
    if tools is None or tool_format is None:
        assert shape is not None
        return _text_of(shape, frame, writer)
    if shape is None or tools.mode == "required":
        return tool_format.rules(tools, writer)
    calls = tool_format.rules(msgspec.structs.replace(tools, mode="required"), writer)
    return writer.either((calls, _text_of(shape, frame, writer)))


def _text_of(shape: Shape, frame: Frame, writer: Lark) -> str:
    """The expression for an answer's text, with what stands before and behind."""
    text, reasoning = rules(shape, writer), frame.reasoning
    if reasoning is not None and reasoning.header:
        text = f"{writer.literal(reasoning.header)} {text}"
    if reasoning is not None and reasoning.footer:
        text = f"{text} ({writer.literal(reasoning.footer)})?"
    return text


def _exact(tools: Tools, unbound: list[str]) -> Tools:
    """The tools with schemas that can be held to, or of any object for loose calls."""
    names = {tool.name for tool in tools.allowed}
    offered = tuple(
        _exact_tool(tool, keeps_schema(tools, tool), unbound) if tool.name in names else tool
        for tool in tools.offered
    )
    return msgspec.structs.replace(tools, offered=offered)


def _exact_tool(tool: Tool, keeps: bool, unbound: list[str]) -> Tool:
    """The tool with the schema that calls keep to. Raises ShapeRefused for a strict tool."""
    if tool.parameters is None and keeps:
        return tool
    schema = {"type": "object", **(tool.parameters or {})} if keeps else _ANY_OBJECT
    try:
        if tool.strict:
            held = checked(schema, tool.place)
        else:
            held, places = as_far_as_held(schema, tool.place)
            unbound += places
    except SchemaRefused as error:
        if tool.place.endswith(".format"):  # of a custom tool, whose schema is none of the caller's
            error.place, error.keyword = tool.place, ""
        raise shape_refused(error) from None
    return msgspec.structs.replace(tool, parameters=held)
