"""The parts of an answer, read from text in pieces: its text, reasoning and calls of tools. Pure.

A format is written as a generator over a `Scan`: it yields where it needs more text. It sees the
same characters in the same order however the text was cut, so it makes the same parts of them.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

import msgspec

T = TypeVar("T")
Steps = Generator[None, None, T]
WHITESPACE = " \t\r\n"
_NOT_SPACE = re.compile(r"[^ \t\r\n]")


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


class Scan:
    """The text of an answer, and how far it is read. `buffer[start:at]` is read and belongs to no
    part yet; `buffer[at:]` is still to be read.
    """

    def __init__(self) -> None:
        self.buffer = ""
        self.start = 0
        self.at = 0
        self.closed = False
        self.flows = False  # what is read goes to the open call at once
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallDelta] = []
        self._count = 0
        self._wrote = False
        self._gap = ""  # the space around calls, if text follows them

    # Parts

    def text(self) -> None:
        """Take the characters that are read as text."""
        taken = self._taken()
        if taken:
            self._text += self._gap, taken
            self._gap = ""
            self._wrote = True

    def reasoning(self) -> None:
        """Take the characters that are read as reasoning."""
        self._reasoning.append(self._taken())

    def drop(self) -> None:
        """Drop the characters that are read: a marker, or space at its side."""
        self.start = self.at

    def drop_space(self) -> None:
        """Drops space that was read around a call or marker. Between two texts it stays."""
        if self._wrote and not self._gap:
            taken = self._taken()
            self._gap = taken[: len(taken) - len(taken.lstrip(WHITESPACE))]
        self.drop()

    def open_call(self, name: str) -> None:
        """Begins another call. What is read is its marker and the space before it."""
        self.drop_space()
        self._calls.append(CallDelta(self._count, name, ""))
        self._count += 1

    def arguments(self, text: str | None = None) -> None:
        """Adds to the arguments of the open call: `text`, or else what is read."""
        if text is None:
            text = self._taken()
        if text:
            self._calls.append(CallDelta(self._count - 1, None, text))

    def all_arguments(self) -> "Steps[None]":
        """Adds all that still comes to the arguments."""
        while (yield from self.peek()):
            self.at = len(self.buffer)
            self.arguments()

    def since(self, offset: int) -> str:
        """The characters read from `start + offset` on. Offsets last until `start` moves."""
        return self.buffer[self.start + offset : self.at]

    def reject(self, length: int) -> None:
        """Refuse the characters that are read as a call. The first `length` characters are text,
        the rest is to be read once more."""
        self.at = self.start + length
        self.text()

    def parts(self) -> PartsDelta:
        """Takes the parts since the last time."""
        calls = tuple(self._calls)
        parts = PartsDelta("".join(self._text), "".join(self._reasoning), calls)
        self._text, self._reasoning, self._calls = [], [], []
        return parts

    def _taken(self) -> str:
        taken = self.buffer[self.start : self.at]
        self.start = self.at
        return taken

    # Steps

    def add(self, text: str) -> None:
        self.buffer = self.buffer[self.start :] + text
        self.at -= self.start
        self.start = 0

    def more(self) -> Steps[None]:
        """Waits for more text; returns at once where none will come."""
        if self.flows:
            self.arguments()
        if not self.closed:
            yield

    def peek(self) -> Steps[str]:
        """The next character, which stays to be read; "" at the answer's end."""
        while self.at >= len(self.buffer):
            if self.closed:
                return ""
            yield from self.more()
        return self.buffer[self.at]

    def spaces(self) -> Steps[None]:
        """Reads whitespace."""
        while (yield from self.peek()) and self.buffer[self.at] in WHITESPACE:
            found = _NOT_SPACE.search(self.buffer, self.at)
            self.at = found.start() if found else len(self.buffer)

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Reads characters as long as each of them matches `pattern`, a class with `*`."""
        pieces: list[str] = []
        while (yield from self.peek()):
            match = pattern.match(self.buffer, self.at)
            if match is None or match.end() == self.at:
                break
            pieces.append(match.group())
            self.at = match.end()
        return "".join(pieces)

    def one_of(self, words: Sequence[str]) -> Steps[str]:
        """Reads the longest of the words that comes next; "" where none does."""
        found = ""
        length = 0
        while any(len(word) > length for word in words):
            while len(self.buffer) <= self.at + length and not self.closed:
                yield from self.more()
            length += 1
            seen = self.buffer[self.at : self.at + length]
            words = [word for word in words if word.startswith(seen)] if len(seen) == length else []
            found = seen if seen in words else found
        self.at += len(found)
        return found

    def literal(self, word: str) -> Steps[bool]:
        """Whether `word` comes next; reads it if so."""
        return bool((yield from self.one_of((word,))))

    def until(self, words: Sequence[str], give: Callable[[], None], trim: str = "") -> Steps[str]:
        """Gives what comes before the first of `words`, and returns that word or "" at the end.

        trim: characters that are dropped between what was given and the word. The word itself is
        read, and is with what was trimmed the part that is not given. What may become either is
        held back. `self.start` is at the trimmed text.
        """
        pattern = re.compile("|".join(re.escape(word) for word in by_length(words)))
        while True:
            found = pattern.search(self.buffer, self.at)
            pending = len(self.buffer) - (0 if self.closed else self._partial(words))
            if found and (self.closed or found.start() < pending):
                self.at = self._trimmed(found.start(), trim)
                give()
                self.at = found.end()
                return found.group()
            end = pending if self.closed else self._trimmed(pending, trim)
            self.at = max(self.at, end)
            give()
            if self.closed:
                return ""
            yield from self.more()

    def _trimmed(self, end: int, trim: str) -> int:
        while trim and end > self.at and self.buffer[end - 1] in trim:
            end -= 1
        return end

    def _partial(self, words: Sequence[str]) -> int:
        """Length of the longest begin of a word at the buffer's end."""
        longest = min(max(map(len, words)) - 1, len(self.buffer) - self.at)
        for length in range(longest, 0, -1):
            seen = self.buffer[-length:]
            if any(len(word) > length and word.startswith(seen) for word in words):
                return length
        return 0


def by_length(words: Sequence[str]) -> list[str]:
    """Sorts words, the longest first, so that a pattern of them finds the longest."""
    return sorted(words, key=len, reverse=True)


class StepsReader:
    """A PartsReader of a generator over a Scan. When the generator ends, the rest is text."""

    def __init__(self, steps: Callable[[Scan], Steps[None]]) -> None:
        self._scan = Scan()
        self._steps = steps(self._scan)
        self._ended = False

    def feed(self, text: str) -> PartsDelta:
        self._scan.add(text)
        self._advance()
        return self._scan.parts()

    def end(self) -> PartsDelta:
        self._scan.closed = True
        self._advance()
        return self._scan.parts()

    def _advance(self) -> None:
        if not self._ended:
            try:
                next(self._steps)
            except StopIteration:
                self._ended = True
                self._scan.flows = False
        if self._ended:
            self._scan.at = len(self._scan.buffer)
            self._scan.text()
