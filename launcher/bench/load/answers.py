"""Events of an answer, of OpenAI's APIs or LoRAX's, to times, counts and faults. Pure.

Servers differ: only what is needed is read, and what cannot be is this one answer's fault.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from loraplex.launcher.refusals import UNREADABLE, error_text, one_line

_Count = Annotated[int, Meta(ge=0)] | None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count = None
    completion_tokens: _Count = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    """text: of completions. delta: of a chat."""

    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    """LoRAX's usage."""

    prompt_tokens: _Count = None
    completion_tokens: _Count = msgspec.field(default=None, name="generated_tokens")
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """choices, usage: OpenAI's. token, generated_text, details: LoRAX's; the text is of the last
    event alone. object, message: of an error that is not within `error`."""

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
    """What the events of one answer contained.

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
        """When each event with text came; of an answer without any text, each event of its
        choices."""
        return self._text_s or self._silent_s

    @property
    def has_text(self) -> bool:
        return bool(self._text_s)

    def take(self, data: bytes, now: float) -> None:
        """The next event. now: seconds."""
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
