"""The parts of a streamed answer, one after another. Pure."""

from abc import ABC, abstractmethod
from typing import Literal

from loraplex.router.call import TextEvent
from loraplex.router.parts.parts import CallDelta

PartKind = Literal["reasoning", "text", "call"]
PartStatus = Literal["completed", "incomplete"]


class PartStream(ABC):
    """Opens, grows and closes parts. Each part ends before the next begins.

    No part begins with white space alone: it is held until something follows it. Subclasses write
    the events, as whole server-sent events.
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_reasoning = 0
        self._part: PartKind | None = None
        self._held: dict[PartKind, str] = {}

    @abstractmethod
    def _begun(self, kind: PartKind, call: CallDelta | None) -> bytes: ...

    @abstractmethod
    def _grown(self, kind: PartKind, piece: str) -> bytes: ...

    @abstractmethod
    def _ended(self, kind: PartKind, status: PartStatus) -> bytes: ...

    def _go_on(self, event: TextEvent) -> bytes:
        """Writes what the event adds to the answer."""
        self._num_tokens += event.num_tokens
        self._num_reasoning += event.num_reasoning
        data = self._add_text("reasoning", event.reasoning) + self._add_text("text", event.text)
        return data + b"".join(map(self._add_call, event.calls))

    def _begin(self, kind: PartKind, call: CallDelta | None = None) -> bytes:
        data = self._close()
        self._part = kind
        return data + self._begun(kind, call)

    def _close(self, status: PartStatus = "completed") -> bytes:
        """Ends the part that is being written, if there is one."""
        kind, self._part = self._part, None
        return b"" if kind is None else self._ended(kind, status)

    def _add_text(self, kind: PartKind, piece: str) -> bytes:
        if not piece:
            return b""
        if self._part == kind:
            return self._grown(kind, piece)
        piece = self._held.pop(kind, "") + piece
        if piece.strip():
            return self._begin(kind) + self._grown(kind, piece)
        self._held[kind] = piece
        return b""

    def _add_call(self, delta: CallDelta) -> bytes:
        data = b"" if delta.name is None else self._begin("call", delta)
        return data + (self._grown("call", delta.arguments) if delta.arguments else b"")
