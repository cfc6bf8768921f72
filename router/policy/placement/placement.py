"""Chooses the worker for a sequence, with the reason. Pure.

An adapter lives on few workers: where its rendezvous ranking puts it, and on more as its demand
grows. Another worker is used only when those are full and waiting for them would cost more than a
load.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from loraplex.adapters.common.newest import NewestKept
from loraplex.router.policy.placement.prefixes import PrefixMemory
from loraplex.router.policy.placement.rendezvous import Rankings
from loraplex.router.policy.placement.workers import WorkerView

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
