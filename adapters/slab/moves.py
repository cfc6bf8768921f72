"""Where the tensors of a plain adapter go in its slab, planned once for all adapters of one shape.

Tensors that a slab has as they are stored are read straight to their places.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from loraplex.adapters.content_check import LEAF_BYTES, Run, Sums
from loraplex.adapters.manifest import SlabLayout
from loraplex.adapters.safetensors.file import MOST_TARGETS, WeightsFile
from loraplex.adapters.safetensors.header import TensorInfo
from loraplex.adapters.slab.memory import SlabMemory

Placed = tuple[int, TensorInfo]


class _Span(NamedTuple):
    """The part of one run of the slab that tensors take. offset: in the slab."""

    offset: int
    nbytes: int
    sums: Sums


class _Read(NamedTuple):
    """Tensors side by side from `position` on. places: offset in the slab, and bytes."""

    position: int
    places: tuple[tuple[int, int], ...]


class _Unit(NamedTuple):
    """Work of one thread: the tensors of some runs."""

    reads: tuple[_Read, ...]
    spans: tuple[_Span, ...]


class Moves(NamedTuple):
    """Every byte of a slab: of tensors, or of gaps between them, which are zeros."""

    units: tuple[_Unit, ...]
    gaps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, placed: Iterable[Placed], layout: SlabLayout) -> "Moves":
        """placed: offsets in the slab, and tensors, of whole words of 8 bytes, none twice."""
        in_order = sorted(placed, key=itemgetter(0))
        ends = [0, *(offset + tensor.nbytes for offset, tensor in in_order)]
        starts = [*(offset for offset, _ in in_order), layout.nbytes]
        gaps = tuple(gap for gap in zip(ends, starts, strict=True) if gap[0] < gap[1])
        return cls(tuple(map(_unit, _shared_out(in_order, layout))), gaps)

    def copy(self, weights: WeightsFile, memory: SlabMemory, run: Run) -> int:
        """Fills the slab, and gives the fingerprint of the tensors as they lie there."""
        for begin, end in self.gaps:
            memory.clear(begin, end)
        return sum(run(partial(_copy, weights, memory), self.units))


def _copy(weights: WeightsFile, memory: SlabMemory, unit: _Unit) -> int:
    for position, places in unit.reads:
        weights.read_apart(position, [memory.at(*place) for place in places])
    return sum(
        sums.fingerprint(np.frombuffer(memory.at(offset, nbytes), np.uint8))
        for offset, nbytes, sums in unit.spans
    )


def _shared_out(in_order: list[Placed], layout: SlabLayout) -> Iterator[list[list[Placed]]]:
    """Yields the tensors of each run, of some runs together."""
    some: list[list[Placed]] = []
    nbytes, place = 0, 0
    for end in accumulate(run * layout.extent_bytes for run in layout.all_runs):
        begin = place
        while place < len(in_order) and in_order[place][0] < end:
            nbytes += in_order[place][1].nbytes
            place += 1
        if begin < place:
            some.append(in_order[begin:place])
        if nbytes >= LEAF_BYTES:
            yield some
            some, nbytes = [], 0
    if some:
        yield some


def _unit(runs: list[list[Placed]]) -> _Unit:
    in_file = sorted((each for run in runs for each in run), key=lambda each: each[1].start)
    reads: list[list[Placed]] = []
    for each in in_file:
        if reads and reads[-1][-1][1].end == each[1].start and len(reads[-1]) < MOST_TARGETS:
            reads[-1].append(each)
        else:
            reads.append([each])
    return _Unit(tuple(map(_read, reads)), tuple(map(_span, runs)))


def _read(placed: list[Placed]) -> _Read:
    places = tuple((offset, tensor.nbytes) for offset, tensor in placed)
    return _Read(placed[0][1].start, places)


def _span(placed: list[Placed]) -> _Span:
    first = end = placed[0][0]
    pieces: list[tuple[TensorInfo | None, int, int]] = []
    for offset, tensor in placed:
        if end < offset:
            pieces.append((None, end - first, 0))
        pieces.append((tensor, offset - first, tensor.nbytes))
        end = offset + tensor.nbytes
    return _Span(first, end - first, Sums.of(pieces))
