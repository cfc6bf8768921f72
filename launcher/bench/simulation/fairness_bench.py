"""Fairness in a simulated fleet that one tenant floods, or that all tenants overload."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loraplex.launcher.bench.report import percentile
from loraplex.launcher.bench.simulation.fleet import UNLIMITED, SimulatedFleet
from loraplex.launcher.bench.simulation.traffic import Arrival, Traffic
from loraplex.launcher.bench.simulation.worker import Job, WorkerModel
from loraplex.router.policy.placement.placement import Placer
from loraplex.router.policy.queue.queue_limits import QueueLimits


@dataclass(frozen=True, slots=True)
class Crowd:
    """Tenants alike, each with `adapters` of its own, sending for `seconds`.

    shares: what each sends, as a share of what the fleet could serve divided by the tenants.
    """

    workers: int
    shares: tuple[float, ...]
    adapters: int
    seconds: float
    model: WorkerModel
    seed: int = 0

    @property
    def fair_rate(self) -> float:
        """Requests a second: the fleet's, divided by the tenants."""
        plain = Traffic("zipf", 1, 1.0, self.adapters)
        rate = self.model.requests_per_s(*plain.mean_tokens())
        return self.workers * rate / len(self.shares)

    def arrivals(self) -> Iterator[Arrival]:
        return heapq.merge(
            *(self._tenant(i, share) for i, share in enumerate(self.shares) if share)
        )

    def _tenant(self, number: int, share: float) -> Iterator[Arrival]:
        rate = share * self.fair_rate
        return Traffic(
            shape="zipf",
            requests=max(1, int(self.seconds * rate)),
            rate=rate,
            adapters=self.adapters,
            zipf=1.0,
            seed=self.seed + number,
            tenant=f"tenant-{number}",
        ).arrivals()


def run(crowd: Crowd, limits: QueueLimits = UNLIMITED) -> SimulatedFleet:
    fleet = SimulatedFleet(crowd.workers, crowd.model, Placer(), limits)
    fleet.run(crowd.arrivals())
    return fleet


def first_token_p99(
    fleet: SimulatedFleet, crowd: Crowd, tenants: Sequence[int], since_s: float = 0.0
) -> float:
    """Seconds, over the requests of these tenants from then on."""
    names = {f"tenant-{number}" for number in tenants}
    jobs = [job for job in fleet.jobs if job.tenant in names and job.arrived_s >= since_s]
    return percentile([crowd.model.first_token_s(job) for job in jobs], 99)


def served_tokens(jobs: Sequence[Job], tenants: int, until_s: float) -> list[float]:
    """Output tokens of each tenant's sequences that ended by then."""
    tokens = dict.fromkeys((f"tenant-{number}" for number in range(tenants)), 0.0)
    for job in jobs:
        if job.ended_s <= until_s:
            tokens[job.tenant] += job.output_tokens
    return list(tokens.values())


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 = all alike, 1/n = one has it all."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


@dataclass(frozen=True, slots=True)
class Fairness:
    """A flood's effect. others: what the other tenants send, as a share of their fair share.

    alone_ms, beside_ms: their p99 time to the first token without and with the flood, in ms.
    jain: of all tenants' tokens when the others ask for one and a half times their share.
    """

    workers: int
    rows: int
    tenants: int
    others: float
    alone_ms: float
    beside_ms: float
    jain: float


_WARM_UP_S = 3.0


def flood(
    workers: int, rows: int, tenants: int, others: float, seconds: float, seed: int = 0
) -> Fairness:
    """One tenant sends ten times its share."""
    model = WorkerModel(rows=rows, ahead=max(16, rows // 4))

    def crowd(noisy: float, rest: float) -> Crowd:
        return Crowd(workers, (noisy, *(rest,) * (tenants - 1)), 4, seconds, model, seed)

    def p99_ms(load: Crowd) -> float:
        return 1e3 * first_token_p99(run(load), load, range(1, tenants), _WARM_UP_S)

    uneven = crowd(10.0, 1.5)
    return Fairness(
        workers=workers,
        rows=rows,
        tenants=tenants,
        others=others,
        alone_ms=p99_ms(crowd(0.0, others)),
        beside_ms=p99_ms(crowd(10.0, others)),
        jain=jain(served_tokens(run(uneven).jobs, tenants, seconds)),
    )
