"""Items of `/v1/responses` as messages of a chat. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from loraplex.router.api.request.body import require
from loraplex.router.api.request.chat_messages import (
    FilePart,
    FunctionCall,
    Message,
    MessagePart,
    MessageToolCall,
    Role,
    join_assistant,
    to_template,
)
from loraplex.router.api.request.custom_tools import custom_arguments
from loraplex.router.api.request.known_elsewhere import unsupported
from loraplex.router.api.responses.items import SHELL, shell_arguments

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
_PICTURE = "input_image"
_REFERENCE = "send the item itself"


class InputPart(msgspec.Struct, frozen=True):
    """A text, or a picture: of the other kinds that OpenAI has, none is served. refusal: of type
    `refusal`. image_url, file_id: one of them, of type `input_image`.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None


class InputItem(msgspec.Struct, frozen=True):
    """A message (`type` may be absent), a call, its output, or `reasoning`. Calls and outputs are
    those of functions, custom tools (`input`) and the caller's shell (`action`).

    Fields that are not here are ignored: clients send items of an answer back with all that they
    had. The text of `reasoning` is its content, or else its summary; without both it is left out.
    """

    type: str | None = None
    role: Role | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


def messages_of(
    instructions: str | None, given: str | list[InputItem], earlier: Sequence[InputItem] = ()
) -> list[dict[str, Any]]:
    """Messages for the template. One message of the assistant has what stands together of its
    reasoning, text and calls. earlier: stored items of the conversation. Raises RequestError.
    """
    messages: list[Message] = []
    if instructions:
        messages.append(Message("system", instructions))
    for item in earlier:
        _add(messages, item, "previous_response_id")
    if isinstance(given, str):
        messages.append(Message("user", given))
    else:
        for i, item in enumerate(given):
            _add(messages, item, f"input[{i}]")
    require(messages, "expected at least one item", "input")
    return to_template(messages)


def _add(messages: list[Message], item: InputItem, where: str) -> None:
    kind = item.type or "message"
    if kind == "message":
        message = _message(item, where)
        if message.role == "assistant":
            join_assistant(messages, "content", message.content)
        else:
            messages.append(message)
    elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
        join_assistant(messages, "tool_calls", [_call(item, kind, where)])
    elif kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
        call_id = _call_id(item, kind, where)
        output = _content(item.output, f"{where}.output", may_be_empty=item.output is not None)
        messages.append(Message("tool", output, name=item.name, tool_call_id=call_id))
    elif kind == "reasoning":
        text = _reasoning(item, where)
        if text:
            join_assistant(messages, "reasoning_content", text)
    else:
        known = "messages, reasoning, calls of the caller's own tools and their outputs are"
        hint = _REFERENCE if kind == "item_reference" else f"{kind[:40]!r} is not known, {known}"
        raise unsupported(f"{where}.type", hint)


def _message(item: InputItem, where: str) -> Message:
    require(item.role is not None, "expected a role", f"{where}.role")
    assert item.role is not None
    message = "expected an item of type `function_call_output`"
    require(item.role != "tool", message, f"{where}.role")
    may_be_empty = item.role == "assistant"  # as in an answer that broke off
    return Message(item.role, _content(item.content, f"{where}.content", may_be_empty=may_be_empty))


def _call(item: InputItem, kind: str, where: str) -> MessageToolCall:
    call_id = _call_id(item, kind, where)
    if kind == "local_shell_call":
        require(item.action is not None, "expected an object", f"{where}.action")
        return MessageToolCall(FunctionCall(SHELL, shell_arguments(item.action or {})), call_id)
    name = _text(item.name, f"{where}.name")
    if kind == "custom_tool_call":
        arguments = custom_arguments(_text(item.input, f"{where}.input"))
    else:
        arguments = _text(item.arguments, f"{where}.arguments")
    return MessageToolCall(FunctionCall(name, arguments), call_id)


def _call_id(item: InputItem, kind: str, where: str) -> str:
    """Calls of the shell may have it as their `id` alone."""
    found = item.call_id
    if found is None and kind.startswith(SHELL):
        found = item.id
    return _text(found, f"{where}.call_id")


def _reasoning(item: InputItem, where: str) -> str:
    content, summary = item.content, item.summary
    if content:
        return content if isinstance(content, str) else _joined(content, f"{where}.content")
    return _joined(summary or (), f"{where}.summary")


def _content(
    content: str | list[InputPart] | None, where: str, *, may_be_empty: bool
) -> str | list[MessagePart]:
    """Texts are joined by line breaks, as those of a chat are, unless pictures stand among them."""
    if isinstance(content, str):
        return content
    words = "expected a text or a list of at least one part"
    require(content or may_be_empty, words, where)
    parts = content or ()
    if all(part.type != _PICTURE for part in parts):
        return _joined(parts, where)
    return [_shown(part, f"{where}[{i}]") for i, part in enumerate(parts)]


def _shown(part: InputPart, where: str) -> MessagePart:
    if part.type != _PICTURE:
        return MessagePart("text", _part(part, where))
    if part.file_id is not None:
        require(part.image_url is None, "goes with no `image_url`", f"{where}.file_id")
        return FilePart("file", file_id=part.file_id)
    return MessagePart("image_url", image_url=_text(part.image_url, f"{where}.image_url"))


def _joined(parts: Sequence[InputPart], where: str) -> str:
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(parts))


def _part(part: InputPart, where: str) -> str:
    if part.type not in _TEXTS:
        raise unsupported(
            where, f"content of type {part.type[:40]!r} is not known: send text or `input_image`"
        )
    name = "refusal" if part.type == "refusal" else "text"
    return _text(getattr(part, name), f"{where}.{name}")


def _text(value: str | None, where: str) -> str:
    require(value is not None, "expected a text", where)
    return value or ""
