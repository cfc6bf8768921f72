"""Small readers of answers, to divide by what anyone can see."""

from collections.abc import Callable

from loraplex.router.parts.parts import NOTHING, CallDelta, PartsDelta


class BracketReader:
    """`[name arguments]` is a call; what a call leaves is text. Each character counts alone."""

    def __init__(self) -> None:
        self._index = -1
        self._name: str | None = None
        self._inside = False

    def feed(self, text: str) -> PartsDelta:
        found = NOTHING
        for character in text:
            found = joined(found, self._read(character))
        return found

    def end(self) -> PartsDelta:
        return NOTHING

    def _read(self, character: str) -> PartsDelta:
        if not self._inside:
            if character != "[":
                return PartsDelta(character)
            self._inside, self._name = True, ""
            self._index += 1
            return NOTHING
        if character == "]":
            self._inside = False
            return NOTHING
        if self._name is None:
            return PartsDelta(calls=(CallDelta(self._index, None, character),))
        if character != " ":
            self._name += character
            return NOTHING
        name, self._name = self._name, None
        return PartsDelta(calls=(CallDelta(self._index, name, ""),))


class ThinkReader:
    """Up to `|` all is reasoning. What it holds back is one character."""

    def __init__(self) -> None:
        self._held = ""
        self._is_over = False

    def feed(self, text: str) -> PartsDelta:
        if self._is_over:
            return PartsDelta(text)
        text = self._held + text
        thought, mark, rest = text.partition("|")
        self._is_over = bool(mark)
        if mark:
            self._held = ""
            return PartsDelta(rest, thought)
        self._held = thought[-1:]
        return PartsDelta(reasoning=thought[:-1])

    def end(self) -> PartsDelta:
        return PartsDelta(reasoning=self._held)


def joined(one: PartsDelta, other: PartsDelta) -> PartsDelta:
    return PartsDelta(
        one.text + other.text, one.reasoning + other.reasoning, one.calls + other.calls
    )


def numbered() -> Callable[[], str]:
    """Makes id0, id1 and so on."""
    made = iter(range(1000))
    return lambda: f"id{next(made)}"
