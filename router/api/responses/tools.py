"""Tools as `/v1/responses` has them: flat. Pure."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from router.api.request.body import require
from router.api.request.known_elsewhere import unsupported
from router.api.request.tool_fields import MAX_TOOLS, Chosen, FunctionName, offered_tools
from router.tools.tools import Tool, Tools


class FlatTool(msgspec.Struct, frozen=True):
    """A function: of hosted tools there are none. parameters: a JSON schema of an object. strict:
    arguments always keep to it."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatFunction(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """As a choice: the model must call it."""

    name: str


class FlatAllowed(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    """The model sees all tools, and calls these alone."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


FlatTools = Annotated[list[FlatTool], Meta(max_length=MAX_TOOLS)]
FlatChoice = Literal["none", "auto", "required"] | FlatFunction | FlatAllowed


def flat_tools_of(
    offered: list[FlatTool] | None, choice: FlatChoice | None, parallel: bool | None
) -> Tools | None:
    """What the model may call; None = nothing. Raises RequestError."""
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(offered or ()))
    return offered_tools(tools, _chosen(choice), parallel, "name")


def _tool(tool: FlatTool, where: str) -> Tool:
    if tool.type != "function":
        hint = f"there is no tool {tool.type[:40]!r}: functions are known"
        raise unsupported(f"{where}.type", hint)
    require(tool.name is not None, "expected a name", f"{where}.name")
    return Tool(tool.name or "", tool.description, tool.parameters, bool(tool.strict))


def _chosen(choice: FlatChoice | None) -> Chosen:
    if isinstance(choice, FlatFunction):
        return Chosen("required", ((choice.name, "tool_choice.name"),), True)
    if isinstance(choice, FlatAllowed):
        names = [(tool.name, f"tool_choice.tools[{i}].name") for i, tool in enumerate(choice.tools)]
        return Chosen(choice.mode, tuple(names))
    return Chosen(choice or "auto")
