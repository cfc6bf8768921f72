"""Where contexts ended in texts: what followed them once may follow them again. Pure.

A context is CONTEXT tokens. A place is where its continuation begins in a text.
"""

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

CONTEXT = 3
_BITS = 20  # of a token id; three ids are 60 bits, which numpy's integers hold


def context(tokens: Sequence[int], place: int) -> int:
    """The context that ends before `place`, as one number."""
    first, second, third = tokens[place - CONTEXT : place]
    return (first << 2 * _BITS) | (second << _BITS) | third


class Place(NamedTuple):
    tokens: list[int]
    position: int


class PromptPlaces:
    """Places in a text that does not grow: sorted arrays, made at once."""

    BYTES = 12  # a token

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        ids = np.fromiter(tokens[:-1], np.int64)
        contexts = (ids[:-2] << 2 * _BITS) | (ids[1:-1] << _BITS) | ids[2:]
        order = np.argsort(contexts, kind="stable")
        self._contexts = array("q", contexts[order].tobytes())
        self._positions = array("i", (order + CONTEXT).astype(np.int32).tobytes())

    def after(self, sought: int) -> Iterator[Place]:
        """The latest first."""
        contexts, index = self._contexts, bisect_right(self._contexts, sought)
        while index and contexts[index - 1] == sought:
            index -= 1
            yield Place(self._tokens, self._positions[index])


class _Text(NamedTuple):
    """before: of each position from `start` on, the place before it with the same context."""

    tokens: list[int]
    start: int
    before: list[int]


class GrowingPlaces:
    """Places in texts that come, grow and go. The newest text alone grows; the oldest goes."""

    BYTES = 200  # a token

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
        latest, number = self._latest, self._count << 32
        for position in range(start + len(before), len(tokens)):
            ended = context(tokens, position)
            before.append(latest.get(ended, 0))
            latest[ended] = number | position

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

    def after(self, sought: int) -> Iterator[Place]:
        """The latest first."""
        place = self._latest.get(sought, 0)
        while place:
            number, position = place >> 32, place & 0xFFFFFFFF
            text = self._texts.get(number)
            if text is None:  # it is gone, and those before it
                return
            yield Place(text.tokens, position)
            place = text.before[position - text.start]
