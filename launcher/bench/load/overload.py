"""Overload of a fleet: its goodput, its refusals, and the time until it recovers.

Real processes: a router before workers with the certifying engine. Its steps take a fixed time, so
the fleet's capacity is known and the machine does not limit it.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory

from loraplex.launcher.bench.errors import BenchError
from loraplex.launcher.bench.load.router_cost import cpu_seconds, running, until_ready
from loraplex.launcher.bench.load.serve import run_load
from loraplex.launcher.bench.load.target import Target
from loraplex.launcher.bench.load.workload import Lengths, Workload
from loraplex.launcher.bench.report import Outcome, percentile
from loraplex.launcher.demo import model_path
from loraplex.launcher.plan import LOOPBACK
from loraplex.launcher.serve import free_port

# Of what the fleet can do, when nothing is wrong.
_CALM = 0.5
# Of a phase: until rows and queue are as full as they will be.
_FILL_S = 1.0
_PROMPT = Lengths.parse("64")
# A second is as before when its median is within so much of the calm one.
_AS_BEFORE = 1.25
# How long the fleet is watched once it should be as before.
_WATCHED_S = 2.0


@dataclass(frozen=True, slots=True)
class OverloadScene:
    """A fleet and its load. rows: sequences at once of a worker. tokens: of each answer.

    step_s: of a decode step. queue_s: how much may wait, in seconds of what the fleet can do.
    seconds: of overload. slo_s: an answer is good whose first token comes within it. recovery_s:
    after which the fleet should be as before.
    """

    workers: int = 2
    rows: int = 16
    tokens: int = 16
    step_s: float = 0.05
    queue_s: float = 1.0
    seconds: float = 10.0
    slo_s: float = 2.0
    recovery_s: float = 10.0

    @property
    def capacity(self) -> float:
        """Requests a second, by steps alone."""
        return self.workers * self.rows / (self.tokens * self.step_s)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What one load met. times: what was sent, as a multiple of what the fleet can do.

    refusal_*: from sending to the whole refusal. no_retry_after: refusals without one. failed:
    neither answered nor refused. recovered_s: after the overload's end, until waits were as before.
    late_p99_ms: of the load's generator itself. router_cpu: cores that the router used.
    load_average: of the machine, at the end.
    """

    times: float
    sent_per_s: float
    goodput_per_s: float
    refused: int
    refusal_p50_ms: float
    refusal_p99_ms: float
    no_retry_after: int
    failed: int
    recovered_s: float
    late_p99_ms: float
    router_cpu: float
    load_average: float


@dataclass(frozen=True, slots=True)
class Overload:
    """capacity: requests a second, by steps alone. calm_*: times to the first token at half of it.

    peak_per_s: the most good answers a second of any load, just full or beyond. of_peak: goodput of
    each of `loads`, as a share of that.
    """

    capacity: float
    peak_per_s: float
    calm_p50_ms: float
    calm_p99_ms: float
    of_peak: list[float]
    loads: list[LoadResult]


def is_refusal(outcome: Outcome) -> bool:
    return outcome.error in ("429", "503")


def goodput(outcomes: Sequence[Outcome], slo_s: float, since_s: float, until_s: float) -> float:
    """Good answers a second, of those that were complete in this time."""
    if until_s <= since_s:
        return 0.0
    good = sum(
        outcome.error is None and since_s <= outcome.end_s < until_s and outcome.ttft_s <= slo_s
        for outcome in outcomes
    )
    return good / (until_s - since_s)


def recovered_s(after: Sequence[Outcome], end_s: float, calm_s: float) -> float:
    """Seconds from end_s to the end of the last one that was worse than before.

    Worse: a request of it was not answered, or its median time to the first token was longer.
    """
    last = 0.0
    for second in count():
        begun = [o for o in after if second <= o.sent_s - end_s < second + 1]
        if not any(o.sent_s - end_s >= second for o in after):
            return last
        firsts = [o.ttft_s for o in begun if o.error is None]
        if len(firsts) < len(begun) or (firsts and percentile(firsts, 50) > _AS_BEFORE * calm_s):
            last = second + 1.0
    raise AssertionError


def late_s(outcomes: Sequence[Outcome], due_s: Sequence[float]) -> list[float]:
    """How much later than due each was sent; the most punctual one counts as in time."""
    behind = [outcome.sent_s - due for outcome, due in zip(outcomes, due_s, strict=True)]
    return [lag - min(behind) for lag in behind]


class _Bench:
    """A running fleet. pid, url: the router's."""

    def __init__(self, scene: OverloadScene, pid: int, url: str) -> None:
        self._scene = scene
        self._pid = pid
        self._target = Target(url, "base", timeout_s=60.0)
        self._seeds = count()

    async def full_per_s(self) -> float:
        """Good answers, when as many callers as fill all rows twice send back to back."""
        scene = self._scene
        workload = self._workload(int(scene.seconds * scene.capacity))
        outcomes = await run_load(self._target, workload, 2 * scene.workers * scene.rows)
        start, end = (limit(o.sent_s for o in outcomes) for limit in (min, max))
        return goodput(outcomes, 2 * scene.slo_s, start + _FILL_S, end)

    async def calm(self) -> list[float]:
        """Times to the first token, in seconds."""
        rate = _CALM * self._scene.capacity
        outcomes = await run_load(
            self._target, self._workload(int(self._scene.seconds * rate), rate)
        )
        return [outcome.ttft_s for outcome in outcomes if outcome.error is None]

    async def load(self, times: float, calm_s: float) -> LoadResult:
        """An overload, and then a calm load until the fleet should long be as before."""
        scene = self._scene
        rate = times * scene.capacity
        workload = self._workload(int(scene.seconds * rate), rate)
        calm_rate = _CALM * scene.capacity
        cpu, start = cpu_seconds(self._pid), time.monotonic()
        async with asyncio.TaskGroup() as group:
            overload = group.create_task(run_load(self._target, workload))
            await asyncio.sleep(workload.calls()[-1].at_s)
            end = time.monotonic()
            cores = (cpu_seconds(self._pid) - cpu) / (end - start)
            seconds = scene.recovery_s + _WATCHED_S
            quiet = self._workload(int(seconds * calm_rate), calm_rate)
            after = group.create_task(run_load(self._target, quiet))
        outcomes = overload.result()
        refused = [outcome for outcome in outcomes if is_refusal(outcome)]
        refusals_s = [outcome.end_s - outcome.sent_s for outcome in refused]
        late = late_s(outcomes, [call.at_s for call in workload.calls()])
        return LoadResult(
            times=times,
            sent_per_s=len(outcomes) / (end - start),
            goodput_per_s=goodput(outcomes, scene.slo_s, start + _FILL_S, end),
            refused=len(refused),
            refusal_p50_ms=1e3 * percentile(refusals_s, 50),
            refusal_p99_ms=1e3 * percentile(refusals_s, 99),
            no_retry_after=sum(outcome.retry_after_s is None for outcome in refused),
            failed=sum(o.error is not None for o in outcomes) - len(refused),
            recovered_s=recovered_s(after.result(), end, calm_s),
            late_p99_ms=1e3 * percentile(late, 99),
            router_cpu=cores,
            load_average=os.getloadavg()[0],
        )

    def _workload(self, requests: int, rate: float = float("inf")) -> Workload:
        output = Lengths.parse(str(self._scene.tokens))
        seed = next(self._seeds)
        return Workload(max(1, requests), (None,), 1.0, _PROMPT, output, rate, seed=seed)


async def measure(scene: OverloadScene, times: Sequence[float]) -> Overload:
    """Each of these loads after the other, on one fleet. Raises BenchError."""
    async with _fleet(scene) as (pid, url):
        bench = _Bench(scene, pid, url)
        full = await bench.full_per_s()
        calm = await bench.calm()
        calm_s = percentile(calm, 50)
        loads = [await bench.load(one, calm_s) for one in times]
    peak = max(full, *(load.goodput_per_s for load in loads))
    if not peak:
        raise BenchError("no answer came in time under any load: raise --slo-ttft-ms or --seconds")
    of_peak = [load.goodput_per_s / peak for load in loads]
    calm_p99_ms = 1e3 * percentile(calm, 99)
    return Overload(scene.capacity, peak, 1e3 * calm_s, calm_p99_ms, of_peak, loads)


@asynccontextmanager
async def _fleet(scene: OverloadScene) -> AsyncIterator[tuple[int, str]]:
    """The router's pid and address, once it has all workers."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        port = free_port(LOOPBACK, 0)
        arguments = ["--port", str(port), "--cache-dir", str(folder / "router")]
        arguments += ["--max-queue", str(max(1, round(scene.queue_s * scene.capacity)))]
        for number in range(scene.workers):
            own = free_port(LOOPBACK, 0)
            options = {
                "--model-name": "base",
                "--executor": f'tests.certifying.factory:make:{{"step_s": {scene.step_s}}}',
                "--port": str(own),
                "--max-running": str(scene.rows),
                "--worker-id": f"worker-{number}",
                "--kv-memory": "16MiB",
                "--cache-dir": str(folder / f"worker-{number}"),
            }
            worker = ("worker", str(model_path()), *chain.from_iterable(options.items()))
            await stack.enter_async_context(running("loraplex", *worker))
            arguments += ["--worker", f"ws://{LOOPBACK}:{own}"]
        router = await stack.enter_async_context(running("loraplex", "router", *arguments))
        url = f"http://{LOOPBACK}:{port}"
        await until_ready(url, scene.workers)
        yield router.pid, url


def table(result: Overload) -> str:
    """For a person."""
    lines = [
        f"peak {result.peak_per_s:.1f} answers/s, {result.capacity:.1f} by steps alone; "
        f"first token at half of that: p50 {result.calm_p50_ms:.0f} ms, "
        f"p99 {result.calm_p99_ms:.0f} ms",
    ]
    for load, of_peak in zip(result.loads, result.of_peak, strict=True):
        lines += [
            f"{load.times:g} x: {load.sent_per_s:.0f} requests/s sent, goodput "
            f"{load.goodput_per_s:.1f}/s = {of_peak:.0%} of the peak",
            f"  {load.refused} refused, p50 {load.refusal_p50_ms:.1f} ms, p99 "
            f"{load.refusal_p99_ms:.1f} ms; {load.no_retry_after} without Retry-After; "
            f"{load.failed} failed otherwise; as before after {load.recovered_s:.0f} s",
            f"  generator late p99 {load.late_p99_ms:.1f} ms, router {load.router_cpu:.2f} cores, "
            f"load average {load.load_average:.1f}",
        ]
    return "\n".join(lines)
