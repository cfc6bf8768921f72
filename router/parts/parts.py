"""The parts of an answer: its text, its reasoning, its calls of tools. Pure."""

from typing import Protocol

import msgspec


class CallDelta(msgspec.Struct, frozen=True):
    """A piece of the answer's call number `index`. name: with the first piece alone, whole.

    arguments: the next characters of their JSON text. id: with the name; readers leave it out.
    """

    index: int
    name: str | None
    arguments: str
    id: str | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """A whole call. id: the answer's own, unlike any other's. arguments: JSON text."""

    id: str
    name: str
    arguments: str


class PartsDelta(msgspec.Struct, frozen=True):
    """The additions of some new text of an answer to each part."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


NOTHING = PartsDelta()


class PartsReader(Protocol):
    """Divides an answer's text as it comes: into the same parts, wherever the text is cut."""

    def feed(self, text: str) -> PartsDelta:
        """Reads the next text of the answer; what may still be a marker is held back."""
        ...

    def end(self) -> PartsDelta:
        """Gives the text that was held back. A call that broke off stays as far as it came."""
        ...
