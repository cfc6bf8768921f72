"""Messages of `/v1/messages` as messages of a chat. Pure."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loraplex.router.api.request.body import require
from loraplex.router.api.request.chat_messages import (
    ContentPart,
    FunctionCall,
    Message,
    MessageToolCall,
    join_assistant,
    text_part,
    to_template,
)
from loraplex.router.api.request.known_elsewhere import unsupported

Speaker = Literal["user", "assistant", "system"]
Texts = str | list[ContentPart]


class ResultPart(ContentPart, frozen=True):
    """A text, or the name of a tool that the model may use now: it sees all tools anyway."""

    tool_name: str | None = None


class InputBlock(msgspec.Struct, frozen=True):
    """`text`, `thinking`, `redacted_thinking` (of which nothing can be read), `tool_use` or
    `tool_result`: of the other kinds none is served.

    Fields that are not here are ignored: clients send blocks of an answer back with all that they
    had, and what is cached does not depend on `cache_control`. content, is_error: of a result.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
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


# Blocks that one speaker alone may send.
_SPEAKERS: dict[str, Speaker] = {
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_use": "assistant",
    "tool_result": "user",
}
_KNOWN = "`text`, `thinking`, `tool_use` and `tool_result` are"


def messages_of(system: Texts | None, turns: list[Turn]) -> list[dict[str, Any]]:
    """Messages for the template. Texts of one speaker that stand together are one message's.

    Raises RequestError.
    """
    messages: list[Message] = []
    if system:
        messages.append(Message("system", _joined(_texts(system, "system"))))
    blocks = [placed for i, turn in enumerate(turns) for placed in _blocks(turn, f"messages[{i}]")]
    for (role, kind), group in groupby(blocks, lambda placed: (placed.role, placed.block.type)):
        if kind == "text":
            _add_text(messages, role, _joined(map(_text, group)))
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


def _add_text(messages: list[Message], role: Speaker, content: Texts) -> None:
    if role == "assistant":
        join_assistant(messages, "content", content)
    else:
        messages.append(Message(role, content))


def _add(messages: list[Message], placed: _Placed) -> None:
    block, where = placed.block, placed.where
    if block.type not in _SPEAKERS:
        kind = f"content of type {block.type[:40]!r} is not known, {_KNOWN}"
        raise unsupported(f"{where}.type", kind)
    speaker = _SPEAKERS[block.type]
    require(placed.role == speaker, f"only of the role {speaker!r}", f"{where}.type")
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


def _result(block: InputBlock, where: str) -> Texts:
    """Returns the texts of a tool's result. One that failed says so in its text: templates know of
    no such mark.
    """
    where = f"{where}.content"
    content: Texts = ""
    if isinstance(block.content, str):
        content = block.content
    elif block.content:
        content = [_part(part, f"{where}[{i}]") for i, part in enumerate(block.content)]
    texts = _texts(content, where)
    if block.is_error:
        texts[0] = f"Error: {texts[0]}"
    return _joined(texts)


def _part(part: ResultPart, where: str) -> ContentPart:
    if part.type != "tool_reference":
        return part
    require(part.tool_name is not None, "expected a text", f"{where}.tool_name")
    return ContentPart("text", part.tool_name)


def _texts(content: Texts, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [text_part(part, f"{where}[{i}]")["text"] for i, part in enumerate(content)]


def _text(placed: _Placed) -> str:
    return _said(placed.block, "text", placed.where)


def _joined(texts: Iterable[str]) -> Texts:
    """Joins texts: a list of one is the same as the text."""
    found = list(texts)
    return found[0] if len(found) == 1 else [ContentPart("text", text) for text in found]


def _said(block: InputBlock, name: str, where: str) -> str:
    value: str | None = getattr(block, name)
    require(value is not None, "expected a text", f"{where}.{name}")
    return value or ""
