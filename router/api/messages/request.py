"""Anthropic's `/v1/messages`: request bodies, their tools, and their messages as those of a chat.
Pure."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from loraplex.adapters.chat.conversation import ReasoningEffort, TemplateOptions
from loraplex.router.api.messages.blocks import MessageFormatter, MessageOptions
from loraplex.router.api.openai.common import (
    HARMLESS,
    SharedBody,
    adapter_of,
    decode_shared,
    sampling_of,
    with_shared,
)
from loraplex.router.api.request.body import decode_plain, require
from loraplex.router.api.request.chat_messages import (
    ContentPart,
    FilePart,
    FunctionCall,
    Message,
    MessagePart,
    MessageToolCall,
    join_assistant,
    text_part,
    to_template,
)
from loraplex.router.api.request.fields import BOUNDS, Positive, StopString
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.known_elsewhere import (
    Elsewhere,
    check_refused,
    check_unknown_parts,
    unsupported,
    without_refused,
)
from loraplex.router.api.request.shapes import json_of
from loraplex.router.api.request.tool_fields import (
    MAX_TOOLS,
    Chosen,
    FunctionName,
    offered_tools,
)
from loraplex.router.call import GenerationCall
from loraplex.router.shape.shape import Shape
from loraplex.router.tools.tools import Tool, Tools

Speaker = Literal["user", "assistant", "system"]
Shown = str | list[MessagePart]

# Blocks that one speaker alone may send.
_SPEAKERS: dict[str, Speaker] = {
    "image": "user",
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_use": "assistant",
    "tool_result": "user",
}
_KNOWN = "`text`, `image`, `thinking`, `tool_use` and `tool_result` are"
_SHOWN = ("text", "image")


class ImageSource(msgspec.Struct, frozen=True):
    """The place of a picture: data of a media type, an address, or an uploaded file."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class ResultPart(msgspec.Struct, frozen=True):
    """A text, a picture, or the name of a tool that the model may use now: it sees all tools
    anyway."""

    type: str
    text: str | None = None
    tool_name: str | None = None
    source: ImageSource | str | None = None


class InputBlock(msgspec.Struct, frozen=True):
    """`text`, `image`, `thinking`, `redacted_thinking` (of which nothing can be read), `tool_use`
    or `tool_result`: of the other kinds none is served.

    Fields that are not here are ignored: clients send blocks of an answer back with all that they
    had, and what is cached does not depend on `cache_control`. source: of a picture, or the text
    that some kind which is not served has. content,
    is_error: of a result.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    source: ImageSource | str | None = None
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None


class Turn(msgspec.Struct, frozen=True):
    role: Speaker
    content: str | Annotated[list[InputBlock], Meta(extra_json_schema={"minItems": 1})]


class _Placed(msgspec.Struct, frozen=True):
    """A block, who says it, and where it stands in the body."""

    role: Speaker
    block: InputBlock
    where: str


def messages_of(system: str | list[ContentPart] | None, turns: list[Turn]) -> list[dict[str, Any]]:
    """Messages for the template. Texts and pictures of one speaker that stand together are one
    message's. Raises RequestError."""
    messages: list[Message] = []
    if system:
        texts = [system] if isinstance(system, str) else _texts(system, "system")
        messages.append(Message("system", _joined(MessagePart("text", text) for text in texts)))
    blocks = [placed for i, turn in enumerate(turns) for placed in _blocks(turn, f"messages[{i}]")]
    for (role, is_shown), group in groupby(blocks, _kind):
        if is_shown:
            _add_shown(messages, role, _joined(map(_part, group)))
        else:
            for placed in group:
                _add(messages, placed)
    return to_template(messages)


def is_begun(turns: list[Turn]) -> bool:
    """Checks whether the last message is what the answer goes on from. Raises RequestError."""
    last = turns[-1]
    if last.role != "assistant":
        return False
    ends_in_text = isinstance(last.content, str) or last.content[-1].type == "text"
    where = f"messages[{len(turns) - 1}].content"
    require(ends_in_text, "an answer goes on from a text alone", where)
    return True


def _blocks(turn: Turn, where: str) -> Iterator[_Placed]:
    where, content = f"{where}.content", turn.content
    if isinstance(content, str):
        yield _Placed(turn.role, InputBlock("text", content), where)
        return
    require(content, "expected a text or a list of at least one block", where)
    for i, block in enumerate(content):
        yield _Placed(turn.role, block, f"{where}[{i}]")


def _kind(placed: _Placed) -> tuple[Speaker, bool]:
    """Returns who says a block, and whether it is a text or a picture. Raises RequestError."""
    kind = placed.block.type
    speaker = _SPEAKERS.get(kind, placed.role)
    require(placed.role == speaker, f"only of the role {speaker!r}", f"{placed.where}.type")
    return placed.role, kind in _SHOWN


def _add_shown(messages: list[Message], role: Speaker, content: Shown) -> None:
    if role == "assistant":
        join_assistant(messages, "content", content)
    else:
        messages.append(Message(role, content))


def _add(messages: list[Message], placed: _Placed) -> None:
    block, where = placed.block, placed.where
    if block.type not in _SPEAKERS:
        kind = f"content of type {block.type[:40]!r} is not known, {_KNOWN}"
        raise unsupported(f"{where}.type", kind)
    if block.type == "thinking":
        join_assistant(messages, "reasoning_content", _said(block, "thinking", where))
    elif block.type == "redacted_thinking":
        return
    elif block.type == "tool_use":
        join_assistant(messages, "tool_calls", [_call(block, where)])
    else:
        call_id = _said(block, "tool_use_id", where)
        messages.append(Message("tool", _result(block, where), tool_call_id=call_id))


def _call(block: InputBlock, where: str) -> MessageToolCall:
    require(block.input is not None, "expected an object", f"{where}.input")
    function = FunctionCall(_said(block, "name", where), block.input or {})
    return MessageToolCall(function, _said(block, "id", where))


def _result(block: InputBlock, where: str) -> Shown:
    """Returns the texts and pictures of a tool's result. One that failed says so in its text:
    templates know of no such mark.
    """
    where = f"{where}.content"
    given = block.content or ""
    if isinstance(given, str):
        parts = [MessagePart("text", given)]
    else:
        parts = [_result_part(part, f"{where}[{i}]") for i, part in enumerate(given)]
    if block.is_error:
        text = MessagePart("text", f"Error: {parts[0].text or ''}")
        parts[: parts[0].type == "text"] = [text]
    return _joined(parts)


def _result_part(part: ResultPart, where: str) -> MessagePart:
    if part.type == "image":
        return _picture(part.source, where)
    if part.type == "tool_reference":
        require(part.tool_name is not None, "expected a text", f"{where}.tool_name")
        return MessagePart("text", part.tool_name)
    return MessagePart("text", text_part(ContentPart(part.type, part.text), where)["text"])


def _texts(content: list[ContentPart], where: str) -> list[str]:
    return [text_part(part, f"{where}[{i}]")["text"] for i, part in enumerate(content)]


def _part(placed: _Placed) -> MessagePart:
    if placed.block.type == "image":
        return _picture(placed.block.source, placed.where)
    return MessagePart("text", _said(placed.block, "text", placed.where))


def _picture(source: ImageSource | str | None, where: str) -> MessagePart:
    """Returns a picture as parts of a chat have it: its data as a URL. Raises RequestError."""
    where = f"{where}.source"
    require(isinstance(source, ImageSource), "expected an object", where)
    assert isinstance(source, ImageSource)
    if source.type == "url":
        require(source.url is not None, "expected a text", f"{where}.url")
        return MessagePart("image_url", image_url=source.url)
    if source.type == "file":
        require(source.file_id is not None, "expected a text", f"{where}.file_id")
        return FilePart("file", file_id=source.file_id or "")
    if source.type != "base64":
        raise unsupported(f"{where}.type", "`base64`, `url` and `file` are known")
    require(source.data is not None, "expected a text", f"{where}.data")
    media_type = source.media_type or "image/unknown"
    return MessagePart("image_url", image_url=f"data:{media_type};base64,{source.data}")


def _joined(parts: Iterable[MessagePart]) -> Shown:
    """Joins parts: a list of one text is the same as the text."""
    found = list(parts)
    if len(found) == 1 and found[0].text is not None:
        return found[0].text
    return found


def _said(block: InputBlock, name: str, where: str) -> str:
    value: str | None = getattr(block, name)
    require(value is not None, "expected a text", f"{where}.{name}")
    return value or ""


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

# Fields of a tool that would change what the model sees, by the values that ask for nothing.
REFUSED_OF_TOOL = {
    "input_examples": Elsewhere(([],), "say so in `description`"),
    "allowed_callers": Elsewhere(([], ["direct"]), "the model alone calls tools"),
}


def input_tools_of(
    offered: list[InputTool] | None,
    choice: MessageToolChoice | None,
    plain: list[dict[str, Any]] | None,
) -> Tools | None:
    """The tools that may be called; None = none. plain: as they came. Raises RequestError."""
    for i, fields in enumerate(plain or ()):
        check_refused(fields, REFUSED_OF_TOOL, f"tools[{i}].")
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(offered or ()))
    return offered_tools(tools, _chosen(choice), _is_parallel(choice))


# Fields of a tool that say nothing to the model.
_UNSHOWN = ("type", "cache_control", "eager_input_streaming", "defer_loading", *REFUSED_OF_TOOL)


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool as templates read it: a function, with its fields as they came."""
    said = {name: value for name, value in tool.items() if name not in _UNSHOWN}
    named = {"parameters" if name == "input_schema" else name: said[name] for name in said}
    return {"type": "function", "function": named}


def _tool(tool: InputTool, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        hint = f"there is no tool {tool.type[:40]!r}: tools of the caller's are known"
        raise unsupported(f"{where}.type", hint)
    require(tool.input_schema is not None, "is needed", f"{where}.input_schema")
    place, strict = f"{where}.input_schema", bool(tool.strict)
    return Tool(tool.name, tool.description, tool.input_schema, strict, place)


def _chosen(choice: MessageToolChoice | None) -> Chosen:
    if isinstance(choice, NamedChoice):
        return Chosen("required", ((choice.name, "tool_choice.name"),), True)
    if isinstance(choice, AnyChoice):
        return Chosen("required")
    return Chosen("none" if isinstance(choice, NoChoice) else "auto")


def _is_parallel(choice: MessageToolChoice | None) -> bool:
    return choice is None or not getattr(choice, "disable_parallel_tool_use", None)


class MessageMetadata(msgspec.Struct, frozen=True):
    user_id: str | None = None


class ThinkingFields(msgspec.Struct, frozen=True):
    """Says whether the model reasons before its answer, and how much. disabled, enabled: templates
    with such a switch turn reasoning off or on. adaptive: as the model likes. budget_tokens:
    with enabled, at most so many. display: omitted = blocks of reasoning are empty; summarized =
    they have the reasoning itself.
    """

    type: Literal["disabled", "adaptive", "enabled"]
    budget_tokens: Positive | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any] | bool


class OutputFields(msgspec.Struct, frozen=True):
    """Says how hard the model tries, and in which form it answers. effort: where the chat template
    reads it. format: the form of the answer's text.
    """

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


_FORM = Elsewhere((), "use `output_config.format`")
_HAS_END = Elsewhere((False,), "answers end where the model ends them")
_KEEPS_ALL: tuple[dict[str, Any], ...] = (
    {},
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
)
# Fields that are not served, by the values that ask for nothing; null does, too.
REFUSED = {
    "stop": Elsewhere(([], ""), "use `stop_sequences`"),
    "user": Elsewhere((), "use `metadata.user_id`"),
    "ignore_eos": _HAS_END,
    "ignore_eos_token": _HAS_END,
    "container": Elsewhere((), "tools run where the caller runs them"),
    "mcp_servers": Elsewhere(([],), "tools run where the caller runs them"),
    "context_management": Elsewhere(_KEEPS_ALL, "send the messages that shall be read"),
    "diagnostics": Elsewhere(({},), "`usage` holds what is known"),
    "inference_geo": Elsewhere((), "where a request runs is the router's choice"),
    "speed": Elsewhere(("standard",), "all requests run at one speed"),
    "reasoning_effort": Elsewhere((), "use `output_config.effort`"),
    **dict.fromkeys(("output_format", "response_format", "structured_outputs"), _FORM),
    **dict.fromkeys(("json_schema", "guided_json", "guided_json_object"), _FORM),
}


class MessagesBody(SharedBody, frozen=True, kw_only=True):
    """Body of a request to `/v1/messages`. messages: if the last is the assistant's, the answer
    goes on from there. max_tokens: reasoning and calls included. cache_control: of no effect,
    what is cached is found by itself.

    chat_template_kwargs: an extension: further variables of the chat template.
    """

    # Bedrock and Vertex have headers in the body.
    harmless: ClassVar[frozenset[str]] = HARMLESS | {
        "anthropic_version",
        "anthropic_beta",
        "user_profile_id",
    }
    refused: ClassVar[Mapping[str, Elsewhere]] = REFUSED

    messages: list[Turn]
    max_tokens: Positive
    system: str | list[ContentPart] | None = None
    stop_sequences: list[StopString] | None = None
    metadata: MessageMetadata | None = None
    tools: InputTools | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputFields | None = None
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CountTokensBody(MessagesBody, frozen=True, kw_only=True):
    """A body of `/v1/messages`. Fields that do not change the prompt have no effect."""

    max_tokens: Positive | None = None  # type: ignore[assignment]  # where an answer needs one


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


# By it clients know that the same request without a thread is served.
_UNTHREADED = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
_PARTS: dict[str, type[msgspec.Struct]] = {
    "metadata": MessageMetadata,
    "thinking": ThinkingFields,
    "output_config": OutputFields,
}

B = TypeVar("B", bound=MessagesBody)


def parse(body: bytes, limits: ApiLimits, bearer: str | None = None) -> ApiRequest:
    """Reads the body of a request to `/v1/messages`. Raises RequestError."""
    return _request(body, MessagesBody, limits, bearer)


def parse_count(body: bytes, limits: ApiLimits, bearer: str | None) -> GenerationCall:
    """The call that a generation would run. Raises RequestError."""
    return _request(body, CountTokensBody, limits, bearer).call


def _request(body: bytes, kind: type[B], limits: ApiLimits, bearer: str | None) -> ApiRequest:
    plain = decode_plain(body)
    request = _decode(plain, kind, limits)
    BOUNDS["messages"].check(request.messages, "messages", limits)
    tools = input_tools_of(request.tools, request.tool_choice, plain.get("tools"))
    call = GenerationCall(
        api="messages",
        prompts=(),
        messages=messages_of(request.system, request.messages),
        adapter=adapter_of(request, limits, bearer),
        sampling=sampling_of(request, limits, max_tokens=request.max_tokens, logprobs=None),
        max_tokens=request.max_tokens,
        add_special_tokens=False,
        template=_template(request, tools, plain.get("tools")),
        tools=tools,
        divides_reasoning=True,
        thinking_budget=None if request.thinking is None else request.thinking.budget_tokens,
        shape=_shape(request),
    )
    call = msgspec.structs.replace(
        with_shared(call, request, limits),
        stop=tuple(request.stop_sequences or ()),
        user=None if request.metadata is None else request.metadata.user_id,
    )
    shows = request.thinking is None or request.thinking.display != "omitted"
    return ApiRequest(call, MessageFormatter, MessageOptions(request.request_id, shows))


def _decode(plain: dict[str, Any], kind: type[B], limits: ApiLimits) -> B:
    read = without_refused(plain, REFUSED)
    if plain.get("thread") is not None:
        refusal = unsupported("thread", "no conversations are stored: send all messages")
        refusal.details = _UNTHREADED
        raise refusal
    request = decode_shared(read, kind, limits)
    for name, part in _PARTS.items():
        check_unknown_parts(plain.get(name) or {}, part.__struct_fields__, f"{name}.")
    return request


def _template(
    request: MessagesBody, tools: Tools | None, plain: list[dict[str, Any]] | None
) -> TemplateOptions:
    is_continued, thinking = is_begun(request.messages), request.thinking
    thinks = thinking is not None and thinking.type == "enabled"
    budget = None if thinking is None else thinking.budget_tokens
    require(thinks or budget is None, "goes with `enabled`", "thinking.budget_tokens")
    return TemplateOptions(
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
        tools=None if tools is None else list(map(_shown, plain or ())),
        in_loop=bool(request.tools),
        effort=_effort(request),
        thinks=thinks or None,
        thinking_budget=budget,
        variables=request.chat_template_kwargs or {},
    )


def _effort(request: MessagesBody) -> ReasoningEffort | None:
    """Finds the effort that a request asks for, from its `thinking` too. Raises RequestError."""
    said = None if request.output_config is None else request.output_config.effort
    kind = None if request.thinking is None else request.thinking.type
    if kind == "disabled":
        require(said in (None, "none"), "contradicts `thinking`", "output_config.effort")
        return "none"
    require(kind != "enabled" or said != "none", "contradicts `thinking`", "output_config.effort")
    return said


def _shape(request: MessagesBody) -> Shape | None:
    asked = None if request.output_config is None else request.output_config.format
    return None if asked is None else json_of(asked.schema, "output_config.format.schema")
