"""How an absent adapter comes to the device: who waits for it, whose turn it is, who must give way.

Pure. It asks the shell for slabs, places them in the device arena and orders the copies. Sequences
of other adapters go on meanwhile; one that waits too long for room makes a few adapters in use run
dry.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from server.engine.executor import AdapterCopy
from server.engine.memory.residency import AdapterArena
from server.engine.messages import AdapterSettled
from server.engine.scheduling.drain import Drain, renew_drain
from server.engine.scheduling.sequence import ORDER, Order, Sequence, adapters_before

# What nobody waits for comes after all that somebody waits for.
_LAST = Order(1 << 62, 0)
# What finds no room though nobody waits for it is not tried again for so long while others wait.
_STAND_BACK_S = 1.0
_PINNED = "the adapter is pinned"


@dataclass(frozen=True, slots=True)
class Staged:
    """A slab in the host arena that waits for room on the device."""

    copy: AdapterCopy  # without places on the device
    since: float
    load_s: float


class Loads(NamedTuple):
    """Copies to start, slabs wanted of the shell, slabs it may take back, answers to its orders."""

    copies: list[AdapterCopy]
    needed: list[str]
    released: list[str]
    settled: list[AdapterSettled]


class _Copying(NamedTuple):
    """since: when the copy was ordered. load_s: what came before it."""

    since: float
    load_s: float


class AdapterLoads:
    """A digest with waiters is asked for -> staged -> copying -> ready; `max_loading` at once.

    So is one that is wanted without waiters (pinned, preloaded), after all others: while a waiter's
    slab is not here, it keeps neither a place nor host memory without room on the device. `settled`
    tells how that ended. What lies in host memory may be staged without being asked for. The
    caller takes `needed`, `copies`, `released`, `settled` and `refused` (lists) after each round
    and empties them.

    Each slab that is handed over comes back once (`released`); until then it is not asked for.
    """

    def __init__(self, arena: AdapterArena, max_loading: int, drain_after_s: float) -> None:
        self.arena = arena
        self.max_loading = max_loading
        self.drain_after_s = drain_after_s
        self.needed: list[str] = []
        self.copies: list[AdapterCopy] = []
        self.released: list[str] = []
        self.settled: list[AdapterSettled] = []
        self.refused: list[tuple[str, str]] = []  # digests with waiters, and why not
        # Both in order, with the orders that each answers; of what is pinned there may be none.
        self._wanted: dict[str, list[int]] = {}
        self._condemned: dict[str, list[int]] = {}
        self._parked: dict[str, list[Sequence]] = {}
        self.num_parked = 0
        self._asked: set[str] = set()
        self._staged: dict[str, Staged] = {}
        self._copying: dict[str, _Copying] = {}
        self._ending: set[str] = set()  # ready, or even gone again, while the host block is read
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
        """All decided since the last call."""
        taken = Loads(self.copies, self.needed, self.released, self.settled)
        self.copies, self.needed, self.released, self.settled = [], [], [], []
        return taken

    # ---- waiters

    def park(self, sequence: Sequence) -> None:
        assert sequence.adapter is not None
        insort(self._parked.setdefault(sequence.adapter, []), sequence, key=ORDER)
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
        """Whether its adapter is to run dry before this sequence may start."""
        drain = self._drain
        return (
            drain is not None and sequence.adapter in drain.digests and sequence.order > drain.order
        )

    # ---- answers of the shell and the executor

    def staged(self, copy: AdapterCopy, load_s: float, now: float) -> str | None:
        """The slab lies in the host arena; `copy` tells where, load_s what bringing it there took.
        Returns why it cannot be used."""
        layout = copy.layout
        if self._is_held(layout.digest):
            return None  # the first one comes back
        # As many unasked as may be asked for; what the disk holds up takes no place of theirs.
        here = len(self._staged) + len(self._copying)
        if layout.digest not in self._asked and here >= self.max_loading:
            self.released.append(layout.digest)
            return None
        self._asked.discard(layout.digest)
        problem = self.arena.refusal(layout.runs)
        if problem is None and len(copy.host_extents) != len(layout.runs):
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
        """The slab cannot be staged. Returns those who waited for it."""
        if digest not in self._asked:
            return []
        self._asked.discard(digest)
        self._end_want(digest, message)
        return self.take_waiters(digest)

    def usable(self, digest: str, now: float) -> None:
        """READY, though its host block is still read."""
        copying = self._copying.pop(digest)
        self._ending.add(digest)
        self.arena.finish(digest, copying.load_s + now - copying.since)
        self._end_want(digest, None)

    def over(self, digest: str, error: str | None) -> None:
        """The host block is no longer read. error: it did not become usable: ABSENT."""
        self.released.append(digest)
        if error is None:
            self._ending.remove(digest)
            return
        del self._copying[digest]
        self.arena.drop(digest)
        self._end_want(digest, error)

    def take_waiters(self, digest: str) -> list[Sequence]:
        """All that wait for it, in order; they wait here no longer."""
        waiters = self._parked.pop(digest, [])
        self.num_parked -= len(waiters)
        return waiters

    # ---- wishes of the operator

    def pin_only(self, digests: Iterable[str]) -> None:
        """These stay on the device once they are there, and come there if they are not."""
        pins = frozenset(digests)
        self.arena.pin_only(pins)
        for digest in [d for d, orders in self._wanted.items() if not orders and d not in pins]:
            del self._wanted[digest]
        for digest in sorted(pins):
            self._settle(self._condemned.pop(digest, ()), _PINNED)
            if self.arena.stage(digest) == "absent":
                self._wanted.setdefault(digest, [])

    def preload(self, order: int, digest: str) -> None:
        """It overtakes evictions that still wait."""
        self._settle(self._condemned.pop(digest, ()), "it was loaded again meanwhile")
        if self.arena.stage(digest) == "ready":
            self._settle([order])
        else:
            self._wanted.setdefault(digest, []).append(order)

    def withdraw(self, order: int, digest: str) -> None:
        """Nobody waits for this preload's end any more."""
        orders = self._wanted.get(digest, [])
        if order in orders:
            orders.remove(order)
            if not orders and digest not in self.arena.pins:
                del self._wanted[digest]

    def condemn(self, order: int, digest: str) -> None:
        """It is dropped as soon as no sequence needs it. That overtakes preloads under way."""
        if digest in self.arena.pins:
            self._settle([order], _PINNED)
            return
        self._settle(self._wanted.pop(digest, ()), "it was evicted meanwhile")
        self._condemned.setdefault(digest, []).append(order)

    def drop_condemned(self, sequences: Iterable[Sequence]) -> None:
        """sequences: all that are not over."""
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
        """Want more slabs of the shell, those with the oldest waiter first."""
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
        """Whether there is a waiter for whom a place is needed, or room in host memory."""
        return not all(map(self._is_held, self._parked))

    def _oldest(self, digest: str) -> Order:
        return self._parked[digest][0].order if digest in self._parked else _LAST

    def give_room(self, now: float, waiting: list[Sequence], running: Iterable[Sequence]) -> None:
        """Place staged slabs, those with the oldest waiter first, and order their copies.

        waiting: sequences with a ready adapter, in order: older ones keep it from being evicted.
        """
        for digest in [d for d in self._staged if not self._asked_for(d)]:
            del self._staged[digest]
            self.released.append(digest)
        drain, self._drain = self._drain, None
        for digest in sorted(self._staged, key=self._oldest):
            staged, order = self._staged[digest], self._oldest(digest)
            layout, runs = staged.copy.layout, staged.copy.layout.runs
            placement = self.arena.place(digest, runs, adapters_before(order, waiting))
            if placement is not None:
                del self._staged[digest]
                self._copying[digest] = _Copying(now, staged.load_s)
                slot, extents, _ = placement
                self.copies.append(AdapterCopy(slot, layout, staged.copy.host_extents, extents))
            elif (problem := self.arena.refusal(runs)) is not None:
                self._refuse(digest, problem)  # pins have come since it was staged
            elif digest in self._parked and now - staged.since >= self.drain_after_s:
                # Nobody may overtake it any more, or small adapters would starve a large one.
                self._drain = renew_drain(drain, self.arena, digest, runs, order, running)
                break
        self._stand_back(now)

    def _stand_back(self, now: float) -> None:
        """What is staged without waiters makes way for those who wait. It stays wanted."""
        without = [d for d in self._staged if d not in self._parked]
        if not without or not self._somebody_lacks_a_slab():
            return
        self._stands_back_until = now + _STAND_BACK_S
        for digest in without:
            del self._staged[digest]
            self.released.append(digest)
            self._wanted[digest] = self._wanted.pop(digest)  # another's turn is first

    def _refuse(self, digest: str, problem: str) -> None:
        del self._staged[digest]
        self.released.append(digest)
        self.refused.append((digest, problem))
        self._end_want(digest, problem)
