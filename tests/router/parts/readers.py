"""Small readers of answers, to divide by what anyone can see."""

from collections.abc import Callable

from router.parts.parts import NOTHING, CallDelta, Parts


class BracketReader:
    """`[name arguments]` is a call; what a call leaves is text. Each character counts alone."""

    def __init__(self) -> None:
        self._index = -1
        self._name: str | None = None
        self._inside = False

    def feed(self, text: str) -> Parts:
        found = NOTHING
        for character in text:
            found = joined(found, self._read(character))
        return found

    def end(self) -> Parts:
        return NOTHING

    def _read(self, character: str) -> Parts:
        if not self._inside:
            if character != "[":
                return Parts(character)
            self._inside, self._name = True, ""
            self._index += 1
            return NOTHING
        if character == "]":
            self._inside = False
            return NOTHING
        if self._name is None:
            return Parts(calls=(CallDelta(self._index, None, character),))
        if character != " ":
            self._name += character
            return NOTHING
        name, self._name = self._name, None
        return Parts(calls=(CallDelta(self._index, name, ""),))


class ThinkReader:
    """Up to `|` all is reasoning. What it holds back is one character."""

    def __init__(self) -> None:
        self._held = ""
        self._is_over = False

    def feed(self, text: str) -> Parts:
        if self._is_over:
            return Parts(text)
        text = self._held + text
        thought, mark, rest = text.partition("|")
        self._is_over = bool(mark)
        if mark:
            self._held = ""
            return Parts(rest, thought)
        self._held = thought[-1:]
        return Parts(reasoning=thought[:-1])

    def end(self) -> Parts:
        return Parts(reasoning=self._held)


def joined(one: Parts, other: Parts) -> Parts:
    return Parts(one.text + other.text, one.reasoning + other.reasoning, one.calls + other.calls)


def numbered() -> Callable[[], str]:
    """Makes id0, id1 and so on."""
    made = iter(range(1000))
    return lambda: f"id{next(made)}"
