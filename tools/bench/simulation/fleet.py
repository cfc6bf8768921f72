"""A simulated fleet behind the router's own queue and placement: deterministic, without a clock."""

import heapq
from collections.abc import Callable, Iterator

from loraplex.router.policy.matching import Match, Matcher
from loraplex.router.policy.placement.placement import PlacementRequest, Placer, WorkerView
from loraplex.router.policy.queue.queue_limits import QueueFull, QueueLimits
from loraplex.router.policy.queue.waiting import Waiting, WaitingQueue
from tools.bench.simulation.traffic import Arrival
from tools.bench.simulation.worker import Job, SimulatedWorker, WorkerModel

ADAPTER_BYTES = 84_000_000  # rank 16 on all projections of an 8B model
UNLIMITED = QueueLimits(1 << 20, 1 << 40)
_STATUS_S = 0.5
_HOLD_TICK_S = 0.02
_AGE_S = 0.25

Event = Callable[[float], None]


class SimulatedFleet:
    """`run` once. jobs: accepted ones, by arrival. refused: the rest, with its Retry-After."""

    def __init__(
        self,
        workers: int,
        model: WorkerModel,
        placement: Placer,
        limits: QueueLimits = UNLIMITED,
    ) -> None:
        self.jobs: list[Job] = []
        self.refused: list[tuple[Arrival, float]] = []
        self._workers = [SimulatedWorker(model) for _ in range(workers)]
        self._views = [
            WorkerView(
                f"worker-{i}",
                ready=True,
                credits=model.credits,
                rows=model.rows,
                own={},
                coming={},
                load_bytes_s=ADAPTER_BYTES / model.load_s,
            )
            for i in range(workers)
        ]
        self._queue: WaitingQueue[Job] = WaitingQueue(limits)
        self._matcher = Matcher(self._queue, placement)
        self._events: list[tuple[float, int, Event]] = []
        self._scheduled = 0
        self._retrying = False

    def run(self, arrivals: Iterator[Arrival]) -> None:
        """Runs until every accepted job is over."""
        self._take_next(arrivals)
        self._report(0.0)
        self._age(0.0)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)

    def _at(self, when: float, event: Event) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (when, self._scheduled, event))

    # Arrivals

    def _take_next(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is None:
            return

        def arrive(now: float) -> None:
            self._push(arrival)
            self._match(now)
            self._take_next(arrivals)

        self._at(arrival.at_s, arrive)

    def _push(self, arrival: Arrival) -> None:
        name = f"{arrival.tenant}/{arrival.adapter}"
        job = Job(arrival.tenant, name, arrival.prompt_tokens, arrival.output_tokens, arrival.at_s)
        request = PlacementRequest(name, name, ADAPTER_BYTES)
        waiting = Waiting(job, job.tenant, request, job.prompt_tokens, 4096, 36 * job.prompt_tokens)
        try:
            self._queue.push(waiting, arrival.at_s)
        except QueueFull as error:
            self.refused.append((arrival, error.retry_after_s))
        else:
            self.jobs.append(job)

    # Placing

    def _match(self, now: float) -> None:
        while (match := self._matcher.next(self._views, now)) is not None:
            self._submit(match, now)
        if self._matcher.holds and not self._retrying:
            self._retrying = True
            self._at(now + _HOLD_TICK_S, self._match_held)

    def _match_held(self, now: float) -> None:
        self._retrying = False
        self._match(now)

    def _submit(self, match: Match[Job], now: float) -> None:
        job, view = match.entry.payload, match.decision.worker
        job.bill = match.bill
        job.was_there = job.adapter in view.resident
        view.starting += job.was_there
        worker = self._workers[self._views.index(view)]
        worker.submit(job)
        self._go_on(worker, view, now)

    # Workers

    def _go_on(self, worker: SimulatedWorker, view: WorkerView, now: float) -> None:
        """Begins whatever can begin on a worker."""
        if worker.next_load():
            self._at(now + worker.model.load_s, lambda then: self._loaded(worker, view, then))
        while (started := worker.next_job(now)) is not None:
            job, ends_s = started
            view.begin(job.was_there)
            self._at(ends_s, lambda then, job=job: self._finished(worker, view, job, then))  # type: ignore[misc]

    def _loaded(self, worker: SimulatedWorker, view: WorkerView, now: float) -> None:
        worker.loaded()
        self._go_on(worker, view, now)

    def _finished(self, worker: SimulatedWorker, view: WorkerView, job: Job, now: float) -> None:
        job.ended_s = now
        worker.finished(job)
        view.begun -= 1
        view.leave(job.adapter)
        assert job.bill is not None
        job.bill.generated(job.output_tokens)
        job.bill.settle()
        self._go_on(worker, view, now)
        self._match(now)

    def _report(self, now: float) -> None:
        """Reports as workers do: the router knows nothing newer of them."""
        for worker, view in zip(self._workers, self._views, strict=True):
            view.load = worker.in_flight
            view.resident = frozenset(worker.resident)
            view.loading = worker.on_the_way
            view.arrived(now)
        if self._events:
            self._at(now + _STATUS_S, self._report)

    def _age(self, now: float) -> None:
        self._queue.age(now)
        if len(self._events) > 1:
            self._at(now + _AGE_S, self._age)
