"""Chat messages as callers send them, and as templates want them. Pure."""

import contextlib
from typing import Any, Literal

import msgspec

from router.api.body import check_size, decode_plain, require
from router.generation import RequestError

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ContentPart(msgspec.Struct, frozen=True):
    """Of the kinds that OpenAI has, `text` alone is served."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """arguments: JSON text, or the object itself."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(msgspec.Struct, frozen=True):
    function: FunctionCall
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct, frozen=True):
    """content may be null only beside tool calls or a refusal of the assistant's.

    Fields that are not here are ignored: clients send answers back with all that they had.
    """

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


def to_template(messages: list[Message]) -> list[dict[str, Any]]:
    """Plain dicts as chat templates expect them; null fields left out. Raises RequestError."""
    check_size("".join(_spelled_arguments(messages)).encode())
    return [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain(message: Message, where: str) -> dict[str, Any]:
    # Templates know the older name of the role.
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(message, where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    if message.tool_calls:
        require(role == "assistant", "only the assistant calls tools", f"{where}.tool_calls")
        plain["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return plain


def _content(message: Message, where: str) -> str:
    content = message.content
    if content is None and message.role == "assistant" and message.refusal is not None:
        return message.refusal
    if content is None:
        allowed = message.role == "assistant" and message.tool_calls
        require(allowed, "expected a text or a list of text parts", f"{where}.content")
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        param = f"{where}.content[{i}]"
        if part.type != "text":
            raise RequestError(
                "unsupported",
                f"`{param}`: content of type {part.type[:40]!r} is not supported: send text",
                param=param,
            )
        require(part.text is not None, "expected `text`", param)
        texts.append(part.text or "")
    require(texts, "expected at least one part", f"{where}.content")
    return "\n".join(texts)


def _spelled_arguments(messages: list[Message]) -> list[str]:
    """JSON inside of JSON, which nobody has looked into yet."""
    calls = [call for message in messages for call in message.tool_calls or ()]
    return [c.function.arguments for c in calls if isinstance(c.function.arguments, str)]


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """Templates print arguments as JSON, so they get the object that the text spells, if any."""
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        with contextlib.suppress(RequestError):
            arguments = decode_plain(arguments.encode())
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": call.type, "id": call.id, "function": function}
