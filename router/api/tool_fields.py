"""Tools in a chat's body: what the model may call, and what callers leave to it. Pure."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from router.api.body import require
from router.api.known_elsewhere import unsupported
from router.tools.tools import Tool, ToolMode, Tools

MAX_TOOLS = 512

FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}\Z")]


class OfferedFunction(msgspec.Struct, frozen=True):
    """parameters: a JSON schema of an object. strict: arguments always keep to it."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OfferedTool(msgspec.Struct, frozen=True):
    """Of the kinds that OpenAI has, `function` alone is served."""

    type: str
    function: OfferedFunction | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class FunctionChoice(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """The model must call this function."""

    function: NamedFunction


class AllowedTool(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    function: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    """The model sees all tools, and calls these alone."""

    allowed_tools: AllowedTools


OfferedTools = Annotated[list[OfferedTool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice


def tools_of(
    offered: list[OfferedTool] | None, choice: ToolChoice | None, parallel: bool | None
) -> Tools | None:
    """What the model may call; None = nothing, so that its prompt has no tools either.

    Raises RequestError.
    """
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(offered or ()))
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        message = f"{tool.name!r} is the name of an earlier tool, too"
        require(tool.name not in seen, message, f"tools[{i}].function.name")
        seen.add(tool.name)
    demands = choice not in (None, "none", "auto")
    require(tools or not demands, "needs `tools`", "tool_choice")
    if not tools or choice == "none":
        return None
    mode, callable_, named = _chosen(choice, seen)
    return Tools(tools, mode, callable_, named, parallel is not False and not named)


def for_template(tools: Tools) -> list[dict[str, Any]]:
    """As chat templates read them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools.offered
    ]


def _tool(tool: OfferedTool, where: str) -> Tool:
    if tool.type != "function":
        raise unsupported(where, f"tools of type {tool.type[:40]!r} are not known, functions are")
    function = tool.function
    require(function is not None, "expected `function`", where)
    assert function is not None
    return Tool(function.name, function.description, function.parameters, bool(function.strict))


def _chosen(choice: ToolChoice | None, names: set[str]) -> tuple[ToolMode, tuple[str, ...], bool]:
    """The mode, names that may be called (none = all), and whether one was named."""
    if isinstance(choice, FunctionChoice):
        name = choice.function.name
        require(name in names, _no_tool(name), "tool_choice.function.name")
        return "required", (name,), True
    if isinstance(choice, AllowedChoice):
        allowed = choice.allowed_tools
        for i, tool in enumerate(allowed.tools):
            name = tool.function.name
            param = f"tool_choice.allowed_tools.tools[{i}].function.name"
            require(name in names, _no_tool(name), param)
        return allowed.mode, tuple({tool.function.name: 0 for tool in allowed.tools}), False
    return choice or "auto", (), False


def _no_tool(name: str) -> str:
    return f"no tool of `tools` has the name {name[:128]!r}"
