"""Tools in a chat's body: what the model may call, and what callers leave to it. Pure."""

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import astuple

from loraplex.router.api.request.body import require, typed
from loraplex.router.api.request.custom_tools import CustomFormat, custom_tool
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


class CustomGrammar(msgspec.Struct, frozen=True):
    syntax: Literal["regex", "lark"]
    definition: str


class OfferedFormat(msgspec.Struct, frozen=True):
    """The form of a custom tool's text."""

    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None


class OfferedCustom(msgspec.Struct, frozen=True):
    """Custom tool, whose call is a text."""

    name: FunctionName
    description: str | None = None
    format: OfferedFormat | None = None


class OfferedTool(msgspec.Struct, frozen=True):
    """A tool: a function, which is meant without a type, or a custom tool."""

    type: str = "function"
    function: OfferedFunction | None = None
    custom: OfferedCustom | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class FunctionChoice(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """The model must call this function."""

    function: NamedFunction


class CustomChoice(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    """The model must call this custom tool."""

    custom: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice | CustomChoice], Meta(min_length=1, max_length=MAX_TOOLS)]


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
ToolChoice = str | FunctionChoice | CustomChoice | AllowedChoice
# Of OpenAI's older `functions`.
FunctionCallChoice = Literal["none", "auto"] | NamedFunction
_MODES: dict[str, ToolMode] = {mode: mode for mode in get_args(ToolMode)}


class _Offered(msgspec.Struct, frozen=True):
    tools: list[OfferedTool] = []
    functions: list[OfferedFunction] = []


def as_function(tool: Tool) -> dict[str, Any]:
    """Describes to templates as a function what is none."""
    said = {"name": tool.name, "description": tool.description or ""}
    return {"type": "function", "function": {**said, "parameters": tool.parameters}}


def shown_tools(came: list[dict[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    """Returns tools as templates read them: functions as they came, others as functions."""
    names = custom_names(came)
    both = zip(came, tools.offered, strict=True)
    return [as_function(tool) if tool.name in names else plain for plain, tool in both]


def custom_names(offered: list[dict[str, Any]] | None) -> frozenset[str]:
    """Lists the names of custom tools among checked ones."""
    kinds = (tool for tool in offered or () if tool.get("type") == "custom")
    return frozenset(tool["custom"]["name"] for tool in kinds)


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
    if choice == "any" and all(tool.name != choice for tool in tools):
        choice = "required"  # Mistral's and Anthropic's name of it
    return offered_tools(tools, _chosen(choice), parallel)


def typed_choice(plain: Any) -> Any:
    """Rewrites a plain `tool_choice` of another API as that of a chat: without a type, or flat."""
    if not isinstance(plain, dict):
        return plain
    kind, name = plain.get("type", "function"), plain.get("name")
    if kind in (*_MODES, "any") and len(plain) == 1:
        return kind
    if kind in ("function", "tool") and name is not None and "function" not in plain:
        return {"type": "function", "function": {"name": name}}
    return {"type": kind, **plain} if "function" in plain else plain


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
    if tool.type == "custom":
        return _of_custom(tool.custom, f"{where}.custom")
    if tool.type != "function":
        known = "functions and custom tools are"
        raise unsupported(where, f"tools of type {tool.type[:40]!r} are not known, {known}")
    function = tool.function
    require(function is not None, "expected `function`", where)
    assert function is not None
    return _of_function(function, f"{where}.function")


def _of_custom(custom: OfferedCustom | None, where: str) -> Tool:
    require(custom is not None, "is needed", where)
    assert custom is not None
    place, form = f"{where}.format", custom.format or OfferedFormat("text")
    has_grammar = form.grammar is not None
    require(has_grammar == (form.type == "grammar"), "goes with `grammar`", f"{place}.grammar")
    syntax, definition = (None, None) if form.grammar is None else astuple(form.grammar)
    return custom_tool(
        custom.name, custom.description, CustomFormat(form.type, syntax, definition), place
    )


def _of_function(function: OfferedFunction, where: str) -> Tool:
    place, strict = f"{where}.parameters", bool(function.strict)
    return Tool(function.name, function.description, function.parameters, strict, place)


def _named(choice: FunctionChoice | CustomChoice, where: str) -> tuple[str, str]:
    """Returns a tool's name, and where the choice has it."""
    if isinstance(choice, FunctionChoice):
        return choice.function.name, f"{where}.function.name"
    return choice.custom.name, f"{where}.custom.name"


def _chosen(choice: ToolChoice | None) -> Chosen:
    if isinstance(choice, FunctionChoice | CustomChoice):
        return Chosen("required", (_named(choice, "tool_choice"),), True)
    if isinstance(choice, AllowedChoice):
        allowed = choice.allowed_tools
        where = "tool_choice.allowed_tools.tools"
        names = (_named(tool, f"{where}[{i}]") for i, tool in enumerate(allowed.tools))
        return Chosen(allowed.mode, tuple(names))
    if choice is None:
        return Chosen()
    mode = _MODES.get(choice)
    return Chosen(mode) if mode else Chosen("required", ((choice, "tool_choice"),), True)
