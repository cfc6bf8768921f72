"""The placements that the router's own is compared with: what simple gateways do."""

from collections.abc import Callable, Sequence
from random import Random

from loraplex.router.policy.placement.placement import Decision, PlacementRequest, Placer, Reason
from loraplex.router.policy.placement.rendezvous import Rankings
from loraplex.router.policy.placement.workers import WorkerView


class Simple(Placer):
    """Takes a worker with room by a rule of its own. reason: what the queue learns of a miss."""

    def choose(
        self,
        request: PlacementRequest,
        workers: Sequence[WorkerView],
        with_room: Sequence[WorkerView],
        now: float,
        held_s: float,
    ) -> Decision | None:
        chosen = self.pick(request, workers, with_room)
        if chosen is None:
            return None
        reason: Reason = "resident" if chosen.holds(request.adapter) else "home"
        return Decision(chosen, reason)

    def pick(
        self,
        request: PlacementRequest,
        workers: Sequence[WorkerView],
        with_room: Sequence[WorkerView],
    ) -> WorkerView | None:
        raise NotImplementedError


class RandomWorker(Simple):
    def __init__(self) -> None:
        super().__init__()
        self._random = Random(0)

    def pick(
        self,
        request: PlacementRequest,
        workers: Sequence[WorkerView],
        with_room: Sequence[WorkerView],
    ) -> WorkerView | None:
        return self._random.choice(with_room)


class RoundRobin(Simple):
    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def pick(
        self,
        request: PlacementRequest,
        workers: Sequence[WorkerView],
        with_room: Sequence[WorkerView],
    ) -> WorkerView | None:
        self._next += 1
        return with_room[self._next % len(with_room)]


class LeastLoaded(Simple):
    def pick(
        self,
        request: PlacementRequest,
        workers: Sequence[WorkerView],
        with_room: Sequence[WorkerView],
    ) -> WorkerView | None:
        return min(with_room, key=lambda worker: (worker.in_flight, worker.worker_id))


class AffinityOnly(Simple):
    """An adapter's one worker, by its hash, whatever waits there."""

    def __init__(self) -> None:
        super().__init__()
        self._hashed = Rankings()

    def pick(
        self,
        request: PlacementRequest,
        workers: Sequence[WorkerView],
        with_room: Sequence[WorkerView],
    ) -> WorkerView | None:
        ranking = self._hashed.of(request.home_key, [worker.worker_id for worker in workers])
        home = min(workers, key=lambda worker: ranking[worker.worker_id])
        return home if home.has_room else None


POLICIES: dict[str, Callable[[], Placer]] = {
    "loraplex": Placer,
    "random": RandomWorker,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "affinity-only": AffinityOnly,
}
