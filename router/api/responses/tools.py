"""Tools as `/v1/responses` has them: flat. Pure."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from loraplex.router.api.request.body import require
from loraplex.router.api.request.known_elsewhere import unsupported
from loraplex.router.api.request.tool_fields import MAX_TOOLS, Chosen, FunctionName, offered_tools
from loraplex.router.api.responses.calls import SHELL, CallKind
from loraplex.router.tools.tools import Tool, Tools


class CustomFormat(msgspec.Struct, frozen=True):
    """The form of a custom tool's text. definition: a regular expression or a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["regex", "lark"] | None = None
    definition: str | None = None


class OneTool(msgspec.Struct, frozen=True):
    """A function, a custom tool, whose call is a text, or `local_shell`, which the caller runs: of
    hosted tools there are none. parameters: a JSON schema of an object. strict: arguments always
    keep to it. format: of a custom tool's text."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None


class FlatTool(OneTool, frozen=True):
    """One tool, or a `namespace` of functions and custom tools."""

    tools: list[OneTool] | None = None


class PlacedTool(NamedTuple):
    """tool: by the name that the model reads. where: its place in the body. own_name: within its
    namespace, if it has one."""

    tool: OneTool
    where: str
    namespace: str | None = None
    own_name: str | None = None


class FlatFunction(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """As a choice: the model must call it."""

    name: str


class FlatCustom(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    """As a choice: the model must call it."""

    name: str


class FlatAllowed(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    """The model sees all tools, and calls these alone."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatFunction | FlatCustom], Meta(min_length=1, max_length=MAX_TOOLS)]


FlatTools = Annotated[list[FlatTool], Meta(max_length=MAX_TOOLS)]
FlatChoice = Literal["none", "auto", "required"] | FlatFunction | FlatCustom | FlatAllowed
_SHELL_SCHEMA = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer", "minimum": 1},
    },
    "required": ["command"],
    "additionalProperties": False,
}
_SHELL_TEXT = "Runs a program on the user's machine: its name, then its arguments."


def placed_tools(offered: list[FlatTool] | None) -> list[PlacedTool]:
    """Place the tools of namespaces among the others. A name that several have is read with its
    namespace before it. Raises RequestError."""
    placed: list[PlacedTool] = []
    for i, tool in enumerate(offered or ()):
        where, is_space = f"tools[{i}]", tool.type == "namespace"
        require(is_space == bool(tool.tools), "goes with `namespace`", f"{where}.tools")
        if is_space:
            require(tool.name is not None, "expected a name", f"{where}.name")
            placed += _inside(tool, where)
        else:
            placed.append(PlacedTool(tool, where))
    require(len(placed) <= MAX_TOOLS, f"expected at most {MAX_TOOLS}, got {len(placed)}", "tools")
    names = Counter(one.tool.name for one in placed)
    return [_distinct(one) if names[one.tool.name] > 1 else one for one in placed]


def _inside(space: FlatTool, where: str) -> Iterator[PlacedTool]:
    """Its description stands before each of its tools'."""
    for j, tool in enumerate(space.tools or ()):
        description = "\n".join(text for text in (space.description, tool.description) if text)
        shown = msgspec.structs.replace(tool, description=description)
        yield PlacedTool(shown, f"{where}.tools[{j}]", space.name, tool.name)


def _distinct(one: PlacedTool) -> PlacedTool:
    if not one.namespace:
        return one
    name = f"{one.namespace}__{one.own_name}"
    return one._replace(tool=msgspec.structs.replace(one.tool, name=name))


def flat_tools_of(
    offered: list[PlacedTool], choice: FlatChoice | None, parallel: bool | None
) -> Tools | None:
    """What the model may call; None = nothing. Raises RequestError."""
    tools = tuple(_tool(one.tool, one.where) for one in offered)
    places = [one.where for one in offered]
    return offered_tools(tools, _chosen(choice), parallel, "name", places)


def kinds_of(offered: list[PlacedTool]) -> dict[str, CallKind]:
    """By name, the tools that are no functions."""
    kinds: dict[str, CallKind] = {}
    for tool in (one.tool for one in offered):
        if tool.type == "custom":
            kinds[tool.name or ""] = "custom"
        elif tool.type == SHELL:
            kinds[SHELL] = "local_shell"
    return kinds


def namespaces_of(offered: list[PlacedTool]) -> dict[str, tuple[str | None, str | None]]:
    """By name, the namespaces of tools that have one, and their own names there."""
    spaced = [one for one in offered if one.namespace]
    return {one.tool.name or "": (one.namespace, one.own_name) for one in spaced}


def unheld_forms(offered: list[PlacedTool]) -> tuple[str, ...]:
    """Grammars that bind nothing: a call's text is written as JSON, of which they say nothing."""
    forms = [(one.where, one.tool.format) for one in offered]
    return tuple(f"{where}.format" for where, form in forms if form and form.syntax == "lark")


def _tool(tool: OneTool, where: str) -> Tool:
    """Raises RequestError."""
    if tool.type == SHELL:
        return Tool(SHELL, _SHELL_TEXT, _SHELL_SCHEMA, strict=True)
    if tool.type not in ("function", "custom"):
        known = "functions, custom tools, `local_shell` and namespaces are known"
        raise unsupported(f"{where}.type", f"there is no tool {tool.type[:40]!r}: {known}")
    require(tool.name is not None, "expected a name", f"{where}.name")
    if tool.type == "custom":
        return _custom(tool, where)
    require(tool.format is None, "goes with custom tools", f"{where}.format")
    return Tool(tool.name or "", tool.description, tool.parameters, bool(tool.strict))


def _custom(tool: OneTool, where: str) -> Tool:
    """A function whose one argument is the text. Raises RequestError."""
    form, text = tool.format or CustomFormat("text"), {"type": "string"}
    is_grammar, definition = form.type == "grammar", form.definition or ""
    for name in ("syntax", "definition"):
        has = getattr(form, name) is not None
        require(has == is_grammar, "goes with `grammar`", f"{where}.format.{name}")
    if form.syntax == "regex":
        text["pattern"] = f"^(?:{definition})$"
    elif is_grammar:
        text["description"] = f"A text of this grammar, in Lark's notation:\n{definition}"
    schema = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    return Tool(tool.name or "", tool.description, schema, strict=form.syntax == "regex")


def _chosen(choice: FlatChoice | None) -> Chosen:
    if isinstance(choice, FlatFunction | FlatCustom):
        return Chosen("required", ((choice.name, "tool_choice.name"),), True)
    if isinstance(choice, FlatAllowed):
        names = [(tool.name, f"tool_choice.tools[{i}].name") for i, tool in enumerate(choice.tools)]
        return Chosen(choice.mode, tuple(names))
    return Chosen(choice or "auto")
