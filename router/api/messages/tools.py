"""Tools as `/v1/messages` has them. Pure."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from loraplex.router.api.request.body import require
from loraplex.router.api.request.known_elsewhere import Elsewhere, check_refused, unsupported
from loraplex.router.api.request.tool_fields import MAX_TOOLS, Chosen, FunctionName, offered_tools
from loraplex.router.tools.tools import Tool, Tools


class InputTool(msgspec.Struct, frozen=True):
    """A tool of the caller's: of the server's there are none. input_schema: of an object. strict:
    arguments always keep to it. `defer_loading` changes nothing: the model sees all tools."""

    name: FunctionName
    type: str | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class AutoChoice(msgspec.Struct, frozen=True, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, frozen=True, tag_field="type", tag="any"):
    """The model must call a tool."""

    disable_parallel_tool_use: bool | None = None


class NamedChoice(msgspec.Struct, frozen=True, tag_field="type", tag="tool"):
    """The model must call this tool, once."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(msgspec.Struct, frozen=True, tag_field="type", tag="none"):
    """The model calls no tool."""


InputTools = Annotated[list[InputTool], Meta(max_length=MAX_TOOLS)]
MessageToolChoice = AutoChoice | AnyChoice | NamedChoice | NoChoice

# Fields of a tool that would change what the model sees, by what asks for nothing beside null.
REFUSED_OF_TOOL = {
    "input_examples": Elsewhere(([],), "say so in `description`"),
    "allowed_callers": Elsewhere(([], ["direct"]), "the model alone calls tools"),
}


def input_tools_of(
    offered: list[InputTool] | None,
    choice: MessageToolChoice | None,
    plain: list[dict[str, Any]] | None,
) -> Tools | None:
    """What the model may call; None = nothing. plain: the tools as they came. Raises
    RequestError."""
    for i, fields in enumerate(plain or ()):
        check_refused(fields, REFUSED_OF_TOOL, f"tools[{i}].")
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(offered or ()))
    return offered_tools(tools, _chosen(choice), _is_parallel(choice), "name")


def _tool(tool: InputTool, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        hint = f"there is no tool {tool.type[:40]!r}: tools of the caller's are known"
        raise unsupported(f"{where}.type", hint)
    require(tool.input_schema is not None, "is needed", f"{where}.input_schema")
    return Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict))


def _chosen(choice: MessageToolChoice | None) -> Chosen:
    if isinstance(choice, NamedChoice):
        return Chosen("required", ((choice.name, "tool_choice.name"),), True)
    if isinstance(choice, AnyChoice):
        return Chosen("required")
    return Chosen("none" if isinstance(choice, NoChoice) else "auto")


def _is_parallel(choice: MessageToolChoice | None) -> bool:
    return choice is None or not getattr(choice, "disable_parallel_tool_use", None)
