"""Tools in a chat's body: what the model may call, and what callers leave to it. Pure."""

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from loraplex.router.api.request.body import require, typed
from loraplex.router.api.request.known_elsewhere import unsupported
from loraplex.router.tools.tools import Tool, ToolMode, Tools

MAX_TOOLS = 512

FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}\Z")]


class OfferedFunction(msgspec.Struct, frozen=True):
    """Function that the model may call. parameters: a JSON schema of an object. strict: arguments
    always keep to it.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OfferedTool(msgspec.Struct, frozen=True):
    """A tool. OpenAI has further types; `function` alone is served. Without a type it is meant."""

    type: str = "function"
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


# As they came, since templates read them so: each an `OfferedTool` or `OfferedFunction`.
_Tool, _Function = (
    Meta(extra_json_schema={"$ref": f"#/components/schemas/{kind}"})
    for kind in ("OfferedTool", "OfferedFunction")
)
OfferedTools = Annotated[list[Annotated[dict[str, Any], _Tool]], Meta(max_length=MAX_TOOLS)]
OfferedFunctions = Annotated[list[Annotated[dict[str, Any], _Function]], Meta(max_length=MAX_TOOLS)]
# A text that is no mode is the name of a function, as TGI has it.
ToolChoice = str | FunctionChoice | AllowedChoice
# Of OpenAI's older `functions`.
FunctionCallChoice = Literal["none", "auto"] | NamedFunction
_MODES: dict[str, ToolMode] = {mode: mode for mode in get_args(ToolMode)}


class _Offered(msgspec.Struct, frozen=True):
    tools: list[OfferedTool] = []
    functions: list[OfferedFunction] = []


class Chosen(msgspec.Struct, frozen=True):
    """The meaning of a `tool_choice`. names: tools that may be called, each with its field; () =
    all. named: the caller named one."""

    mode: ToolMode = "auto"
    names: tuple[tuple[str, str], ...] = ()
    named: bool = False


def tools_of(
    offered: list[dict[str, Any]] | None, choice: ToolChoice | None, parallel: bool | None
) -> Tools | None:
    """Finds the tools that the model may call; None = none, so that its prompt has none either.
    Raises RequestError."""
    read = typed({"tools": offered or []}, _Offered).tools
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(read))
    return offered_tools(tools, _chosen(choice), parallel)


def functions_of(offered: list[dict[str, Any]], choice: FunctionCallChoice | None) -> Tools | None:
    """Finds the tools of OpenAI's older `functions`, of which one is called at most. Raises
    RequestError.
    """
    read = typed({"functions": offered}, _Offered).functions
    chosen = Chosen("none" if choice == "none" else "auto")
    if isinstance(choice, NamedFunction):
        chosen = Chosen("required", ((choice.name, "function_call.name"),), True)
    tools = tuple(_of_function(each, f"functions[{i}]") for i, each in enumerate(read))
    return offered_tools(tools, chosen, False)


def offered_tools(tools: tuple[Tool, ...], chosen: Chosen, parallel: bool | None) -> Tools | None:
    """Checks the tools of a request, and collects them with the choice among them; None = none may
    be called. Raises RequestError.
    """
    seen: set[str] = set()
    for tool in tools:
        message = f"{tool.name!r} is the name of an earlier tool, too"
        require(tool.name not in seen, message, f"{tool.place.rpartition('.')[0]}.name")
        seen.add(tool.name)
    demands = chosen.names or chosen.mode == "required"
    require(tools or not demands, "needs `tools`", "tool_choice")
    if not tools or chosen.mode == "none":
        return None
    for name, param in chosen.names:
        require(name in seen, f"no tool has the name {name[:128]!r}", param)
    callable_ = tuple(dict.fromkeys(name for name, _ in chosen.names))
    several = parallel is not False and not chosen.named
    return Tools(tools, chosen.mode, callable_, chosen.named, several)


def _tool(tool: OfferedTool, where: str) -> Tool:
    if tool.type != "function":
        raise unsupported(where, f"tools of type {tool.type[:40]!r} are not known, functions are")
    function = tool.function
    require(function is not None, "expected `function`", where)
    assert function is not None
    return _of_function(function, f"{where}.function")


def _of_function(function: OfferedFunction, where: str) -> Tool:
    place, strict = f"{where}.parameters", bool(function.strict)
    return Tool(function.name, function.description, function.parameters, strict, place)


def _chosen(choice: ToolChoice | None) -> Chosen:
    if isinstance(choice, FunctionChoice):
        return Chosen("required", ((choice.function.name, "tool_choice.function.name"),), True)
    if isinstance(choice, AllowedChoice):
        allowed = choice.allowed_tools
        where = "tool_choice.allowed_tools.tools"
        names = [
            (t.function.name, f"{where}[{i}].function.name") for i, t in enumerate(allowed.tools)
        ]
        return Chosen(allowed.mode, tuple(names))
    if choice is None:
        return Chosen()
    mode = _MODES.get(choice)
    return Chosen(mode) if mode else Chosen("required", ((choice, "tool_choice"),), True)
