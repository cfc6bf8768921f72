"""Placement policies under simulated load: miss rates and waits, side by side."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from loraplex.launcher.bench.report import percentile
from loraplex.launcher.bench.simulation.fleet import SimulatedFleet
from loraplex.launcher.bench.simulation.policies import POLICIES
from loraplex.launcher.bench.simulation.traffic import Shape, Traffic
from loraplex.launcher.bench.simulation.worker import Job, WorkerModel

# What a run begins with, while the fleet's memory fills, is not measured.
_WARM_UP = 0.3


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
    seconds = max(1e-9, _last_end(jobs) - jobs[0].arrived_s)
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


def _last_end(jobs: Sequence[Job]) -> float:
    return max(job.ended_s for job in jobs)


def compare(scenes: Iterable[PlacementScene], policies: Sequence[str]) -> Iterator[PlacementResult]:
    for scene in scenes:
        for policy in policies:
            yield simulate(scene, policy)


def table(results: Sequence[PlacementResult]) -> str:
    """For a person."""
    head = ("load", "workers", "adapters", "policy", "miss", "wait p50 ms", "wait p99 ms", "good/s")
    lines = [f"the first {_WARM_UP:.0%} of each run's requests are not counted"]
    lines.append("  ".join(f"{cell:>13}" for cell in head))
    for r in results:
        cells = (
            *(r.shape, r.workers, r.adapters, r.policy, f"{100 * r.miss_rate:.1f} %"),
            *(f"{r.wait_p50_ms:.1f}", f"{r.wait_p99_ms:.1f}", f"{r.goodput_per_s:.0f}"),
        )
        lines.append("  ".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines)
