"""Extents of an arena: which are free, and where an adapter's runs fit. Pure."""

from collections.abc import Iterable, Iterator, Sequence

FREE = 1
TAKEN = 0

# The first of an unbroken row of extents, and how many there are.
Span = tuple[int, int]


def mark(extents: bytearray, spans: Iterable[Span], state: int) -> None:
    for first, length in spans:
        extents[first : first + length] = bytes([state]) * length


def fit(space: bytearray, runs: Sequence[int]) -> tuple[int, ...] | None:
    """First extents for `runs`, or None. They may be taken in `space` then, or a part of them.

    Long runs are packed first-fit, longest first, from the low end; single extents fill the high
    end, so that long holes stay long.
    """
    first: list[int] = [0] * len(runs)
    # A search goes on where the last of this length ended: before that there is no such hole.
    low, last = 0, 0
    for i in sorted((i for i, n in enumerate(runs) if n > 1), key=lambda i: -runs[i]):
        length = runs[i]
        at = space.find(bytes([FREE]) * length, low if length == last else 0)
        if at < 0:
            return None
        space[at : at + length] = bytes([TAKEN]) * length
        low, last = at + length, length
        first[i] = at
    singles = [i for i, n in enumerate(runs) if n == 1]
    highest = _highest_free(space, len(singles))
    if highest is None:
        return None
    for i, at in zip(singles, highest, strict=True):
        first[i] = at
    return tuple(first)


def each(spans: Iterable[Span]) -> Iterator[int]:
    """Iterate over the extents in the spans."""
    return (x for first, length in spans for x in range(first, first + length))


def spread(firsts: Sequence[int], runs: Sequence[int]) -> tuple[int, ...]:
    if len(firsts) == sum(runs):
        return tuple(firsts)
    return tuple(each(zip(firsts, runs, strict=True)))


def join(extents: Sequence[int], runs: Sequence[int]) -> tuple[Span, ...]:
    joined: list[Span] = []
    begin = end = -1
    for first, length in sorted(zip(extents, runs, strict=True)):
        if first != end:
            if begin >= 0:
                joined.append((begin, end - begin))
            begin = first
        end = first + length
    if begin >= 0:
        joined.append((begin, end - begin))
    return tuple(joined)


def _highest_free(space: bytearray, count: int) -> list[int] | None:
    """The highest free extents, in falling order; None if there are fewer. A row at a time."""
    found: list[int] = []
    high = len(space)
    while len(found) < count:
        last = space.rfind(FREE, 0, high)
        if last < 0:
            return None
        high = max(space.rfind(TAKEN, 0, last) + 1, last + 1 - (count - len(found)))
        found.extend(range(last, high - 1, -1))
    return found
