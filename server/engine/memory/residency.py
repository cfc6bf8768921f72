"""The adapters that an arena of fixed-size extents holds: free extents, leases, worth and
evictions. Pure.

Used for the device arena (by the scheduler) and for the host arena (by the worker). It moves no
bytes and knows no clock: recency is the order of calls, and an adapter's worth counts uses.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice
from typing import Literal, NamedTuple

from loraplex.adapters.common.newest import NewestKept

FREE = 1
TAKEN = 0

# The first of an unbroken row of extents, and how many there are.
Span = tuple[int, int]

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

AdapterStage = Literal["absent", "loading", "ready"]


def _mark(extents: bytearray, spans: Iterable[Span], state: int) -> None:
    """Write the state of all extents in the spans: FREE or TAKEN."""
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


def _spread(firsts: Sequence[int], runs: Sequence[int]) -> tuple[int, ...]:
    """List all extents of runs. firsts: of each run."""
    if len(firsts) == sum(runs):
        return tuple(firsts)
    return tuple(each(zip(firsts, runs, strict=True)))


def _join(firsts: Sequence[int], runs: Sequence[int]) -> tuple[Span, ...]:
    """Join runs that lie side by side, in ascending order. firsts: of each run."""
    joined: list[Span] = []
    begin = end = -1
    for first, length in sorted(zip(firsts, runs, strict=True)):
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


class Placement(NamedTuple):
    """Place of an adapter in the arena. extents: the first extent of each of its runs, in the runs'
    order.

    evicted: digests that went to make room for it.
    """

    adapter_slot: int
    extents: tuple[int, ...]
    evicted: tuple[str, ...] = ()


@dataclass(slots=True)
class _Entry:
    placement: Placement
    extents: tuple[int, ...]  # every one of them
    spans: tuple[Span, ...]  # the same
    ready: bool = False
    leases: int = 0


class AdapterArena:
    """ABSENT -> LOADING -> READY (leases) -> ABSENT, for every digest.

    A lease protects an adapter from eviction. Its holder keeps it until the last step that reads
    the adapter was *collected*, so an unleased adapter is read by no step in flight, and its
    extents and slot may be overwritten at once. Without a use for slots, give as many as extents.
    """

    def __init__(self, num_extents: int, extent_bytes: int, num_slots: int) -> None:
        self.num_extents = num_extents
        self.extent_bytes = extent_bytes
        self.num_slots = num_slots
        self.evictions: Counter[EvictionReason] = Counter()
        self.num_ready = 0
        self._changes = self._reported_changes = 0  # of what is ready
        self._map = bytearray([FREE]) * num_extents
        self._free_slots = list(range(num_slots - 1, -1, -1))
        # Least recently used first. All of a plain dict are looked at in a fraction of the time.
        self._entries: dict[str, _Entry] = {}
        self._pins: frozenset[str] = frozenset()
        # The map if only what is pinned were here, and how many that are.
        self._beside_pins: tuple[bytearray, int] | None = None
        self._worth = Worth()

    # ---- questions

    @property
    def free_extents(self) -> int:
        return self._map.count(FREE)

    @property
    def used_bytes(self) -> int:
        return (self.num_extents - self.free_extents) * self.extent_bytes

    @property
    def num_adapters(self) -> int:
        """The number of adapters, those on their way included."""
        return len(self._entries)

    def stage(self, digest: str) -> AdapterStage:
        entry = self._entries.get(digest)
        if entry is None:
            return "absent"
        return "ready" if entry.ready else "loading"

    def placement(self, digest: str) -> Placement | None:
        entry = self._entries.get(digest)
        return entry.placement if entry else None

    def spans(self, digest: str) -> tuple[Span, ...]:
        """The adapter's place, in as few rows of extents as may be, lowest first; () if none."""
        entry = self._entries.get(digest)
        return entry.spans if entry else ()

    def nbytes(self, digest: str) -> int:
        """Bytes that an adapter takes here; 0 if it is absent."""
        entry = self._entries.get(digest)
        return len(entry.extents) * self.extent_bytes if entry else 0

    def leases(self, digest: str) -> int:
        entry = self._entries.get(digest)
        return entry.leases if entry else 0

    @property
    def ready(self) -> tuple[str, ...]:
        """Digests, least recently used first."""
        return tuple(d for d, e in self._entries.items() if e.ready)

    def take_resident(self) -> tuple[str, ...] | None:
        """Return `ready` if it has changed since the last call, else None."""
        reported, self._reported_changes = self._reported_changes, self._changes
        return None if reported == self._changes else self.ready

    @property
    def loading(self) -> tuple[str, ...]:
        return tuple(d for d, e in self._entries.items() if not e.ready)

    def refusal(self, runs: Sequence[int]) -> str | None:
        """Why an adapter of these runs can never be placed, or None if it can."""
        if any(length < 1 for length in runs):
            return "malformed layout: a run of extents must have a length of at least 1"
        if self.num_slots == 0:
            return "no adapter slots: adapters are switched off here"
        if sum(runs) > self.num_extents:
            need, have = sum(runs) * self.extent_bytes, self.num_extents * self.extent_bytes
            return f"adapter needs {need} bytes of adapter memory, but there are only {have} in all"
        if self._pins and not self._fits_beside_pins(runs):
            if self._beside_pins is not None and self._beside_pins[1] >= self.num_slots:
                return f"all {self.num_slots} adapter slots hold pinned adapters: unpin some"
            need, have = sum(runs) * self.extent_bytes, self.num_extents * self.extent_bytes
            return (
                f"adapter needs {need} bytes of adapter memory, and pinned adapters leave no room "
                f"for it in the {have} that there are: unpin some"
            )
        return None

    def would_fit(self, runs: Sequence[int], without: Collection[str]) -> bool:
        """Whether there is room once the adapters `without` and all unleased ones are evicted."""
        gone = [
            entry
            for digest, entry in self._entries.items()
            if self._evictable(digest, entry) or (digest in without and digest not in self._pins)
        ]
        return self._try(runs, gone) is not None

    def slot(self, digest: str) -> int:
        """The slot of an adapter that is here."""
        return self._entries[digest].placement.adapter_slot

    @property
    def pins(self) -> frozenset[str]:
        return self._pins

    # ---- changes

    def pin_only(self, digests: Collection[str]) -> None:
        """Save these adapters, present or absent, and no others from eviction."""
        self._pins = frozenset(digests)
        self._beside_pins = None

    def acquire(self, digest: str) -> Placement | None:
        """Look up and lease in one step; None unless READY. Every lease is released once."""
        entry = self._entries.get(digest)
        if entry is None or not entry.ready:
            return None
        entry.leases += 1
        self._entries[digest] = self._entries.pop(digest)
        self._worth.used(digest, len(self._entries))
        return entry.placement

    def release(self, digest: str) -> None:
        entry = self._entries[digest]
        if entry.leases < 1:
            raise ValueError(f"adapter {digest} has no lease to release")
        entry.leases -= 1
        self._entries[digest] = self._entries.pop(digest)

    def place(
        self, digest: str, runs: Sequence[int], keep: Collection[str] = ()
    ) -> Placement | None:
        """ABSENT -> LOADING. Evicts unleased READY adapters, those worth least first, as few as
        it takes.

        None: no room now, and nothing was evicted. `keep`: digests that must not be evicted.
        """
        if digest in self._entries:
            raise ValueError(f"adapter {digest} is already {self.stage(digest)}")
        if self.refusal(runs) is not None:
            return None
        victims = self._choose_victims(runs, keep)
        if victims is None:
            return None
        self._evict(victims, self._shortage(runs))
        extents = self._try(runs, ())
        assert extents is not None
        placement = Placement(self._free_slots.pop(), extents, tuple(victims))
        entry = _Entry(placement, _spread(extents, runs), _join(extents, runs))
        _mark(self._map, entry.spans, TAKEN)
        self._entries[digest] = entry
        if digest in self._pins:
            self._beside_pins = None
        return placement

    def finish(self, digest: str, load_s: float | None = None) -> None:
        """LOADING -> READY: the bytes are there. load_s: seconds of loading, if measured."""
        entry = self._entries[digest]
        if entry.ready:
            raise ValueError(f"adapter {digest} is ready already")
        entry.ready = True
        self.num_ready += 1
        self._changes += 1
        self._worth.loaded(digest, len(entry.extents), load_s)

    def drop(self, digest: str) -> None:
        """LOADING (given up; nothing writes it any more) or READY without leases -> ABSENT."""
        entry = self._entries[digest]
        if entry.leases:
            raise ValueError(f"adapter {digest} is in use")
        self._remove(digest)
        if entry.ready:
            self.evictions["order"] += 1

    # ---- inside

    def _evictable(self, digest: str, entry: _Entry) -> bool:
        return entry.ready and entry.leases == 0 and digest not in self._pins

    def _fits_beside_pins(self, runs: Sequence[int]) -> bool:
        """Whether there were room if only what is pinned were here. Asked at every attempt, so the
        map is kept as long as neither the pins nor their places change."""
        if self._beside_pins is None:
            pinned = [self._entries[d] for d in self._pins if d in self._entries]
            space = bytearray([FREE]) * self.num_extents
            for entry in pinned:
                _mark(space, entry.spans, TAKEN)
            self._beside_pins = space, len(pinned)
        space, num_pinned = self._beside_pins
        return num_pinned < self.num_slots and fit(bytearray(space), runs) is not None

    def _shortage(self, runs: Sequence[int]) -> EvictionReason:
        if self.free_extents < sum(runs):
            return "bytes"
        return "runs" if self._free_slots else "slots"

    def _evict(self, digests: Sequence[str], reason: EvictionReason) -> None:
        for digest in digests:
            self._remove(digest)
            self.evictions[reason] += 1

    def _remove(self, digest: str) -> None:
        entry = self._entries.pop(digest)
        self.num_ready -= entry.ready
        self._changes += entry.ready
        _mark(self._map, entry.spans, FREE)
        self._free_slots.append(entry.placement.adapter_slot)
        if digest in self._pins:
            self._beside_pins = None

    def _choose_victims(self, runs: Sequence[int], keep: Collection[str]) -> list[str] | None:
        """The fewest that make room, those worth least first; then spare each whose room is not
        needed."""
        if self._try(runs, ()) is not None:
            return []
        spared = self._pins.union(keep)
        # As `_evictable`, in place: all adapters are looked at, on a loop that carries streams.
        candidates = [
            d for d, e in self._entries.items() if e.ready and not e.leases and d not in spared
        ]
        cheapest = self._worth.cheapest_first(candidates, len(self._entries))
        victims: dict[str, _Entry] = {}
        low, high = 0, 0
        while self._try(runs, victims.values()) is None:
            if high == len(candidates):
                return None
            low, high = high + 1, min(max(1, 2 * high), len(candidates))
            victims |= {d: self._entries[d] for d in islice(cheapest, high - len(victims))}
        entries = list(victims.values())
        while low < high:
            middle = (low + high) // 2
            if self._try(runs, entries[:middle]) is None:
                low = middle + 1
            else:
                high = middle
        victims = dict(islice(victims.items(), low))
        for digest in reversed(tuple(victims)):
            others = [e for d, e in victims.items() if d != digest]
            if self._try(runs, others) is not None:
                del victims[digest]
        return list(victims)

    def _try(self, runs: Sequence[int], gone: Collection[_Entry]) -> tuple[int, ...] | None:
        """First extents for `runs` once the adapters `gone` are evicted, or None."""
        if not self._free_slots and not gone:
            return None
        if self.free_extents + sum(len(e.extents) for e in gone) < sum(runs):
            return None
        space = bytearray(self._map)
        for entry in gone:
            _mark(space, entry.spans, FREE)
        return fit(space, runs)
