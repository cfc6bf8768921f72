"""Chooses the worker for a sequence, with the reason. Pure.

An adapter lives on few workers: where its rendezvous ranking puts it, and on more as its demand
grows. Every router ranks alike without communication (Thaler and Ravishankar, 1998). A worker that
comes or goes moves only its own adapters. Another worker is used only when those are full and
waiting for them would cost more than a load. This router's own counts of a worker come first: what
a worker reports is half a second old.
"""

import math
from collections.abc import Container, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

import msgspec

from loraplex.adapters.common.newest import NewestKept
from loraplex.router.policy.placement.prefixes import PrefixMemory

MAX_RANKINGS = 1 << 14

# Sequences sent and not yet begun, at most: the rest waits where turns are kept. With KV to spare
# enough to fill the next steps; without, they would only queue up in front of the worker.
_STARTING_SHARE = 4
_LEAST_STARTING, _LEAST_STARTING_FULL = 32, 4
_KV_SPARE = 0.05
# Beyond the rows, so many of them: enough that a row that becomes free finds its next sequence.
_AHEAD_SHARE = 64
# So many of those are the next steps' prompts; more are a queue.
_STARTING_FREE, _STARTING_FREE_SHARE = 2, 16
# Copies to the device before any was measured: a slow disk's rate.
_FIRST_LOAD_BYTES_S = 1e9
# A load that was caused and is never reported (it failed, or the status was lost).
_COMING_S = 10.0

Reason = Literal[
    "base",  # needs no adapter: the least used worker
    "prefix",  # the worker that has seen the prompt's beginning
    "resident",  # the adapter is on its device
    "loading",  # the adapter is on its way to its device
    "home",  # nobody has the adapter: the best of its homes
    "spread",  # those that have it, or should, are full
]
MISSES: frozenset[Reason] = frozenset({"home", "spread"})

# A copy for each half of a worker that an adapter's sequences fill, and one more under pressure.
_SHARE_A_COPY = 0.5
# A home less once demand has been that much lower for so long.
_SHRINK_S = 30.0
# A worker that knows the prompt may be so much fuller than the emptiest one.
_PREFIX_SLACK = 0.25
# Weights for placing an adapter that no worker has, in loads that go before it. One is for a place
# in its ranking, so that routers agree where it lives, one for a worker's use.
_RANK_PRICE = 0.5
_USE_PRICE = 4.0
_SHORTEST_HOLD_S, _LONGEST_HOLD_S = 0.02, 1.0
MAX_ADAPTERS = 1 << 14


class Rankings:
    """Rankings of worker ids by key, remembered while the workers are the same."""

    def __init__(self) -> None:
        self._workers: tuple[str, ...] = ()
        self._rankings = NewestKept[str, dict[str, int]](MAX_RANKINGS)

    def of(self, key: str, worker_ids: Sequence[str]) -> dict[str, int]:
        """The rank of each worker; 0 = the first home."""
        workers = tuple(worker_ids)
        if workers != self._workers:
            self._workers = workers
            self._rankings.clear()
        ranking = self._rankings.get(key)
        if ranking is None:
            ranking = self._rankings[key] = rank(key, workers)
        return ranking


def rank(key: str, worker_ids: Sequence[str]) -> dict[str, int]:
    def score(worker_id: str) -> bytes:
        return blake2b(f"{worker_id}\0{key}".encode(), digest_size=8).digest()

    return {worker_id: i for i, worker_id in enumerate(sorted(worker_ids, key=score))}


class WorkerView(msgspec.Struct, eq=False):
    """One worker. Own: of this router.

    credits: sequences that this router may have there. in_flight: own, sent or about to be.
    starting: own, sent without a token yet although their adapter was there. begun: own, with a
    token. rows: own sequences that can be computed at once, 0 = not known. own: in_flight by
    adapter. coming: adapters that own sequences make it load, and when the first was sent.
    load: sequences there, whoever sent them. free_kv: share of KV pages. resident, loading:
    digests on its device, or on their way. admitted: what it is known to have on its disk.
    load_bytes_s: measured, of an adapter's way to the device.
    """

    worker_id: str
    ready: bool = False
    draining: bool = False
    credits: int = 1
    in_flight: int = 0
    starting: int = 0
    begun: int = 0
    rows: int = 0
    own: dict[str, int] = {}
    coming: dict[str, float] = {}
    load: int = 0
    free_kv: float = 1.0
    resident: frozenset[str] = frozenset()
    loading: frozenset[str] = frozenset()
    admitted: Container[str] = ()
    load_bytes_s: float = _FIRST_LOAD_BYTES_S

    @property
    def able(self) -> bool:
        return self.ready and not self.draining

    @property
    def size(self) -> int:
        """Own sequences that it can compute at once, as far as it is known."""
        return self.rows or self.credits

    @property
    def has_room(self) -> bool:
        if not self.ready or self.draining or self.in_flight >= self.credits:
            return False
        if self.rows and self.begun + self.starting >= self.rows + self.rows // _AHEAD_SHARE + 1:
            return False
        return self.starting < self._most_starting

    @property
    def has_spare(self) -> bool:
        """Whether there is room beyond what is kept for tenants that use less than their share.

        The root of the rows, rounded up: what random arrivals vary by (square-root staffing).
        """
        size = self.size
        taken = self.begun + self.starting if self.rows else self.in_flight
        return taken < size - math.ceil(math.sqrt(size))

    @property
    def is_free(self) -> bool:
        """Whether what is sent now begins at once, as far as can be seen from here."""
        return self.starting <= max(_STARTING_FREE, self.credits // _STARTING_FREE_SHARE)

    @property
    def _most_starting(self) -> int:
        if self.free_kv < _KV_SPARE:
            return _LEAST_STARTING_FULL
        return max(_LEAST_STARTING, self.credits // _STARTING_SHARE)

    @property
    def use(self) -> float:
        """How far it is from having no room, 0 to 1; more when credits were taken back."""
        return max(self.in_flight / max(1, self.credits), 1.0 - self.free_kv)

    def holds(self, digest: str) -> bool:
        """Whether the adapter is on its device, or on its way there."""
        return digest in self.resident or digest in self.loading or digest in self.coming

    def knows(self, digest: str) -> bool:
        """Whether it need not fetch the adapter."""
        return digest in self.resident or digest in self.admitted

    def enter(self, adapter: str, now: float) -> None:
        """Notes that an own sequence is on its way. adapter: "" = base."""
        self.in_flight += 1
        self.own[adapter] = self.own.get(adapter, 0) + 1
        if adapter and not self.holds(adapter):
            self.coming[adapter] = now

    def leave(self, adapter: str) -> None:
        """Notes that a sequence of this adapter is over."""
        self.in_flight -= 1
        left = self.own.pop(adapter) - 1
        if left:
            self.own[adapter] = left
        else:
            self.coming.pop(adapter, None)

    def begin(self, was_starting: bool) -> None:
        """Notes that the first event of an own sequence came."""
        self.starting -= was_starting
        self.begun += 1

    def arrived(self, now: float) -> None:
        """Takes account of a report of residency: what it states need not be guessed any more."""
        for digest, since in list(self.coming.items()):
            if digest in self.resident or digest in self.loading or now - since > _COMING_S:
                del self.coming[digest]


class PlacementRequest(NamedTuple):
    """Facts about a request that decide its worker.

    adapter: digest, "" = base. home_key: ranks the adapter's homes. nbytes: of the adapter.
    prefixes: as from `prefix_keys`. avoid: ids of workers that could not get the adapter.
    """

    adapter: str
    home_key: str = ""
    nbytes: int = 0
    prefixes: tuple[int, ...] = ()
    avoid: frozenset[str] = frozenset()


class Decision(NamedTuple):
    worker: WorkerView
    reason: Reason


class _Homes:
    """How many copies of an adapter its demand needs now, and how many are used.

    low_since: since when fewer would do.
    """

    __slots__ = ("low_since", "needed", "wanted")

    def __init__(self) -> None:
        self.needed = 1
        self.wanted = 1
        self.low_since: float | None = None


class Placer:
    """Chooses workers for sequences. It remembers homes and prefixes; all else comes in as
    arguments. `workers` always: all that are known.
    """

    def __init__(self) -> None:
        self._homes = NewestKept[str, _Homes](MAX_ADAPTERS)
        self._rankings = Rankings()
        self._prefixes = PrefixMemory()

    def choose(
        self,
        request: PlacementRequest,
        workers: Sequence[WorkerView],
        with_room: Sequence[WorkerView],
        now: float,
        held_s: float,
    ) -> Decision | None:
        """Chooses the worker for a sequence. with_room: those to choose from, not empty. held_s:
        waited for workers of its own. None: to wait for them longer is better."""
        free = [worker for worker in with_room if worker.is_free] or with_room
        if not request.adapter:
            return self._least_used(request, free, "base")
        copies = [worker for worker in workers if worker.able and worker.holds(request.adapter)]
        ranking = self._rankings.of(request.home_key, [worker.worker_id for worker in workers])
        homes = self._update_homes(request.adapter, workers, now)
        usable = [worker for worker in copies if worker in free]
        if usable:
            here = [worker for worker in usable if request.adapter in worker.resident]
            usable = sorted(here or usable, key=lambda worker: ranking[worker.worker_id])
            chosen = self._least_used(request, usable[: homes.wanted], "resident")
            return chosen if here else Decision(chosen.worker, "loading")
        if not copies:
            return Decision(_cheapest(request, free, ranking), "home")
        if held_s < _patience(request, free, crowded=len(copies) > homes.needed):
            return None
        homes.wanted = max(homes.wanted, len(copies) + 1)
        return Decision(_cheapest(request, free, ranking), "spread")

    def place(self, request: PlacementRequest, decision: Decision, now: float) -> None:
        """Notes that a sequence goes to the worker of a decision."""
        decision.worker.enter(request.adapter, now)
        self._prefixes.remember(request.prefixes, decision.worker.worker_id)

    def home(self, key: str, workers: Sequence[WorkerView]) -> WorkerView | None:
        """The worker to fetch an adapter to: its first home among those that take work."""
        able = [worker for worker in workers if worker.able]
        if not able:
            return None
        ranking = self._rankings.of(key, [worker.worker_id for worker in workers])
        return min(able, key=lambda worker: ranking[worker.worker_id])

    def _least_used(
        self, request: PlacementRequest, workers: Sequence[WorkerView], reason: Reason
    ) -> Decision:
        """Chooses the least used worker, unless one that knows the prompt is hardly more so."""
        least = min(workers, key=lambda w: (w.use, w.load, w.worker_id))
        if len(workers) > 1 and request.prefixes:
            known = self._prefixes.find(request.prefixes)
            for worker in workers:
                if worker.worker_id == known and worker.use <= least.use + _PREFIX_SLACK:
                    return Decision(worker, "prefix")
        return Decision(least, reason)

    def _update_homes(self, adapter: str, workers: Sequence[WorkerView], now: float) -> _Homes:
        """Updates how many homes an adapter has. The number grows with demand at once; it shrinks
        by one when demand has been low for a while.
        """
        homes = self._homes[adapter] = self._homes.get(adapter) or _Homes()
        demand = sum(worker.own.get(adapter, 0) for worker in workers) + 1
        a_copy = _SHARE_A_COPY * sum(worker.credits for worker in workers) / len(workers)
        homes.needed = math.ceil(demand / max(1.0, a_copy))
        if homes.needed >= homes.wanted:
            homes.wanted, homes.low_since = homes.needed, None
        elif homes.low_since is None:
            homes.low_since = now
        elif now - homes.low_since >= _SHRINK_S:
            homes.wanted, homes.low_since = homes.wanted - 1, now
        return homes


def _cheapest(
    request: PlacementRequest, workers: Sequence[WorkerView], ranking: dict[str, int]
) -> WorkerView:
    """The cheapest worker for a load. The price counts fetching, rank, use and earlier loads."""

    def price(worker: WorkerView) -> tuple[bool, float, int]:
        rank = ranking[worker.worker_id]
        loads = max(len(worker.coming), len(worker.loading))
        weighed = loads + _RANK_PRICE * rank + _USE_PRICE * worker.use
        return not worker.knows(request.adapter), weighed, rank

    return min(workers, key=price)


def _patience(request: PlacementRequest, workers: Sequence[WorkerView], *, crowded: bool) -> float:
    """Seconds to wait for a worker that has it: as long as a load takes (ski rental).

    crowded: it has more copies than its demand is worth; then as long as is bearable.
    """
    if crowded:
        return _LONGEST_HOLD_S
    rate = min(worker.load_bytes_s for worker in workers)
    return min(max(request.nbytes / rate, _SHORTEST_HOLD_S), _LONGEST_HOLD_S)
