"""Bytes of an answer, of OpenAI's APIs or LoRAX's, to events, times, counts and faults. Pure.

Servers differ: only what is needed is read, and what cannot be is this one answer's fault.
"""

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from loraplex.launcher.refusals import UNREADABLE, error_text, one_line

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_Count = Annotated[int, Meta(ge=0)] | None


class EventReader:
    """Server-sent events of one stream, out of bytes as they come, by the WHATWG's rules. Names and
    ids of events, and comments, mean nothing to a benchmark."""

    def __init__(self) -> None:
        self._rest = b""  # of a line without its end
        self._data: list[bytes] = []  # of an event without its end
        self._after_cr = False
        self._is_first_line = True

    def feed(self, piece: bytes) -> list[bytes]:
        """Returns the data of each event that this piece completes; one without data is none."""
        if not piece:
            return []
        if self._after_cr:  # its line has ended already
            piece = piece.removeprefix(b"\n")
        self._after_cr = piece.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + piece)
        return [event for event in map(self._line, lines) if event]

    def _line(self, line: bytes) -> bytes:
        """Returns the data of the event that the line ends, else nothing."""
        if self._is_first_line:
            self._is_first_line = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            event, self._data = b"\n".join(self._data), []
            return event
        name, _, value = line.partition(b":")  # a comment has no name
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return b""


class _Usage(msgspec.Struct):
    prompt_tokens: _Count = None
    completion_tokens: _Count = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    """A choice in a streamed answer. text: of completions. delta: of a chat."""

    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    """LoRAX's usage."""

    prompt_tokens: _Count = None
    completion_tokens: _Count = msgspec.field(default=None, name="generated_tokens")
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """An event of a streamed answer. choices, usage: OpenAI's. token, generated_text, details:
    LoRAX's; the text is of the last event alone. object, message: of an error that is not within
    `error`.
    """

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    token: dict[str, Any] | None = None
    generated_text: str | None = None
    details: _Details | None = None
    error: Any = None
    object: Any = None
    message: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class StreamedAnswer:
    """Content of the events of one answer.

    has_ended: the server said that this is all. fault: what kind of failure, and its text.
    prompt_tokens, output_tokens: as the server counted them. filled: it ended at the length that
    was asked for.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self.fault: tuple[str, str] | None = None
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.filled = False
        self._text_s: list[float] = []
        self._silent_s: list[float] = []

    @property
    def token_s(self) -> list[float]:
        """When events with text came; of an answer without text, all events of choices."""
        return self._text_s or self._silent_s

    @property
    def has_text(self) -> bool:
        return bool(self._text_s)

    def take(self, data: bytes, now: float) -> None:
        """Takes the next event. now: seconds."""
        if data.strip() == b"[DONE]":
            self.has_ended = True
            return
        try:
            event = _decode(data)
        except UNREADABLE as error:
            self._fail("malformed event", f"{one_line(data)} ({error})")
            return
        if event.error is not None or event.object == "error":
            self._fail("error event", error_text(data))
            return
        self._count(event)
        if event.token is not None or any(map(_has_text, event.choices or ())):
            self._text_s.append(now)
        elif event.choices:
            self._silent_s.append(now)

    def _count(self, event: _Event) -> None:
        said: _Usage | _Details | None = event.usage or event.details
        if said is not None:
            self.prompt_tokens = _or(said.prompt_tokens, self.prompt_tokens)
            self.output_tokens = _or(said.completion_tokens, self.output_tokens)
        self.has_ended |= event.generated_text is not None
        reasons = [choice.finish_reason for choice in event.choices or ()]
        reasons += [event.details.finish_reason] if event.details else []
        self.filled |= "length" in reasons

    def _fail(self, kind: str, text: str) -> None:
        self.fault = self.fault or (kind, text)


def _or(said: int | None, before: int | None) -> int | None:
    return before if said is None else said


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta or _Delta()
    return bool(choice.text or delta.content or delta.reasoning_content or delta.reasoning)
