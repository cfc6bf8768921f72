"""How absent adapters come to the device: who waits, which is next, which must give way. Pure.

`AdapterLoads` asks the worker for slabs, places them in the device arena and starts the copies.
Sequences of other adapters go on meanwhile. An adapter that waits too long for room makes a few
adapters in use drain.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from loraplex.server.engine.executor import AdapterCopy
from loraplex.server.engine.memory.residency import AdapterArena
from loraplex.server.engine.messages import AdapterSettled
from loraplex.server.engine.scheduling.sequence import (
    BY_PRECEDENCE,
    Precedence,
    Sequence,
    adapters_before,
)

# Adapters without waiters come after all adapters with waiters.
_LAST = Precedence(1 << 62, 0)
# An adapter without waiters that found no room is not tried again for this long while others wait.
_STAND_BACK_S = 1.0
_PINNED = "the adapter is pinned"


@dataclass(frozen=True, slots=True)
class Drain:
    """Order that frees room for an adapter. `digests` take no sequence that comes after
    `precedence`, until `beneficiary` has room.
    """

    beneficiary: str
    precedence: Precedence
    digests: frozenset[str]


def renew_drain(
    drain: Drain | None,
    arena: AdapterArena,
    digest: str,
    runs: tuple[int, ...],
    precedence: Precedence,
    running: Iterable[Sequence],
) -> Drain:
    """Choose adapters whose eviction makes room for `digest`, soonest done first.

    drain: the choice so far; it is kept while it still makes enough room.
    """
    kept = drain.digests if drain is not None and drain.beneficiary == digest else frozenset()
    if kept and arena.would_fit(runs, kept):
        return Drain(digest, precedence, kept)
    remaining: dict[str, int] = {}
    for sequence in running:
        if sequence.adapter is not None:
            longest = max(remaining.get(sequence.adapter, 0), sequence.remaining)
            remaining[sequence.adapter] = longest
    chosen: set[str] = set()
    for candidate in sorted(remaining, key=lambda d: (remaining[d], d)):
        if arena.would_fit(runs, chosen):
            break
        chosen.add(candidate)
    return Drain(digest, precedence, frozenset(chosen))


@dataclass(frozen=True, slots=True)
class Staged:
    """A slab in the host arena that waits for room on the device."""

    copy: AdapterCopy  # without places on the device
    since: float
    load_s: float


class Loads(NamedTuple):
    """Copies to start, slabs to ask the worker for, slabs to give back, answers to its orders."""

    copies: list[AdapterCopy]
    needed: list[str]
    released: list[str]
    settled: list[AdapterSettled]


class _Copying(NamedTuple):
    """Times of a copy under way: of the decision, and seconds of loading before it."""

    since: float
    load_s: float


class AdapterLoads:
    """A digest with waiters is asked for -> staged -> copying -> ready; `max_loading` at once.

    Pinned and preloaded adapters follow the same steps after all adapters that sequences wait for.
    While such a sequence still lacks its slab, they give up their load slot and their host memory
    unless there is room on the device. `settled` says how each preload and eviction ended. The
    worker may stage a slab of its host memory unasked. After each round the caller takes
    the lists `needed`, `copies`, `released`, `settled` and `refused`, and empties them.

    Each slab that is handed over comes back once (`released`). Until then it is not asked for.
    """

    def __init__(
        self,
        arena: AdapterArena,
        max_loading: int,
        drain_after_s: float,
        tower_layer: int | None = None,
    ) -> None:
        """tower_layer: as of `PictureLimits`."""
        self.arena = arena
        self._tower_layer = tower_layer
        self.max_loading = max_loading
        self.drain_after_s = drain_after_s
        self.needed: list[str] = []
        self.copies: list[AdapterCopy] = []
        self.released: list[str] = []
        self.settled: list[AdapterSettled] = []
        self.refused: list[tuple[str, str]] = []  # digests with waiters, and why not
        # Both in order of arrival, with the orders that each answers. A pin alone has none.
        self._wanted: dict[str, list[int]] = {}
        self._condemned: dict[str, list[int]] = {}
        self._parked: dict[str, list[Sequence]] = {}
        self.num_parked = 0
        self._asked: set[str] = set()
        self._staged: dict[str, Staged] = {}
        self._copying: dict[str, _Copying] = {}
        # Ready, or already evicted, while the host block is still read.
        self._ending: set[str] = set()
        # Of the adapter that was placed last in each slot.
        self._vocabularies = [0] * arena.num_slots
        self._is_lora_alone = [True] * arena.num_slots
        self._changes_tower = [False] * arena.num_slots
        self._drain: Drain | None = None
        self._stands_back_until = -inf

    @property
    def copying(self) -> bool:
        """Whether some copy is not over."""
        return bool(self._copying or self._ending)

    @property
    def loading(self) -> tuple[str, ...]:
        return (*self._asked, *self._staged, *self._copying)

    def take(self) -> Loads:
        """Everything decided since the last call."""
        taken = Loads(self.copies, self.needed, self.released, self.settled)
        self.copies, self.needed, self.released, self.settled = [], [], [], []
        return taken

    # ---- waiters

    def park(self, sequence: Sequence) -> None:
        assert sequence.adapter is not None
        insort(self._parked.setdefault(sequence.adapter, []), sequence, key=BY_PRECEDENCE)
        self.num_parked += 1

    def unpark(self, sequence: Sequence) -> None:
        assert sequence.adapter is not None
        parked = self._parked.get(sequence.adapter, [])
        if sequence in parked:
            parked.remove(sequence)
            self.num_parked -= 1
            if not parked:
                del self._parked[sequence.adapter]

    def holds_back(self, sequence: Sequence) -> bool:
        """Whether its adapter drains, so that this sequence may not start yet."""
        drain = self._drain
        return (
            drain is not None
            and sequence.adapter in drain.digests
            and sequence.precedence > drain.precedence
        )

    def changes_tower(self, digest: str) -> bool:
        """Whether an adapter that is on the device changes what reads pictures."""
        return self._changes_tower[self.arena.slot(digest)]

    def misfit(self, sequence: Sequence) -> str | None:
        """Why a sequence may not start whose adapter is ready, or None."""
        wanted, scale = sequence.request.vocab_size, sequence.request.adapter_scale
        slot = -1 if sequence.adapter is None else self.arena.slot(sequence.adapter)
        if wanted is not None and (slot < 0 or self._vocabularies[slot] != wanted):
            return f"vocab_size: {wanted} is not that of the adapter"
        if scale != 1 and slot >= 0 and not self._is_lora_alone[slot]:
            return f"adapter_scale: {scale:g} is for adapters of LoRA alone"
        if sequence.adapter_from and slot >= 0 and self._changes_tower[slot]:
            return "adapter_from: the adapter changes the part for images, and acts on all tokens"
        return None

    # ---- answers of the worker and the executor

    def staged(self, copy: AdapterCopy, load_s: float, now: float) -> str | None:
        """The slab is in the host arena. copy: where. load_s: seconds of bringing it there.
        Returns why the slab cannot be used, or None."""
        layout = copy.layout
        if self._is_held(layout.digest):
            return None  # the first one comes back
        # As many may come unasked as asked for. Slabs that the disk delays do not count.
        here = len(self._staged) + len(self._copying)
        if layout.digest not in self._asked and here >= self.max_loading:
            self.released.append(layout.digest)
            return None
        self._asked.discard(layout.digest)
        problem = self.arena.refusal(layout.runs)
        if problem is None and len(copy.host_extents) != len(layout.all_runs):
            problem = "malformed layout: one host extent a run expected"
        if problem is None and layout.extent_bytes != self.arena.extent_bytes:
            problem = f"slab has extents of {layout.extent_bytes} bytes, the arena has others"
        if problem is not None or not self._asked_for(layout.digest):
            self.released.append(layout.digest)
            self._end_want(layout.digest, problem)
            return problem
        self._staged[layout.digest] = Staged(copy, now, load_s)
        return None

    def missing(self, digest: str, message: str) -> list[Sequence]:
        """The slab cannot be staged. Returns the sequences that waited for it."""
        if digest not in self._asked:
            return []
        self._asked.discard(digest)
        self._end_want(digest, message)
        return self.take_waiters(digest)

    def usable(self, digest: str, now: float) -> None:
        """The adapter is ready, though its host block is still read."""
        copying = self._copying.pop(digest)
        self._ending.add(digest)
        self.arena.finish(digest, copying.load_s + now - copying.since)
        self._end_want(digest, None)

    def over(self, digest: str, error: str | None) -> None:
        """The host block is no longer read. error: why the adapter did not become usable; it is
        absent then."""
        self.released.append(digest)
        if error is None:
            self._ending.remove(digest)
            return
        del self._copying[digest]
        self.arena.drop(digest)
        self._end_want(digest, error)

    def take_waiters(self, digest: str) -> list[Sequence]:
        """Remove and return all sequences that wait for it, in order of precedence."""
        waiters = self._parked.pop(digest, [])
        self.num_parked -= len(waiters)
        return waiters

    # ---- wishes of the operator

    def pin_only(self, digests: Iterable[str]) -> None:
        """Keep these adapters, and no others, on the device. Absent ones are loaded."""
        pins = frozenset(digests)
        self.arena.pin_only(pins)
        for digest in [d for d, orders in self._wanted.items() if not orders and d not in pins]:
            del self._wanted[digest]
        for digest in sorted(pins):
            self._settle(self._condemned.pop(digest, ()), _PINNED)
            if self.arena.stage(digest) == "absent":
                self._wanted.setdefault(digest, [])

    def preload(self, order: int, digest: str) -> None:
        """Bring the adapter to the device. Evictions of it that still wait are given up."""
        self._settle(self._condemned.pop(digest, ()), "it was loaded again meanwhile")
        if self.arena.stage(digest) == "ready":
            self._settle([order])
        else:
            self._wanted.setdefault(digest, []).append(order)

    def withdraw(self, order: int, digest: str) -> None:
        """The end of this preload is not awaited any more."""
        orders = self._wanted.get(digest, [])
        if order in orders:
            orders.remove(order)
            if not orders and digest not in self.arena.pins:
                del self._wanted[digest]

    def condemn(self, order: int, digest: str) -> None:
        """Evict the adapter as soon as no sequence needs it. Preloads of it are given up."""
        if digest in self.arena.pins:
            self._settle([order], _PINNED)
            return
        self._settle(self._wanted.pop(digest, ()), "it was evicted meanwhile")
        self._condemned.setdefault(digest, []).append(order)

    def drop_condemned(self, sequences: Iterable[Sequence]) -> None:
        """Drop condemned adapters that none of `sequences`, all unfinished ones, needs."""
        if not self._condemned:
            return
        needed = {sequence.adapter for sequence in sequences}
        for digest in list(self._condemned):
            if digest in needed or digest in self.loading or self.arena.leases(digest):
                continue
            if self.arena.stage(digest) == "ready":
                self.arena.drop(digest)
            self._settle(self._condemned.pop(digest))

    def _is_held(self, digest: str) -> bool:
        """Whether its slab was handed over and is not given back."""
        return digest in self._staged or digest in self._copying or digest in self._ending

    def _asked_for(self, digest: str) -> bool:
        return digest in self._parked or digest in self._wanted

    def _end_want(self, digest: str, problem: str | None) -> None:
        self._settle(self._wanted.pop(digest, ()), problem)

    def _settle(self, orders: Iterable[int], error: str | None = None) -> None:
        self.settled += [AdapterSettled(order, error) for order in orders]

    # ---- once a plan

    def ask(self, now: float) -> None:
        """Ask the worker for more slabs, those with the oldest waiter first."""
        while len(self.loading) < self.max_loading:
            digest = self._next_absent(now)
            if digest is None:
                break
            self._asked.add(digest)
            self.needed.append(digest)

    def _next_absent(self, now: float) -> str | None:
        absent = [d for d in self._parked if d not in self._asked and not self._is_held(d)]
        if absent:
            return min(absent, key=self._oldest)
        if now < self._stands_back_until and self._somebody_lacks_a_slab():
            return None
        wanted = (d for d in self._wanted if d not in self._asked and not self._is_held(d))
        return next(wanted, None)

    def _somebody_lacks_a_slab(self) -> bool:
        """Whether a sequence waits for a slab that is not in host memory."""
        return not all(map(self._is_held, self._parked))

    def _oldest(self, digest: str) -> Precedence:
        return self._parked[digest][0].precedence if digest in self._parked else _LAST

    def give_room(self, now: float, waiting: list[Sequence], running: Iterable[Sequence]) -> None:
        """Place staged slabs, those with the oldest waiter first, and start their copies.

        waiting: sequences with a ready adapter, in order of precedence. An adapter is not evicted
        for a waiter that comes after them.
        """
        for digest in [d for d in self._staged if not self._asked_for(d)]:
            del self._staged[digest]
            self.released.append(digest)
        drain, self._drain = self._drain, None
        for digest in sorted(self._staged, key=self._oldest):
            staged, precedence = self._staged[digest], self._oldest(digest)
            layout, runs = staged.copy.layout, staged.copy.layout.runs
            placement = self.arena.place(digest, runs, adapters_before(precedence, waiting))
            if placement is not None:
                del self._staged[digest]
                self._copying[digest] = _Copying(now, staged.load_s)
                slot, extents, _ = placement
                self.copies.append(AdapterCopy(slot, layout, staged.copy.host_extents, extents))
                self._vocabularies[slot] = max((s.table_size for s in layout.sites), default=0)
                self._is_lora_alone[slot] = layout.is_lora_alone
                first = self._tower_layer
                self._changes_tower[slot] = first is not None and any(
                    site.layer >= first for site in layout.sites
                )
            elif (problem := self.arena.refusal(runs)) is not None:
                self._refuse(digest, problem)  # pins have come since it was staged
            elif digest in self._parked and now - staged.since >= self.drain_after_s:
                # No other adapter is placed before it, or small ones would starve a large one.
                self._drain = renew_drain(drain, self.arena, digest, runs, precedence, running)
                break
        self._stand_back(now)

    def _stand_back(self, now: float) -> None:
        """Give back staged slabs without waiters while others wait. They stay wanted."""
        without = [d for d in self._staged if d not in self._parked]
        if not without or not self._somebody_lacks_a_slab():
            return
        self._stands_back_until = now + _STAND_BACK_S
        for digest in without:
            del self._staged[digest]
            self.released.append(digest)
            self._wanted[digest] = self._wanted.pop(digest)  # the others are tried first

    def _refuse(self, digest: str, problem: str) -> None:
        del self._staged[digest]
        self.released.append(digest)
        self.refused.append((digest, problem))
        self._end_want(digest, problem)
