"""A worker without an engine: rows, adapter slots, loads and step times, in simulated seconds."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from loraplex.router.policy.queue.waiting import Bill


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """Abilities of a simulated worker.

    rows: sequences at once. ahead: sequences accepted beyond those. slots: adapters on the device.
    load_s: of one adapter to the device; loads queue for it. A decode step takes step_s, and more
    by row_s a running sequence and adapter_s an adapter among them. prefill: tokens a second.
    """

    rows: int = 32
    ahead: int = 16
    slots: int = 64
    load_s: float = 0.03
    step_s: float = 4e-3
    row_s: float = 20e-6
    adapter_s: float = 20e-6
    prefill: float = 40_000.0

    def first_token_s(self, job: "Job") -> float:
        """Seconds from a request to its first token."""
        return job.started_s - job.arrived_s + job.prompt_tokens / self.prefill + self.step_s

    @property
    def credits(self) -> int:
        return self.rows + self.ahead

    def requests_per_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """Requests a second with all rows taken by different adapters that are there."""
        step = self.step_s + self.rows * (self.row_s + self.adapter_s)
        return self.rows / (output_tokens * step + prompt_tokens / self.prefill)


@dataclass(slots=True, eq=False)
class Job:
    """A sequence on its way through the fleet. Times are simulated seconds, -1 = not yet.

    missed: its adapter had to be loaded for it. was_there: the router knew it to be there.
    """

    tenant: str
    adapter: str
    prompt_tokens: int
    output_tokens: int
    arrived_s: float
    missed: bool = False
    was_there: bool = False
    bill: Bill | None = None
    started_s: float = -1.0
    ended_s: float = -1.0


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """After each change, ask `next_load` and `next_job` what begins now.

    The least recently used adapter without a sequence gives way to the next.
    """

    model: WorkerModel
    resident: OrderedDict[str, None] = field(default_factory=OrderedDict)
    loading: str | None = None
    running: int = 0
    _leases: dict[str, int] = field(default_factory=dict)
    _computed: dict[str, int] = field(default_factory=dict)
    _ready: deque[Job] = field(default_factory=deque)
    _parked: OrderedDict[str, list[Job]] = field(default_factory=OrderedDict)

    @property
    def in_flight(self) -> int:
        return self.running + len(self._ready) + sum(map(len, self._parked.values()))

    @property
    def on_the_way(self) -> frozenset[str]:
        """Adapters that sequences here wait for."""
        return frozenset(self._parked)

    def submit(self, job: Job) -> None:
        self._leases[job.adapter] = self._leases.get(job.adapter, 0) + 1
        if job.adapter in self.resident:
            self.resident.move_to_end(job.adapter)
            self._ready.append(job)
        else:
            job.missed = job.adapter not in self._parked
            self._parked.setdefault(job.adapter, []).append(job)

    def loaded(self) -> None:
        assert self.loading is not None
        self.resident[self.loading] = None
        self._ready.extend(self._parked.pop(self.loading))
        self.loading = None

    def finished(self, job: Job) -> None:
        self.running -= 1
        _take_one(self._leases, job.adapter)
        _take_one(self._computed, job.adapter)

    def next_load(self) -> bool:
        """Whether a load begins now; it ends `load_s` later."""
        if self.loading is not None or not self._parked:
            return False
        if len(self.resident) >= self.model.slots:
            victim = next((name for name in self.resident if name not in self._leases), None)
            if victim is None:
                return False
            del self.resident[victim]
        self.loading = next(iter(self._parked))
        return True

    def next_job(self, now: float) -> tuple[Job, float] | None:
        """A sequence that begins to be computed now, and when it will be done."""
        if not self._ready or self.running >= self.model.rows:
            return None
        job = self._ready.popleft()
        self.running += 1
        self._computed[job.adapter] = self._computed.get(job.adapter, 0) + 1
        job.started_s = now
        model = self.model
        step = model.step_s + self.running * model.row_s + len(self._computed) * model.adapter_s
        return job, now + job.prompt_tokens / model.prefill + job.output_tokens * step


def _take_one(counts: dict[str, int], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
