"""Where contexts ended in texts: what followed them once may follow them again. Pure.

A context is the last `window` tokens before a place, as a number of 60 bits. Two contexts seldom
have one number; who looks at a place compares its tokens.
"""

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_BITS = 60  # which numpy's integers hold, and CPython's in two digits
_MASK = (1 << _BITS) - 1

Place = tuple[list[int], int]  # text, position of what follows


def context(tokens: Sequence[int], position: int, window: int) -> int:
    """The context that ends before `position`."""
    ended = 0
    for token in tokens[position - window : position]:
        ended = (ended << _BITS // window ^ token) & _MASK
    return ended


class PromptPlaces:
    """Places in a text that does not grow: sorted arrays, made at once. ids: int64 `[n]`, the text
    as well."""

    def __init__(self, tokens: list[int], ids: np.ndarray, window: int) -> None:
        self._tokens = tokens
        count = max(0, len(tokens) - window)
        contexts = np.zeros(count, np.int64)
        for shift in range(window):
            contexts ^= ids[window - 1 - shift :][:count] << shift * (_BITS // window)
        contexts &= _MASK
        order = np.argsort(contexts, kind="stable")
        self._contexts = array("q", contexts[order].tobytes())
        self._positions = array("i", (order + window).astype(np.int32).tobytes())

    def after(self, sought: int, most: int) -> list[Place]:
        """Find places that follow the sought context, the latest first."""
        contexts, index = self._contexts, bisect_right(self._contexts, sought)
        found: list[Place] = []
        while index and len(found) < most and contexts[index - 1] == sought:
            index -= 1
            found.append((self._tokens, self._positions[index]))
        return found


class _Text(NamedTuple):
    """Tokens, and the earlier places with the same context. before: of each position from `start`
    on, the place before it with the same context.
    """

    tokens: list[int]
    start: int
    before: list[int]


class GrowingPlaces:
    """Places in texts that come, grow and go. The newest text alone grows; the oldest goes."""

    BYTES = 200  # a token, by measurement rounded up

    def __init__(self, window: int) -> None:
        self._window = window
        # A place as a number: the text's number, then the position in 32 bits.
        self._latest: dict[int, int] = {}
        self._texts: OrderedDict[int, _Text] = OrderedDict()
        self._count = 0
        # The context that ends the newest text; None while the text is shorter than a window.
        self.end: int | None = None

    def begin(self, tokens: list[int], start: int) -> None:
        """Places count from `start` on."""
        self._count += 1
        self._texts[self._count] = _Text(tokens, max(start, self._window), [])
        self.end = None
        self.grow()

    def grow(self) -> None:
        """The newest text has more tokens."""
        tokens, start, before = self._texts[self._count]
        first = start + len(before)
        if first > len(tokens):
            return
        ended = context(tokens, first, self._window) if self.end is None else self.end
        latest, shift = self._latest, _BITS // self._window
        place = self._count << 32 | first
        for token in tokens[first:]:
            before.append(latest.get(ended, 0))
            latest[ended] = place
            ended = (ended << shift ^ token) & _MASK
            place += 1
        self.end = ended

    def forget_oldest(self) -> int:
        """Returns how many tokens it had."""
        number, (tokens, start, before) = self._texts.popitem(last=False)
        for position in range(start, start + len(before)):
            ended = context(tokens, position, self._window)
            if self._latest.get(ended) == number << 32 | position:
                del self._latest[ended]
        return len(tokens)

    def __len__(self) -> int:
        return len(self._texts)

    def after(self, sought: int, most: int) -> list[Place]:
        """Find places that follow the sought context, the latest first."""
        place = self._latest.get(sought, 0)
        found: list[Place] = []
        while place and len(found) < most:
            text = self._texts.get(place >> 32)
            if text is None:  # it is gone, and those before it
                break
            position = place & 0xFFFFFFFF
            found.append((text.tokens, position))
            place = text.before[position - text.start]
        return found
