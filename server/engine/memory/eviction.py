"""The worth of an adapter's place in an arena: frequency of use, cost of a load, room. Pure.

It knows neither extents nor leases: `AdapterArena` asks it only for an order among those that may
go. Its clock is the count of uses.
"""

import math
from collections.abc import Iterator, Sequence
from heapq import nsmallest
from typing import Literal

from loraplex.adapters.common.newest import NewestKept

EvictionReason = Literal[
    "bytes",  # another adapter needed more extents than were free
    "runs",  # enough extents were free, but no run of them as long as needed
    "slots",  # another adapter needed a slot
    "order",  # the operator's wish
]

MAX_REMEMBERED = 16_384
# A use counts half after so many others for each adapter that is held.
HALF_LIFE_TURNS = 8
# The most recently used are spared while others make room: one part of so many. A new adapter has
# so much time to show that it will be used again.
NEWEST_SHARE = 4
# No adapter's seconds a byte count for more than eight times the usual, or for less than an eighth.
MAX_DENSITY_LOG2 = 3.0
# So many are found without sorting all; more are seldom needed.
_FEW = 8


class _Record:
    """Use and cost of one adapter, for its worth. frequency: uses, each decayed up to `at`. weight:
    its log2, at least 0. density: log2 of seconds an extent, smoothed; None = not measured.
    """

    __slots__ = ("at", "density", "frequency", "weight")

    def __init__(self, at: int) -> None:
        self.frequency = self.weight = 0.0
        self.at = at
        self.density: float | None = None


class Worth:
    """Worth = frequency x cost / size, as in GreedyDual-Size-Frequency (Cherkasova, HP Labs
    HPL-98-69, 1998). What ages it is the frequency: of each use 0.5^(age / half-life) counts, as in
    LRFU (Lee et al., IEEE Transactions on Computers 50(12), 2001).

    Frequencies outlast eviction, for MAX_REMEMBERED adapters: one that comes and goes gathers
    uses, while each of a scan has one and goes first.
    """

    def __init__(self) -> None:
        self._records = NewestKept[str, _Record](MAX_REMEMBERED)
        self._uses = 0
        self._usual: float | None = None  # density, smoothed over all loads

    def used(self, digest: str, num_held: int) -> None:
        """Count one more use of the adapter. num_held: adapters that the arena holds."""
        self._uses += 1
        record = self._record(digest)
        decay = math.exp2((record.at - self._uses) / _half_life(num_held))
        record.frequency = 1.0 + record.frequency * decay
        record.weight = math.log2(record.frequency)
        record.at = self._uses

    def loaded(self, digest: str, num_extents: int, load_s: float | None) -> None:
        """Note that the adapter has been loaded. load_s: seconds that this load took, without waits
        for room; None = not measured.
        """
        record = self._record(digest)
        if load_s is None:
            return
        density = math.log2(max(load_s, 1e-6) / num_extents)
        usual = density if self._usual is None else self._usual
        # One load may have been slow by chance: the first counts half.
        record.density = (density + (usual if record.density is None else record.density)) / 2
        self._usual = usual + (density - usual) / 16

    def cheapest_first(self, digests: Sequence[str], num_held: int) -> Iterator[str]:
        """Order adapters for eviction, the cheapest to lose first. digests: least recently used
        first; of equal worth these go first.
        """
        split = len(digests) - len(digests) // NEWEST_SHARE
        worth = self._worths(digests[:split], num_held).__getitem__
        for at in nsmallest(_FEW, range(split), key=worth):
            yield digests[at]
        for at in sorted(range(split), key=worth)[_FEW:]:
            yield digests[at]
        yield from digests[split:]

    def _worths(self, digests: Sequence[str], num_held: int) -> list[float]:
        """The log2 of each adapter's worth, without the part that is the same for all."""
        half_life, most, worths = _half_life(num_held), MAX_DENSITY_LOG2, []
        usual = self._usual or 0.0  # None: then no density is known either
        # All of an arena's, on a loop that carries streams: nothing more is called for each.
        for record in map(self._records.get, digests):
            if record is None:
                worth = -math.inf
            else:
                worth = record.weight + record.at / half_life
                density = record.density
                if density is not None:
                    dear = density - usual
                    worth += dear if -most < dear < most else most if dear > 0.0 else -most
            worths.append(worth)
        return worths

    def _record(self, digest: str) -> _Record:
        record = self._records.get(digest) or _Record(self._uses)
        self._records[digest] = record
        return record


def _half_life(num_held: int) -> int:
    return HALF_LIFE_TURNS * max(4, num_held)
