"""Stop strings over a stream of text, whatever the borders of its pieces. Pure.

The match that ends first wins; of those that end at the same character, the longest. So the outcome
does not depend on how the text was cut, and is known at the first possible character.
"""


def _failure_table(pattern: str) -> list[int]:
    """Length of the longest proper border of each prefix (Knuth, Morris, Pratt 1977)."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table


class StopMatcher:
    """Lets text through up to the first stop string.

    Text that may still become part of a stop string is held back, unless the stop string is to be
    kept (`include`): then nothing ever has to be taken back. hit: the stop string found, or None.
    """

    __slots__ = ("_held", "_include", "_patterns", "_states", "hit")

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._include = include
        self._patterns = [(stop, _failure_table(stop)) for stop in dict.fromkeys(stops)]
        self._states = [0] * len(self._patterns)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """The text that is now certain. After a hit there is none."""
        if self.hit is not None or not text:
            return ""
        if not self._patterns:
            return text
        for position, character in enumerate(text, 1):
            found = self._advance(character)
            if found is not None:
                return self._stop(found, text[:position])
        if self._include:
            return text
        return self._release(self._held + text, max(self._states))

    def flush(self) -> str:
        """What was held back, once no more text will come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Moves every pattern's state by one character; the longest pattern that is complete."""
        found: str | None = None
        for i, (pattern, table) in enumerate(self._patterns):
            state = self._states[i]
            while state and pattern[state] != character:
                state = table[state - 1]
            if pattern[state] == character:
                state += 1
            if state == len(pattern):
                if found is None or len(pattern) > len(found):
                    found = pattern
                state = table[state - 1]
            self._states[i] = state
        return found

    def _stop(self, found: str, text: str) -> str:
        self.hit = found
        if self._include:
            return text
        text = self._held + text
        self._held = ""
        return text[: len(text) - len(found)]

    def _release(self, text: str, hold: int) -> str:
        cut = len(text) - hold
        self._held = text[cut:]
        return text[:cut]
