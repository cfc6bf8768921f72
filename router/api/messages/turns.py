"""Messages of `/v1/messages` as messages of a chat. Pure."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loraplex.router.api.request.body import require
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
from loraplex.router.api.request.known_elsewhere import unsupported

Speaker = Literal["user", "assistant", "system"]
Shown = str | list[MessagePart]


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
