"""Where contexts ended in texts: what followed them once may follow them again. Pure.

A context is CONTEXT tokens. A place is where its continuation begins in a text.
"""

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CONTEXT = 3
_BITS = 20  # of a token id; three ids are 60 bits, which numpy's integers hold
_MASK = (1 << CONTEXT * _BITS) - 1

Place = tuple[list[int], int]  # text, position


def context(tokens: Sequence[int], position: int) -> int:
    """The context that ends before `position`, as one number."""
    first, second, third = tokens[position - CONTEXT : position]
    return (first << 2 * _BITS) | (second << _BITS) | third


class PromptPlaces:
    """Places in a text that does not grow: sorted arrays, made at once."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        ids = np.array(tokens[:-1], np.int64)
        contexts = (ids[:-2] << 2 * _BITS) | (ids[1:-1] << _BITS) | ids[2:]
        order = np.argsort(contexts, kind="stable")
        self._contexts = array("q", contexts[order].tobytes())
        self._positions = array("i", (order + CONTEXT).astype(np.int32).tobytes())

    def after(self, sought: int, most: int) -> list[Place]:
        """The latest first."""
        contexts, index = self._contexts, bisect_right(self._contexts, sought)
        found: list[Place] = []
        while index and len(found) < most and contexts[index - 1] == sought:
            index -= 1
            found.append((self._tokens, self._positions[index]))
        return found


class _Text(NamedTuple):
    """before: of each position from `start` on, the place before it with the same context."""

    tokens: list[int]
    start: int
    before: list[int]


class GrowingPlaces:
    """Places in texts that come, grow and go. The newest text alone grows; the oldest goes."""

    BYTES = 200  # a token, by measurement rounded up

    def __init__(self) -> None:
        # A place as a number: the text's number, then the position in 32 bits.
        self._latest: dict[int, int] = {}
        self._texts: OrderedDict[int, _Text] = OrderedDict()
        self._count = 0

    def begin(self, tokens: list[int], start: int) -> None:
        """Places count from `start` on."""
        self._count += 1
        self._texts[self._count] = _Text(tokens, max(start, CONTEXT), [])
        self.grow()

    def grow(self) -> None:
        """The newest text has more tokens."""
        tokens, start, before = self._texts[self._count]
        first, place = start + len(before), self._count << 32
        if first >= len(tokens):
            return
        latest, ended = self._latest, context(tokens, first)
        place |= first
        for token in tokens[first:]:
            before.append(latest.get(ended, 0))
            latest[ended] = place
            ended = (ended << _BITS | token) & _MASK
            place += 1

    def forget_oldest(self) -> int:
        """Returns how many tokens it had."""
        number, (tokens, start, before) = self._texts.popitem(last=False)
        for position in range(start, start + len(before)):
            ended = context(tokens, position)
            if self._latest.get(ended) == number << 32 | position:
                del self._latest[ended]
        return len(tokens)

    def __len__(self) -> int:
        return len(self._texts)

    def after(self, sought: int, most: int) -> list[Place]:
        """The latest first."""
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
