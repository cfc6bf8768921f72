"""A slab's bytes in an arena of extents, where its runs lie apart."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from loraplex.adapters.manifest import SlabLayout


class SlabMemory:
    """The bytes of a slab that lies in runs of an arena's extents. arena: all its bytes.
    first_extents: for each run of all parts, the number of the arena's extent where it begins.
    """

    def __init__(self, layout: SlabLayout, arena: memoryview, first_extents: Sequence[int]) -> None:
        """Finds each run's place in the arena. Raises ValueError when they do not fit together."""
        runs = layout.all_runs
        if len(first_extents) != len(runs):
            raise ValueError(f"{len(first_extents)} places for {len(runs)} runs")
        extent = layout.extent_bytes
        self._arena = arena
        self._nbytes = [run * extent for run in runs]
        self._places = [first * extent for first in first_extents]
        self._offsets = [0, *accumulate(self._nbytes)]
        for place, nbytes in zip(self._places, self._nbytes, strict=True):
            if place < 0 or place + nbytes > len(arena):
                raise ValueError(f"the arena ends within a run of {nbytes} bytes")

    def runs(self) -> Iterator[tuple[int, memoryview]]:
        """The bytes of each run, and where it begins in the slab."""
        for offset, place, nbytes in zip(
            self._offsets[:-1], self._places, self._nbytes, strict=True
        ):
            yield offset, self._arena[place : place + nbytes]

    def at(self, offset: int, nbytes: int) -> memoryview:
        """A part of the slab that lies within one run."""
        run = bisect_right(self._offsets, offset) - 1
        within = offset - self._offsets[run]
        if within + nbytes > self._nbytes[run]:
            raise ValueError(f"{nbytes} bytes at {offset} cross the border of a run")
        place = self._places[run] + within
        return self._arena[place : place + nbytes]

    def clear(self, start: int, end: int) -> None:
        """Writes zeros from `start` to `end`, across runs."""
        while start < end:
            run = bisect_right(self._offsets, start) - 1
            stop = min(end, self._offsets[run + 1])
            self.at(start, stop - start)[:] = bytes(stop - start)
            start = stop


def one_after_another(layout: SlabLayout) -> list[int]:
    """First extents of a layout's runs in memory of its own."""
    return [0, *accumulate(layout.all_runs)][:-1]
