"""Miss rates and waits of placement policies on simulated fleets, side by side."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

from loraplex.launcher.bench.commands import print_points
from loraplex.launcher.bench.report import percentile
from loraplex.launcher.command_line import Parser
from loraplex.launcher.option_types import above, number, whole, wholes
from loraplex.router.policy.placement.placement import (
    Decision,
    PlacementRequest,
    Placer,
    Rankings,
    Reason,
    WorkerView,
)
from tools.bench.simulation.fleet import SimulatedFleet
from tools.bench.simulation.traffic import SHAPES, Shape, Traffic
from tools.bench.simulation.worker import WorkerModel

# Share of a run that is not measured, while the fleet's memory fills.
_WARM_UP = 0.3


class Simple(Placer):
    """Takes a worker with room by a rule of its own, as simple gateways do."""

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
    """Keeps to an adapter's one worker, by its hash, whatever waits there."""

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


@dataclass(frozen=True, slots=True)
class PlacementScene:
    """use: offered load, as a share of what the fleet could serve without a load."""

    shape: Shape
    workers: int
    adapters: int
    requests: int
    zipf: float
    use: float
    model: WorkerModel
    seed: int

    def traffic(self) -> Traffic:
        plain = Traffic(self.shape, self.requests, 1.0, self.adapters, self.zipf, seed=self.seed)
        capacity = self.workers * self.model.requests_per_s(*plain.mean_tokens())
        return Traffic(
            shape=self.shape,
            requests=self.requests,
            rate=self.use * capacity,
            adapters=self.adapters,
            zipf=self.zipf,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class PlacementResult:
    """requests: that are counted, after the first `warm_up`. miss_rate: those that caused a load.

    Waits: from arrival until it is computed, in ms. goodput: requests a second that waited at most
    a second.
    """

    policy: str
    shape: Shape
    workers: int
    adapters: int
    requests: int
    warm_up: int
    miss_rate: float
    wait_p50_ms: float
    wait_p99_ms: float
    goodput_per_s: float
    end_p99_ms: float


def simulate(scene: PlacementScene, policy: str) -> PlacementResult:
    fleet = SimulatedFleet(scene.workers, scene.model, POLICIES[policy]())
    fleet.run(scene.traffic().arrivals())
    warm_up = int(_WARM_UP * len(fleet.jobs))
    jobs = fleet.jobs[warm_up:]
    waits = [1e3 * (job.started_s - job.arrived_s) for job in jobs]
    seconds = max(1e-9, max(job.ended_s for job in jobs) - jobs[0].arrived_s)
    return PlacementResult(
        policy=policy,
        shape=scene.shape,
        workers=scene.workers,
        adapters=scene.adapters,
        requests=len(jobs),
        warm_up=warm_up,
        miss_rate=sum(job.missed for job in jobs) / len(jobs),
        wait_p50_ms=percentile(waits, 50),
        wait_p99_ms=percentile(waits, 99),
        goodput_per_s=sum(wait <= 1000.0 for wait in waits) / seconds,
        end_p99_ms=percentile([1e3 * (job.ended_s - job.arrived_s) for job in jobs], 99),
    )


def add_arguments(parser: Parser) -> None:
    """Adds the options; lists make a run of each combination."""
    parser.add_argument("--shape", action="append", choices=SHAPES, help="default: zipf")
    parser.add_argument("--policy", action="append", choices=[*POLICIES], help="default: all")
    parser.add_argument("--workers", type=wholes(1), default=(16,), metavar="N,…")
    parser.add_argument("--adapters", type=wholes(1), default=(4000,), metavar="N,…")
    parser.add_argument("--requests", type=whole(1), default=20_000)
    parser.add_argument("--zipf", type=number(0), default=1.0, help="exponent of popularity")
    parser.add_argument("--use", type=above(0), default=0.7, help="load, as a share of what fits")
    parser.add_argument("--slots", type=whole(1), default=64, help="adapters a worker")
    parser.add_argument("--load-ms", type=above(0), default=30.0, help="an adapter to a device")
    parser.add_argument("--seed", type=int, default=0)


def run(arguments: argparse.Namespace) -> None:
    print_points(_results(arguments), arguments.json)


def _results(arguments: argparse.Namespace) -> Iterator[PlacementResult]:
    model = WorkerModel(slots=arguments.slots, load_s=arguments.load_ms / 1e3)
    axes = arguments.shape or ["zipf"], arguments.workers, arguments.adapters
    for shape, workers, adapters in product(*axes):
        scene = PlacementScene(
            shape=shape,
            workers=workers,
            adapters=adapters,
            requests=arguments.requests,
            zipf=arguments.zipf,
            use=arguments.use,
            model=model,
            seed=arguments.seed,
        )
        for policy in arguments.policy or POLICIES:
            yield simulate(scene, policy)
