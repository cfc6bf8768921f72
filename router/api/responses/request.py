"""OpenAI's `/v1/responses`: request bodies and their tools. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Meta, to_builtins

from loraplex.adapters.chat.conversation import ReasoningEffort, TemplateOptions, Verbosity
from loraplex.router.api.openai.common import (
    HARMLESS,
    SharedBody,
    adapter_of,
    decode_shared,
    sampling_of,
    with_shared,
)
from loraplex.router.api.request.body import decode_plain, require
from loraplex.router.api.request.custom_tools import CustomFormat, custom_tool
from loraplex.router.api.request.fields import NonNegative, Positive
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.known_elsewhere import (
    Elsewhere,
    check_unknown_parts,
    unsupported,
    without_refused,
)
from loraplex.router.api.request.shapes import check_ends, json_of
from loraplex.router.api.request.tool_fields import (
    MAX_TOOLS,
    Chosen,
    FunctionName,
    as_function,
    offered_tools,
)
from loraplex.router.api.responses.input_items import InputItem, messages_of
from loraplex.router.api.responses.items import (
    SHELL,
    Asked,
    CallKind,
    ReasoningAsked,
    ResponseFormatter,
    ResponseObject,
    ResponseTextForm,
)
from loraplex.router.call import GenerationCall
from loraplex.router.shape.shape import AnyJson, Shape
from loraplex.router.tools.tools import Tool, Tools


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
    """A tool of a request, with the place where it stands. tool: by the name that the model reads.
    where: its place in the body. came: as it came. own_name: within its namespace, if it has one.
    """

    tool: OneTool
    where: str
    came: dict[str, Any]
    namespace: str | None = None
    own_name: str | None = None


class FlatFunction(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """Choice of a function: the model must call it."""

    name: str


class FlatCustom(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    """Choice of a custom tool: the model must call it."""

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


def placed_tools(
    offered: list[FlatTool] | None, plain: list[dict[str, Any]] | None
) -> list[PlacedTool]:
    """Place the tools of namespaces among the others. A name that several have is read with its
    namespace before it. plain: as they came. Raises RequestError."""
    placed: list[PlacedTool] = []
    for i, (tool, came) in enumerate(zip(offered or (), plain or (), strict=True)):
        where, is_space = f"tools[{i}]", tool.type == "namespace"
        require(is_space == bool(tool.tools), "goes with `namespace`", f"{where}.tools")
        if is_space:
            require(tool.name is not None, "expected a name", f"{where}.name")
            placed += _inside(tool, where, came["tools"])
        else:
            placed.append(PlacedTool(tool, where, came))
    require(len(placed) <= MAX_TOOLS, f"expected at most {MAX_TOOLS}, got {len(placed)}", "tools")
    names = Counter(one.tool.name for one in placed)
    return [_distinct(one) if names[one.tool.name] > 1 else one for one in placed]


def _inside(space: FlatTool, where: str, plain: list[dict[str, Any]]) -> Iterator[PlacedTool]:
    """Lists the tools of a namespace. Its description stands before each of theirs."""
    for j, tool in enumerate(space.tools or ()):
        description = "\n".join(text for text in (space.description, tool.description) if text)
        shown = msgspec.structs.replace(tool, description=description)
        yield PlacedTool(shown, f"{where}.tools[{j}]", plain[j], space.name, tool.name)


def _distinct(one: PlacedTool) -> PlacedTool:
    if not one.namespace:
        return one
    name = f"{one.namespace}__{one.own_name}"
    return one._replace(tool=msgspec.structs.replace(one.tool, name=name))


def flat_tools_of(
    offered: list[PlacedTool], choice: FlatChoice | None, parallel: bool | None
) -> Tools | None:
    """Finds the tools that the model may call; None = none. Raises RequestError."""
    tools = tuple(_tool(one.tool, one.where) for one in offered)
    return offered_tools(tools, _chosen(choice), parallel)


def _shown(one: PlacedTool, tool: Tool) -> dict[str, Any]:
    """Returns a tool as templates read it: of a function the fields as they came. tool: it."""
    if one.tool.type != "function":
        return as_function(tool)
    said = {name: value for name, value in one.came.items() if name != "type"}
    if one.namespace:
        said |= {"name": tool.name, "description": tool.description}
    return {"type": "function", "function": said}


def kinds_of(offered: list[PlacedTool]) -> dict[str, CallKind]:
    """Lists by name the tools that are no functions, each with its kind."""
    kinds: dict[str, CallKind] = {}
    for tool in (one.tool for one in offered):
        if tool.type == "custom":
            kinds[tool.name or ""] = "custom"
        elif tool.type == SHELL:
            kinds[SHELL] = "local_shell"
    return kinds


def namespaces_of(offered: list[PlacedTool]) -> dict[str, tuple[str | None, str | None]]:
    """Lists by name the tools of namespaces, each with its namespace and its own name there."""
    spaced = [one for one in offered if one.namespace]
    return {one.tool.name or "": (one.namespace, one.own_name) for one in spaced}


def _tool(tool: OneTool, where: str) -> Tool:
    """Makes a tool: `local_shell`, a custom one or a function. Raises RequestError."""
    place = f"{where}.parameters"
    if tool.type == SHELL:
        return Tool(SHELL, _SHELL_TEXT, _SHELL_SCHEMA, strict=True, place=place)
    if tool.type not in ("function", "custom"):
        known = "functions, custom tools, `local_shell` and namespaces are known"
        raise unsupported(f"{where}.type", f"there is no tool {tool.type[:40]!r}: {known}")
    require(tool.name is not None, "expected a name", f"{where}.name")
    if tool.type == "custom":
        return custom_tool(tool.name or "", tool.description, tool.format, f"{where}.format")
    require(tool.format is None, "goes with custom tools", f"{where}.format")
    return Tool(tool.name or "", tool.description, tool.parameters, bool(tool.strict), place)


def _chosen(choice: FlatChoice | None) -> Chosen:
    if isinstance(choice, FlatFunction | FlatCustom):
        return Chosen("required", ((choice.name, "tool_choice.name"),), True)
    if isinstance(choice, FlatAllowed):
        names = [(tool.name, f"tool_choice.tools[{i}].name") for i, tool in enumerate(choice.tools)]
        return Chosen(choice.mode, tuple(names))
    return Chosen(choice or "auto")


_LOGPROBS = "message.output_text.logprobs"
# From the second on: parts of what no answer has, or has anyway.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Metadata = Annotated[dict[str, str], Meta(max_length=16)]


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    include_obfuscation: bool | None = None


class ReasoningFields(msgspec.Struct, frozen=True):
    """Says how hard the model reasons. effort: where the chat template reads it. summary: of no
    effect, as its older name: answers have the reasoning itself.
    """

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(msgspec.Struct, frozen=True):
    """The form of the answer's text. schema: of `json_schema`; strict or not, it is kept to."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class TextFields(msgspec.Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


_NOT_STORED = "answers are not stored here, as --responses-keep-s says"
_SEND_ALL = "send all items as `input`"
_FORM = Elsewhere((), "use `text.format`")
# Fields that are not served, by the values that ask for nothing; null does, too.
REFUSED = {
    "conversation": Elsewhere((), f"no conversations are stored: {_SEND_ALL}"),
    "prompt": Elsewhere((), "no prompts are stored: send `instructions` and `input`"),
    "context_management": Elsewhere(([],), "send the items that shall be read"),
    # What fits is not cut; what does not is refused anyway.
    "truncation": Elsewhere(("disabled", "auto"), "`truncate_prompt_tokens` cuts a prompt"),
    **dict.fromkeys(("response_format", "structured_outputs", "json_schema"), _FORM),
    **dict.fromkeys(("guided_json", "guided_json_object"), _FORM),
    "reasoning_effort": Elsewhere((), "use `reasoning.effort`"),
    "messages": Elsewhere((), "use `input`"),
    "max_tokens": Elsewhere((), "use `max_output_tokens`"),
    "max_completion_tokens": Elsewhere((), "use `max_output_tokens`"),
}
# The same where no answers are stored.
UNSTORED = {
    "background": Elsewhere((False,), _NOT_STORED),
    "previous_response_id": Elsewhere((), f"{_NOT_STORED}: {_SEND_ALL}"),
}


class ResponsesBody(SharedBody, frozen=True, kw_only=True):
    """Body of a request to `/v1/responses`. input: a text of the user's, or items. instructions:
    the system's message before them.

    max_output_tokens: reasoning and calls included; absent = all that fits. metadata: the answer
    repeats it. include: the logprobs of the text, or what no answer has; top_logprobs goes with the
    former. chat_template_kwargs: an extension: further variables of the chat template. store: true
    unless it is false, where answers are stored; background, previous_response_id: there alone.
    """

    # max_tool_calls bounds calls of hosted tools, of which there are none.
    harmless: ClassVar[frozenset[str]] = HARMLESS | {"max_tool_calls"}
    refused: ClassVar[Mapping[str, Elsewhere]] = REFUSED

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    metadata: Metadata | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: FlatTools | None = None
    tool_choice: FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[Includable] | None = None
    top_logprobs: NonNegative | None = None
    reasoning: ReasoningFields | None = None
    text: TextFields | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None


def parse(
    body: bytes,
    limits: ApiLimits,
    bearer: str | None = None,
    name: str | None = None,
    earlier: Sequence[InputItem] = (),
) -> ApiRequest:
    """Reads the body of a request to `/v1/responses`. name: of an answer that may be stored, its id
    behind the prefix. earlier: all items of its conversation before the request's own. Raises
    RequestError.
    """
    plain = decode_plain(body)
    read = without_refused(plain, REFUSED if name is not None else REFUSED | UNSTORED)
    request = decode_shared(read, ResponsesBody, limits)
    _check_parts(plain, request)
    if request.background:
        require(request.store is not False, "needs `store`", "background")
        if request.stream:
            raise unsupported("stream", "an answer in the background is asked for until it is over")
    sampling = sampling_of(
        request, limits, max_tokens=request.max_output_tokens, logprobs=_logprobs(request)
    )
    offered = placed_tools(request.tools, plain.get("tools"))
    tools = flat_tools_of(offered, request.tool_choice, request.parallel_tool_calls)
    call = GenerationCall(
        api="responses",
        prompts=(),
        messages=_messages(request, offered, limits, earlier),
        adapter=adapter_of(request, limits, bearer),
        sampling=sampling,
        max_tokens=request.max_output_tokens,
        add_special_tokens=False,
        template=_template(request, offered, tools),
        tools=tools,
        divides_reasoning=True,
        shape=_shape(request),
        unbound=() if tools is None else tools.unheld,
    )
    asked = _asked(request, offered, call, None if request.store is False else name)
    return ApiRequest(with_shared(call, request, limits), ResponseFormatter, asked)


def _logprobs(request: ResponsesBody) -> int | None:
    """How many likeliest tokens a place has; None = no logprobs. Raises RequestError."""
    is_wanted, top = _LOGPROBS in (request.include or ()), request.top_logprobs or 0
    require(is_wanted or not top, f"needs {_LOGPROBS!r} in `include`", "top_logprobs")
    return top if is_wanted else None


def _messages(
    request: ResponsesBody,
    offered: list[PlacedTool],
    limits: ApiLimits,
    earlier: Sequence[InputItem],
) -> list[dict[str, Any]]:
    given, most = request.input, limits.max_messages
    count = len(earlier) + (len(given) if isinstance(given, list) else 1)
    require(count <= most, f"expected at most {most} items, got {count}", "input")
    read = {own: name for name, own in namespaces_of(offered).items()}

    def named(items: Sequence[InputItem]) -> list[InputItem]:
        return [
            msgspec.structs.replace(item, name=read.get((item.namespace, item.name), item.name))
            if item.namespace
            else item
            for item in items
        ]

    items = given if isinstance(given, str) else named(given)
    return messages_of(request.instructions, items, named(earlier))


def _check_parts(plain: dict[str, Any], request: ResponsesBody) -> None:
    """Checks that the body's nested objects have no unknown fields, and that `stream_options` comes
    with `stream`. Raises RequestError.
    """
    for name, kind in _PARTS.items():
        outer, _, inner = name.partition(".")
        part = plain.get(outer) or {}
        part = (part.get(inner) or {}) if inner else part
        check_unknown_parts(part, kind.__struct_fields__, f"{name}.")
    has_options = bool(plain.get("stream_options"))
    require(request.stream or not has_options, "only allowed when `stream` is true", _OPTIONS)


_OPTIONS = "stream_options"
_PARTS: dict[str, type[msgspec.Struct]] = {
    _OPTIONS: ResponseStreamOptions,
    "reasoning": ReasoningFields,
    "text": TextFields,
    "text.format": TextFormat,
}


def _shape(request: ResponsesBody) -> Shape | None:
    """Reads the JSON that the text's format asks for; None = plain text. Raises RequestError."""
    asked, where = _format(request), "text.format"
    if asked is None:
        return None
    schema, is_schema = asked.schema, asked.type == "json_schema"
    require(is_schema == (schema is not None), "goes with `json_schema`", f"{where}.schema")
    if asked.type == "text":
        return None
    ignores = "ignore_eos" if request.ignore_eos else "ignore_eos_token"
    shape = json_of(schema, f"{where}.schema") or AnyJson(where)
    check_ends(shape, bool(request.ignore_eos or request.ignore_eos_token), ignores)
    return shape


def _format(request: ResponsesBody) -> TextFormat | None:
    return None if request.text is None else request.text.format


def _template(
    request: ResponsesBody, offered: list[PlacedTool], tools: Tools | None
) -> TemplateOptions:
    shown = None if tools is None else list(map(_shown, offered, tools.offered))
    return TemplateOptions(
        tools=shown,
        in_loop=bool(request.tools),
        effort=None if request.reasoning is None else request.reasoning.effort,
        verbosity=None if request.text is None else request.text.verbosity,
        variables=request.chat_template_kwargs or {},
    )


def _asked(
    request: ResponsesBody, offered: list[PlacedTool], call: GenerationCall, stored: str | None
) -> Asked:
    """Collects what the answer will need of its request. stored: its name, where it is."""
    begun = ResponseObject(
        id="",
        created_at=0,
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model="",
        output=[],
        temperature=call.sampling.temperature,
        top_p=call.sampling.top_p,
        usage=None,
        user=request.user,
        tools=tuple(map(_repeated_tool, request.tools or ())),
        tool_choice=to_builtins(request.tool_choice or "auto"),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning=ReasoningAsked(call.template.effort),
        text=ResponseTextForm(_repeated(_format(request)) or {"type": "text"}),
        previous_response_id=request.previous_response_id,
        store=stored is not None,
        background=bool(request.background),
        top_logprobs=call.sampling.logprobs or 0,
    )
    return Asked(
        begun=begun,
        id=stored or request.request_id,
        logprobs=call.sampling.logprobs,
        kinds=kinds_of(offered),
        namespaces=namespaces_of(offered),
    )


def _repeated_tool(tool: OneTool) -> dict[str, Any]:
    """Writes a tool as the answer repeats it. A function's optional fields are null where they were
    not said, others' are left out.
    """
    said: dict[str, Any] = to_builtins(tool)
    if isinstance(tool, FlatTool) and tool.tools:
        inside = [_repeated_tool(one) for one in tool.tools]
        said |= {"tools": inside, "description": tool.description or ""}
    is_function = tool.type == "function"
    return {
        name: value
        for name, value in said.items()
        if value is not None or (is_function and name not in ("format", "tools"))
    }


def _repeated(asked: TextFormat | None) -> dict[str, Any] | None:
    """Returns the parts of a form that were said."""
    if asked is None:
        return None
    said: dict[str, Any] = to_builtins(asked)
    return {name: value for name, value in said.items() if value is not None}
