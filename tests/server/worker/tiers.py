"""Disk, host arena and device arena with the real code between them, moved by hand.

The worker's part is `HostTier`, `Staging` and `AdapterOrders`, the engine's `EngineLoop` and
`Scheduler`. Threads, the pipe, the copies and the clock do nothing by themselves. Each step of each
of them is one call here, so any order of them can be tried.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import SlabLayout
from loraplex.adapters.slab.file import SlabFile, SlabSource
from loraplex.server.engine.executor import (
    AdapterCopy,
    CopyNews,
    CopyOver,
    ExecutorLimits,
    PagesCopied,
)
from loraplex.server.engine.loop import EngineLoop
from loraplex.server.engine.memory.residency import AdapterArena, Placement
from loraplex.server.engine.messages import (
    AbortSequence,
    AdapterSettled,
    FromEngine,
    NeedSlab,
    Shutdown,
    SlabReleased,
    SlabStaged,
    StepOutput,
    Submit,
    ToEngine,
)
from loraplex.server.engine.plan import StepPlan
from loraplex.server.engine.scheduling.scheduler import Scheduler
from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from loraplex.server.protocol import (
    AdapterOrder,
    AdapterReport,
    GenerateRequest,
    OrderAction,
    TierState,
    TokenEvent,
)
from loraplex.server.worker.adapters.adapter_meter import AdapterMeter
from loraplex.server.worker.adapters.adapter_orders import AdapterOrders
from loraplex.server.worker.adapters.host_tier import HostTier
from loraplex.server.worker.adapters.slab_saver import SlabSaver
from loraplex.server.worker.adapters.staging import UNFORESEEN, Staging
from loraplex.server.worker.metrics import WorkerMetrics
from tests.certifying.certificates import CertifyOptions
from tests.certifying.executor import CertifyingExecutor, FakeTicket
from tests.server.engine.harness import no_grammars
from tests.server.worker.slabs import EXTENT, Packing, write_slab_file

HOST_EXTENTS = 6
ROUTER = 1
UNREADABLE = "its packed weights cannot be read from disk"
UNCOPIED = "copy failed"


class Job(NamedTuple):
    """What a thread was given. digest: of the slab that it opens or reads; "" for other work."""

    future: "Future[Any]"
    work: Callable[[], Any]
    digest: str


class Threads(Executor):
    """Jobs are begun by nobody but `end`."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        slab = getattr(fn, "__self__", None)
        digest = slab.layout.digest if isinstance(slab, SlabFile) else _digest_in(args)
        self.jobs.append(Job(future, lambda: fn(*args, **kwargs), digest))
        return future

    def end(self, at: int, error: Exception | None = None) -> None:
        """The job number `at` is done, or fails."""
        job = self.jobs[at]
        del self.jobs[at]
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            if error is not None:
                raise error
            result = job.work()
        except Exception as raised:
            job.future.set_exception(raised)
        else:
            job.future.set_result(result)


def _digest_in(arguments: Sequence[object]) -> str:
    return "".join(argument for argument in arguments if isinstance(argument, str))


class WatchedArena(AdapterArena):
    """Checks whom each placement pushes out. What is wrong is kept, as it runs in a task.

    all_pins: those too that are set aside. reading: what the engine copies.
    """

    def __init__(
        self,
        num_extents: int,
        all_pins: Callable[[], Collection[str]],
        reading: Callable[[], Collection[str]],
        wrong: list[str],
    ) -> None:
        super().__init__(num_extents, EXTENT, num_extents)
        self._all_pins = all_pins
        self._reading = reading
        self._wrong = wrong

    def place(
        self, digest: str, runs: Sequence[int], keep: Collection[str] = ()
    ) -> Placement | None:
        idle = {d for d in self.ready if not self.leases(d)}
        before = {*self.ready, *self.loading}
        pinned = {d: sum(n for _, n in self.spans(d)) for d in before & set(self._all_pins())}
        placement = super().place(digest, runs, keep)
        gone = before - {*self.ready, *self.loading}
        if not gone <= idle:
            self._wrong.append(f"{gone - idle} evicted while in use or half copied")
        if gone.intersection((*keep, *self._reading())):
            self._wrong.append(f"of {gone} one was awaited or read")
        room = self.num_extents - sum(pinned.values())
        if gone & set(pinned) and sum(runs) <= room:
            self._wrong.append(f"of {gone} one was pinned, and there was room beside the pins")
        return placement


class DeviceExecutor(CertifyingExecutor):
    """Copies become usable, and end, on demand. What is wrong is kept: the loop takes any exception
    for the device's fault."""

    def __init__(self, tiers: "Tiers") -> None:
        super().__init__(tiers.limits, tiers.options)
        self._host = tiers.memory
        self._wrong = tiers.wrong
        self._broken = tiers.broken
        self.extents: list[str | None] = [None] * tiers.limits.arena_extents
        self.copying: dict[str, AdapterCopy] = {}  # not over
        self.nearing: set[str] = set()  # of these, made usable
        self.ending: set[str] = set()  # and ended
        self.fail_next = False

    def launch(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> FakeTicket:
        try:
            return super().launch(plan)
        except AssertionError as error:
            self._wrong.append(str(error))
            raise

    def start_copy(self, copy: AdapterCopy) -> None:
        if copy.layout.digest in self.copying:
            self._wrong.append(f"{copy.layout.digest} is copied twice at once")
        self.copying[copy.layout.digest] = copy
        self._fill(copy, None)
        self.check_source(copy)
        try:
            super().start_copy(copy)
        except AssertionError as error:
            self._wrong.append(str(error))
            raise

    def poll_copies(self) -> list[CopyNews]:
        marked = self.nearing | self.ending
        held_back = [item for item in self._copies if item[1].layout.digest not in marked]
        still_read = [item for item in self._ending if item[1].layout.digest not in self.ending]
        self._copies = [item for item in self._copies if item not in held_back]
        self._ending = [item for item in self._ending if item not in still_read]
        news = super().poll_copies()
        self._copies += held_back
        self._ending += still_read
        for item in news:
            if isinstance(item, PagesCopied):
                continue
            copy = self.copying[item.digest]
            self.check_source(copy)
            if isinstance(item, CopyOver):
                del self.copying[item.digest]
                self.nearing.discard(item.digest)
                self.ending.discard(item.digest)
            else:
                self._fill(copy, item.digest)
        return news

    def _copy_problem(self, copy: AdapterCopy) -> str | None:
        if not self.fail_next:
            return super()._copy_problem(copy)
        self.fail_next = False
        self._broken.add((UNCOPIED, copy.layout.digest))
        return UNCOPIED

    def check_source(self, copy: AdapterCopy) -> None:
        digest = copy.layout.digest
        if any(not holds(self._host, x, digest) for x in copy.host_extents):
            self._wrong.append(f"{digest} is copied from memory that holds something else")

    def _fill(self, copy: AdapterCopy, digest: str | None) -> None:
        for extent in copy.device_extents:
            self.extents[extent] = digest


def holds(memory: memoryview, extent: int, digest: str) -> bool:
    return bytes(memory[extent * EXTENT : (extent + 1) * EXTENT]) == digest.encode() * EXTENT


class Pipe:
    """The engine's end takes all that has come, does one turn of its loop, and pauses."""

    def __init__(self) -> None:
        self.inbox: deque[ToEngine] = deque()
        self.outbox: deque[FromEngine] = deque()
        self._turned = False

    def receive(self, wait_s: float | None) -> ToEngine | None:
        if self.inbox:
            return self.inbox.popleft()
        self._turned = not self._turned
        return None if self._turned else Shutdown()

    def send(self, message: FromEngine) -> None:
        self.outbox.append(message)


class Engine:
    """One life of the engine process."""

    def __init__(self, tiers: "Tiers") -> None:
        self.pipe = Pipe()
        self.executor = DeviceExecutor(tiers)
        config = SchedulerConfig(max_loading=3, drain_after_s=0.05)
        self.scheduler = Scheduler(tiers.limits, config)
        constraints = no_grammars(tiers.limits)
        self.loop = EngineLoop(
            self.executor, self.scheduler, self.pipe, 2, constraints, lambda: tiers.now
        )


class Tiers:
    """What `Worker` does with routers' and engine's frames, without sockets and processes."""

    def __init__(self, folder: Path, limits: ExecutorLimits, options: CertifyOptions) -> None:
        self.limits = limits
        self.options = options
        self.folder = folder
        self.memory = memoryview(bytearray(HOST_EXTENTS * EXTENT))
        self.now = 0.0
        self.wrong: list[str] = []
        self.threads = Threads()
        self.saved: set[str] = set()  # those packed on disk
        self.jobs_until_failure: int | None = None
        self.failure: Exception = OSError("the disk failed")
        self.broken: set[tuple[str, str]] = set()  # which failure was brought about, and for whom
        self.aio = asyncio.new_event_loop()
        self.aio.set_exception_handler(lambda _, context: self.wrong.append(str(context)))
        metrics = WorkerMetrics()
        self.arena = WatchedArena(
            HOST_EXTENTS,
            lambda: self.orders.pins,
            lambda: self.engine.executor.copying,
            self.wrong,
        )
        saver = SlabSaver(self.memory, self._save, self.threads, metrics)
        self.tier = HostTier(
            self.memory, self.arena, self._open, self.threads, saver, metrics, lambda: self.now
        )
        self.orders = AdapterOrders(self.tier, self._on_disk, self.threads, self, lambda: self.now)
        self.staging = Staging(self.tier, self.orders, AdapterMeter(metrics), self.to_engine)
        self.engine = Engine(self)
        self.handed_over: dict[str, SlabStaged] = {}  # to this engine, and not released
        self.live: set[int] = set()
        self.events: dict[int, list[TokenEvent]] = {}
        self.reports: dict[str, list[AdapterReport]] = {}
        self._resident: tuple[str, ...] = ()
        self._loading: tuple[str, ...] = ()

    # ---- disk

    def store(self, digest: str, extents: int) -> None:
        write_slab_file(self.folder / digest, digest, extents)

    def forget(self, digest: str) -> None:
        self.saved.discard(digest)
        (self.folder / digest).unlink(missing_ok=True)

    def _on_disk(self, digest: str) -> bool:
        return (self.folder / digest).exists()

    def _open(self, digest: str) -> SlabSource:
        if not self._on_disk(digest):
            raise AdapterError("not_found", f"no {digest}")
        slab = SlabFile(self.folder / digest)
        return slab if digest in self.saved else Packing(slab)

    def _save(
        self,
        layout: SlabLayout,
        arena: memoryview,
        first_extents: Sequence[int],
        stopped: Callable[[], bool],
    ) -> bool:
        """Whatever else has happened since it was begun."""
        if stopped():
            return False
        for extent in first_extents:
            held = bytes(arena[extent * EXTENT : (extent + 1) * EXTENT])
            if held != layout.digest.encode() * EXTENT:
                self.wrong.append(f"of {layout.digest} something else was saved")
        self.saved.add(layout.digest)
        return True

    def end_job(self, at: int) -> None:
        """It is done, or fails if its turn has come (`jobs_until_failure`)."""
        error: Exception | None = None
        digest = self.threads.jobs[at].digest
        if self.jobs_until_failure is not None and digest:
            self.jobs_until_failure -= 1
            if self.jobs_until_failure < 0:
                self.jobs_until_failure = None
                error = self.failure
                said = UNREADABLE if isinstance(error, OSError) else UNFORESEEN
                self.broken.add((said, digest))
        self.threads.end(at, error)

    # ---- EngineView

    @property
    def engine_is_up(self) -> bool:
        return True

    def device_state(self, digest: str) -> TierState:
        if digest in self._resident:
            return "ready"
        return "loading" if digest in self._loading else "absent"

    def to_engine(self, frame: ToEngine) -> None:
        if isinstance(frame, SlabStaged):
            assert frame.layout.digest not in self.handed_over, "staged twice for one engine"
            self.handed_over[frame.layout.digest] = frame
        self.engine.pipe.inbox.append(frame)

    # ---- routers

    def submit(self, key: int, request: GenerateRequest) -> None:
        self.live.add(key)
        self.to_engine(Submit(key, request))
        digest = request.adapter
        if digest is None or self.device_state(digest) == "ready":
            return
        if self.device_state(digest) == "absent" and self.tier.state(digest) == "ready":
            self.do(lambda: self.push(digest))
        else:
            self.do(lambda: self.tier.prefetch(digest))

    def push(self, digest: str) -> None:
        assert self.staging.push(digest), "it lies in host memory"

    def abort(self, key: int) -> None:
        self.to_engine(AbortSequence(key))

    def order(self, order_id: str, action: OrderAction, *digests: str) -> None:
        reports = self.reports.setdefault(order_id, [])
        frame = AdapterOrder(order_id, action, digests)
        self.do(lambda: self.orders.order(ROUTER, frame, reports.append))

    def do(self, work: Callable[[], None]) -> None:
        """In the event loop, without a turn of it."""

        async def run() -> None:
            work()

        self.aio.run_until_complete(run())

    def turns(self, count: int) -> None:
        """Of the worker's event loop."""
        for _ in range(count):
            self.aio.run_until_complete(asyncio.sleep(0))

    # ---- engine

    def engine_turn(self) -> None:
        self.now += 0.01
        self.engine.loop.run()

    def hear(self, count: int) -> None:
        """The worker takes so many of the engine's frames."""
        for _ in range(min(count, len(self.engine.pipe.outbox))):
            frame = self.engine.pipe.outbox.popleft()
            self.do(lambda frame=frame: self._hear(frame))  # type: ignore[misc]

    def _hear(self, frame: FromEngine) -> None:
        match frame:
            case NeedSlab(digest):
                self.staging.need(digest)
            case SlabReleased(digest):
                self.handed_over.pop(digest)
                self.staging.released(frame)
            case AdapterSettled():
                self.orders.settled(frame)
            case StepOutput():
                self._loading = frame.stats.loading
                if frame.resident is not None:
                    self._resident = frame.resident
                for item in frame.events:
                    self._deliver(item.key, item.event)

    def _deliver(self, key: int, event: TokenEvent) -> None:
        assert key in self.live, "an event after the terminal one"
        self.events.setdefault(key, []).append(event)
        if event.finish is not None:
            self.live.remove(key)

    def restart_engine(self) -> None:
        """It dies, whatever it was doing; the worker hears of it, and another is ready."""
        self.engine = Engine(self)
        self.handed_over.clear()
        self._resident = self._loading = ()
        self.do(self._engine_lost)
        self.do(self.orders.engine_ready)

    def _engine_lost(self) -> None:
        self.staging.engine_lost()
        self.orders.engine_lost()
        for key in sorted(self.live):
            self._deliver(key, TokenEvent("r", 1, 0, 0, (), finish="error", error="engine_lost"))

    # ---- everything at once

    def round(self) -> None:
        """All that can happen happens."""
        for _ in range(len(self.threads.jobs)):
            self.end_job(0)
        self.turns(4)
        self.engine.executor.ending.update(self.engine.executor.copying)
        self.engine_turn()
        self.hear(len(self.engine.pipe.outbox))
        self.turns(4)

    def close(self) -> None:
        for task in asyncio.all_tasks(self.aio):
            task.cancel()
        self.turns(4)
        self.aio.close()
