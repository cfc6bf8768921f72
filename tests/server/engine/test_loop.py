"""The loop over a real socket pair, with the certifying executor."""

import itertools
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from loraplex.server.engine.begun import BegunSequences
from loraplex.server.engine.channel import WorkerChannel, WorkerGone
from loraplex.server.engine.executor import AdapterCopy, CopyNews, CopyOver, CopyUsable
from loraplex.server.engine.loop import (
    MAX_FAILURES_IN_A_ROW,
    EngineLoop,
    ExecutorLost,
)
from loraplex.server.engine.messages import (
    AbortSequence,
    FromEngine,
    NeedSlab,
    Shutdown,
    SlabMissing,
    SlabReleased,
    StepOutput,
    Submit,
    ToEngine,
    encode,
)
from loraplex.server.engine.plan import SliceResult, StepPlan
from loraplex.server.engine.scheduling.scheduler import Scheduler
from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from tests.certifying.certificates import CertifyOptions, certified_output
from tests.certifying.executor import CertifyingExecutor, FakeTicket
from tests.server.engine.harness import limits, make_request, no_grammars
from tests.server.engine.worker_end import TIMEOUT_S, FakeWorker, staged

LIMITS = limits(num_pages=64, max_context=200, max_rows=8, max_step_tokens=32)
OPTIONS = CertifyOptions(LIMITS.vocab_size, LIMITS.eos_token_ids)


class RunningLoop:
    def __init__(self, executor: CertifyingExecutor, depth: int) -> None:
        ours, theirs = socket.socketpair()
        self.worker = FakeWorker(ours)
        self.channel = WorkerChannel(theirs)
        self.scheduler = Scheduler(executor.limits, SchedulerConfig())
        self.loop = EngineLoop(executor, self.scheduler, self.channel, depth, no_grammars(LIMITS))
        self.end: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except (WorkerGone, ExecutorLost) as error:
            self.end = error
        finally:
            self.channel.close(flush_s=5)

    def join(self) -> None:
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive(), "the loop does not end"


@contextmanager
def running(executor: CertifyingExecutor | None = None, depth: int = 2) -> Iterator[RunningLoop]:
    loop = RunningLoop(executor or CertifyingExecutor(LIMITS, OPTIONS), depth)
    try:
        yield loop
    finally:
        loop.worker.sock.close()
        loop.join()


@pytest.mark.parametrize("depth", [1, 2])
def test_many_streams_over_adapters_and_base(depth: int) -> None:
    with running(depth=depth) as engine:
        requests = {
            key: make_request([5 + key % 5, 6, 7], 20, [None, "a", "b", "c"][key % 4])
            for key in range(24)
        }
        for key, request in requests.items():
            engine.worker.submit(key, request)
        for key, request in requests.items():
            expected = certified_output(request.adapter, request.prompt_ids, 20, OPTIONS)
            assert engine.worker.answer(key) == expected
        engine.worker.send(Shutdown())
        while engine.worker.receive() is not None:
            pass
        engine.join()
        assert engine.end is None
        assert sorted(set(engine.worker.released)) == ["a", "b", "c"]
        last = engine.worker.outputs[-1].stats
        assert (last.running, last.waiting, last.free_pages) == (0, 0, LIMITS.num_pages)


class SeesBegun(CertifyingExecutor):
    """It looks at what is begun, as the worker does once an engine is dead."""

    def __init__(self) -> None:
        super().__init__(LIMITS, OPTIONS)
        self.begun = BegunSequences(memoryview(bytearray(BegunSequences.NBYTES)))
        self.in_launches: list[frozenset[int] | None] = []
        self.between: list[frozenset[int] | None] = []

    def launch(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> FakeTicket:
        self.in_launches.append(self.begun.keys())
        return super().launch(plan, meanwhile)

    def poll_copies(self) -> list[CopyNews]:
        self.between.append(self.begun.keys())
        return super().poll_copies()


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_notes_what_it_begins_before_it_does(depth: int) -> None:
    first: list[ToEngine] = [Submit(n, make_request([5, n], 3)) for n in (7, 8)]
    waiting = Submit(9, make_request([5, 6], 3, "a"))  # for an adapter that never comes
    later = Submit(10, make_request([5, 6], 3))
    script = Script([*first, waiting], [later], [Shutdown()])
    executor, scheduler = SeesBegun(), Scheduler(LIMITS, SchedulerConfig())
    constraints = no_grammars(LIMITS)
    EngineLoop(executor, scheduler, script, depth, constraints, begun=executor.begun).run()
    assert executor.in_launches[0] == frozenset({7, 8})
    assert executor.in_launches[-1] == frozenset({7, 8, 10})
    assert None in executor.between, "a plan may be about any sequence"


class LongSteps(CertifyingExecutor):
    """After the first, no step is done before a copy has been asked about."""

    def __init__(self) -> None:
        super().__init__(LIMITS, OPTIONS)
        self.copied_within_a_step: list[str] = []
        self.computes = threading.Event()
        self._computes = False

    def launch(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> FakeTicket:
        ticket = super().launch(plan)
        executor = self
        self._computes = True

        class Late(FakeTicket):
            def ready(self) -> bool:
                executor.computes.set()
                return bool(executor.copied_within_a_step)

        return Late(ticket.plan, ticket.results)

    def collect(self, ticket: FakeTicket) -> list[SliceResult]:
        self._computes = False
        return super().collect(self._in_flight[0])

    def poll_copies(self) -> list[CopyNews]:
        news = super().poll_copies()
        if self._computes:
            self.copied_within_a_step += [n.digest for n in news if isinstance(n, CopyUsable)]
        return news


@pytest.mark.parametrize("depth", [1, 2])
def test_an_adapter_comes_while_the_device_computes(depth: int) -> None:
    """The first step does not end before the adapter of the second request is there."""
    executor = LongSteps()
    with running(executor, depth) as engine:
        engine.worker.submit(1, make_request([5, 6], 8))
        engine.worker.submit(2, make_request([5, 7], 8, "a"))
        expected = certified_output("a", [5, 7], 8, OPTIONS)
        assert engine.worker.answer(2) == expected
        assert len(engine.worker.answer(1)) == 8
        assert executor.copied_within_a_step == ["a"]


class Script:
    """A channel that brings these batches of messages, one each time that the loop may wait."""

    def __init__(self, *batches: list[ToEngine]) -> None:
        self._batches = deque(batches)
        self._batch: deque[ToEngine] = deque()
        self.sent: list[FromEngine] = []

    def receive(self, wait_s: float | None) -> ToEngine | None:
        if not self._batch and wait_s != 0 and self._batches:
            self._batch = deque(self._batches.popleft())
        return self._batch.popleft() if self._batch else None

    def bring(self, message: ToEngine) -> None:
        """Now."""
        self._batch.append(message)

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)


class Busy(CertifyingExecutor):
    """The first step runs until the second is launched; how many sequences each has is kept."""

    def __init__(self, copy_polls: int, busy: bool = True) -> None:
        super().__init__(LIMITS, CertifyOptions(LIMITS.vocab_size, copy_polls=copy_polls))
        self.sizes: list[int] = []
        self.polls = 0
        self.busy = busy

    def launch(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> FakeTicket:
        ticket = super().launch(plan)
        self.sizes.append(len(plan.slices))
        ticket.ready = lambda: len(self.sizes) > 1 or not self.busy  # type: ignore[method-assign]
        return ticket

    def poll_copies(self) -> list[CopyNews]:
        self.polls += 1
        return super().poll_copies()


def turns(executor: Busy) -> None:
    """A base sequence's first step runs when one comes whose adapter lies in host memory."""
    miss: list[ToEngine] = [Submit(2, make_request([5, 7], 8, "a")), staged("a")]
    script = Script([Submit(1, make_request([5, 6], 8))], miss)
    loop = EngineLoop(
        executor, Scheduler(LIMITS, SchedulerConfig()), script, 2, no_grammars(LIMITS)
    )
    for wait_s in (None, None):
        loop._receive(wait_s)
        loop._turn()


def test_a_miss_whose_copy_is_usable_at_once_is_in_the_next_plan() -> None:
    executor = Busy(copy_polls=1)
    turns(executor)
    assert executor.sizes == [1, 2]


def test_a_plan_waits_for_no_copy() -> None:
    executor = Busy(copy_polls=2)
    turns(executor)
    assert executor.sizes == [1, 1]


@pytest.mark.parametrize(("step_s", "sizes"), [(1.0, [1, 2]), (0.001, [1, 1])])
def test_who_comes_while_a_long_step_runs_is_in_the_next_plan(
    step_s: float, sizes: list[int]
) -> None:
    executor = Busy(copy_polls=1)
    script = Script([Submit(1, make_request([5, 6], 8))], [Submit(2, make_request([5, 7], 8))])
    clock = itertools.count(0.0, 0.01)
    scheduler = Scheduler(LIMITS, SchedulerConfig())
    loop = EngineLoop(
        executor, scheduler, script, 2, no_grammars(LIMITS), clock=lambda: next(clock)
    )
    scheduler.prompts.cost.took(0, 0, step_s)
    loop._receive(None)
    loop._turn()
    loop._turn()
    assert executor.sizes == sizes


class SlowLaunch(CertifyingExecutor):
    """While a second step is launched a message comes; outputs: steps told by then."""

    def __init__(self, script: Script, late: ToEngine) -> None:
        super().__init__(LIMITS, OPTIONS)
        self._script, self._late = script, late
        self.outputs: list[int] = []

    def launch(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> FakeTicket:
        assert meanwhile is not None
        if plan.step == 2:
            self._script.bring(self._late)
        meanwhile()
        self.outputs = [m.step for m in self._script.sent if isinstance(m, StepOutput)]
        return super().launch(plan)


def test_a_long_launch_holds_up_neither_results_nor_messages() -> None:
    script = Script([Submit(1, make_request([5, 6], 8))])
    executor = SlowLaunch(script, Submit(2, make_request([5, 7], 8)))
    scheduler = Scheduler(LIMITS, SchedulerConfig())
    loop = EngineLoop(executor, scheduler, script, 2, no_grammars(LIMITS))
    loop._receive(None)
    loop._turn()
    loop._turn()
    assert executor.outputs[-1] == 1
    assert scheduler.num_unfinished == 2


class LostInLaunch(CertifyingExecutor):
    """From the second launch on the copies' stream says that the device is lost."""

    def poll_copies(self) -> list[CopyNews]:
        if self._step == 2:
            raise RuntimeError("uncorrectable")
        return super().poll_copies()


def test_nobody_is_told_of_an_end_when_the_device_is_lost_in_a_launch() -> None:
    script = Script([Submit(1, make_request([5, 6], 8))])
    scheduler = Scheduler(LIMITS, SchedulerConfig())
    loop = EngineLoop(LostInLaunch(LIMITS, OPTIONS), scheduler, script, 2, no_grammars(LIMITS))
    loop._receive(None)
    loop._turn()
    with pytest.raises(ExecutorLost):
        loop._turn()
    outputs = [message for message in script.sent if isinstance(message, StepOutput)]
    assert [item.event.error for out in outputs for item in out.events] == [None]


class FailsAfterAnother(CertifyingExecutor):
    """Only what is launched alone succeeds; the step before a failure is collected."""

    def launch(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> FakeTicket:
        if self._in_flight:
            assert meanwhile is not None
            meanwhile()
            raise RuntimeError("no kernel")
        return super().launch(plan, meanwhile)

    def wait_idle(self) -> None:
        self._in_flight.clear()


def test_a_result_within_a_launch_that_fails_is_no_success() -> None:
    script = Script()
    executor = FailsAfterAnother(LIMITS, OPTIONS)
    loop = EngineLoop(
        executor, Scheduler(LIMITS, SchedulerConfig()), script, 2, no_grammars(LIMITS)
    )

    def rounds(count: int) -> None:
        for key in range(count):
            script.bring(Submit(key, make_request([5, 6], 8)))
            loop._receive(0)
            loop._turn()
            loop._turn()

    with pytest.raises(ExecutorLost):
        rounds(2 * MAX_FAILURES_IN_A_ROW)


def test_shutdown_is_obeyed_while_the_device_computes() -> None:
    executor = LongSteps()
    with running(executor) as engine:
        engine.worker.submit(1, make_request([5, 6], 8))
        assert executor.computes.wait(TIMEOUT_S)
        engine.worker.send(Shutdown())
        engine.join()
        assert engine.end is None


def test_a_worker_that_goes_while_the_device_computes_ends_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = LongSteps()
    with running(executor) as engine:
        engine.worker.submit(1, make_request([5, 6], 8))
        assert executor.computes.wait(TIMEOUT_S)
        engine.worker.sock.close()
        engine.join()
        assert isinstance(engine.end, WorkerGone)
    assert "a step failed" not in caplog.text


def test_one_output_a_step_carries_all_its_events() -> None:
    with running(depth=1) as engine:
        for key in range(4):
            engine.worker.submit(key, make_request([5, 6], 8))
        for key in range(4):
            engine.worker.answer(key)
        steps = [out for out in engine.worker.outputs if out.num_tokens]
        assert [out.step for out in steps] == list(range(1, len(steps) + 1))
        assert all(out.step_s > 0 for out in steps)
        for out in steps:
            keys = [item.key for item in out.events]
            assert len(set(keys)) == len(keys) <= 4
        assert sum(len(out.events) for out in steps) == 32


def test_what_is_on_the_device_is_told_when_it_changes() -> None:
    """With thousands of adapters there it is most of what a step has to say."""
    with running(CertifyingExecutor(limits(adapter_slots=1), OPTIONS)) as engine:
        for key, adapter in enumerate("aab"):
            engine.worker.submit(key, make_request([5, 6], 8, adapter))
            engine.worker.answer(key)
        told = [out.resident for out in engine.worker.outputs if out.resident is not None]
        assert [resident for resident in told if resident] == [("a",), ("b",)]
        assert len(told) < len(engine.worker.outputs) / 2
        assert all(out.stats.resident <= 1 for out in engine.worker.outputs)


def test_abort_reaches_the_loop() -> None:
    with running() as engine:
        engine.worker.submit(1, make_request([5], 150))
        engine.worker.expect(StepOutput)
        engine.worker.send(AbortSequence(1))
        engine.worker.answer(1)
        assert engine.worker.events[1][-1].finish in ("abort", "length")


def test_the_loop_wakes_for_a_deadline_though_nothing_else_happens() -> None:
    with running() as engine:
        engine.worker.answer_slab = lambda digest: None
        engine.worker.submit(2, make_request([5], 4, "never", deadline_s=0.02))
        engine.worker.answer(2)
        assert engine.worker.events[2][-1].error == "deadline"


def test_the_worker_hears_of_a_loop_that_waits() -> None:
    with running() as engine:
        engine.worker.answer_slab = lambda digest: None
        engine.worker.submit(2, make_request([5], 4, "never"))
        for _ in range(3):
            engine.worker.expect(StepOutput)


def test_missing_slab_ends_its_waiters_only() -> None:
    with running() as engine:
        engine.worker.answer_slab = lambda digest: SlabMissing(digest, "no such file")
        engine.worker.submit(1, make_request([5], 4, "a"))
        engine.worker.submit(2, make_request([5], 4))
        engine.worker.answer(1)
        assert engine.worker.events[1][-1].message == "no such file"
        assert len(engine.worker.answer(2)) == 4


def test_loop_ends_when_the_worker_is_gone() -> None:
    with running() as engine:
        engine.worker.submit(1, make_request([5], 150))
        engine.worker.expect(StepOutput)
        engine.worker.sock.close()
        engine.join()
        assert isinstance(engine.end, WorkerGone)


@pytest.mark.parametrize("frame", [b"\xc1", encode(Shutdown())[:-1], b""])
def test_nonsense_from_the_worker_ends_the_loop(frame: bytes) -> None:
    with running() as engine:
        engine.worker.sock.sendall(len(frame).to_bytes(4, "little") + frame)
        engine.join()
        assert isinstance(engine.end, WorkerGone)


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


class FailingExecutor(CertifyingExecutor):
    """Fails the steps in `launches` before, and those in `collects` after they are computed."""

    def __init__(self, launches: set[int], collects: set[int], error: Exception) -> None:
        super().__init__(LIMITS, OPTIONS)
        self.launches = launches
        self.collects = collects
        self.error = error

    def launch(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> FakeTicket:
        ticket = super().launch(plan)
        if plan.step in self.launches:
            raise self.error
        return ticket

    def collect(self, ticket: FakeTicket) -> list[SliceResult]:
        results = super().collect(ticket)
        if ticket.plan.step in self.collects:
            raise self.error
        return results


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("launches", "collects"), [({4}, set()), (set(), {4})])
@pytest.mark.parametrize(
    ("error", "code"),
    [(OutOfMemoryError(), "out_of_memory"), (RuntimeError(), "internal")],
)
def test_a_failed_step_ends_running_sequences_and_the_engine_goes_on(
    depth: int, launches: set[int], collects: set[int], error: Exception, code: str
) -> None:
    with running(FailingExecutor(launches, collects, error), depth) as engine:
        for key in range(3):
            engine.worker.submit(key, make_request([5, 6, key], 30, "a" if key else None))
        for key in range(3):
            tokens = engine.worker.answer(key)
            last = engine.worker.events[key][-1]
            assert last.finish == "length" or last.error == code
            request = make_request([5, 6, key], 30, "a" if key else None)
            expected = certified_output(request.adapter, request.prompt_ids, 30, OPTIONS)
            assert tokens == expected[: len(tokens)]
        assert engine.worker.events[0][-1].error == code
        engine.worker.submit(9, make_request([5, 6, 1], 30, "a"))
        assert engine.worker.answer(9) == certified_output("a", [5, 6, 1], 30, OPTIONS)


def test_steps_that_keep_failing_end_the_loop() -> None:
    with running(FailingExecutor(set(range(99)), set(), RuntimeError()), 1) as engine:
        for key in range(MAX_FAILURES_IN_A_ROW):
            engine.worker.submit(key, make_request([5], 30))
            engine.worker.answer(key)
        engine.join()
        assert isinstance(engine.end, ExecutorLost)


def test_the_loop_looks_for_the_end_of_a_copy_when_nothing_else_is_to_do() -> None:
    """Its one request is over long before."""
    options = CertifyOptions(LIMITS.vocab_size, LIMITS.eos_token_ids, ending_polls=200)
    with running(CertifyingExecutor(LIMITS, options)) as engine:
        engine.worker.submit(1, make_request([5], 2, "a"))
        assert engine.worker.answer(1) == certified_output("a", [5], 2, options)
        assert engine.worker.released == []
        assert engine.worker.expect(SlabReleased).digest == "a"


class Finishing(CertifyingExecutor):
    """It leaves in the host block what it made of each adapter."""

    def poll_copies(self) -> list[CopyNews]:
        return [
            msgspec.structs.replace(news, is_finished=True) if isinstance(news, CopyOver) else news
            for news in super().poll_copies()
        ]


def test_the_worker_is_told_what_is_finished() -> None:
    with running(Finishing(LIMITS, OPTIONS)) as engine:
        engine.worker.submit(1, make_request([5], 2, "a"))
        assert engine.worker.expect(SlabReleased).is_finished


class Torn(CertifyingExecutor):
    """The host block has changed when the copy is over."""

    looks = 0

    def _other_bytes(self, copy: AdapterCopy) -> str | None:
        self.looks += 1  # at its start, when it is usable, and when it is over
        return "torn" if self.looks == 3 else None


def test_a_copy_that_fails_after_its_use_began_ends_the_loop() -> None:
    with running(Torn(LIMITS, OPTIONS)) as engine:
        engine.worker.submit(1, make_request([5], 30, "a"))
        engine.worker.expect(NeedSlab)
        engine.join()
        assert isinstance(engine.end, ExecutorLost)
        assert "torn" in str(engine.end)


class LostDevice(FailingExecutor):
    def wait_idle(self) -> None:
        raise RuntimeError("an illegal memory access was encountered")


def test_a_lost_device_ends_the_loop_and_no_sequence() -> None:
    """The worker ends them in `engine_lost`, and they go on elsewhere."""
    with running(LostDevice({3}, set(), RuntimeError()), 2) as engine:
        engine.worker.submit(1, make_request([5], 30))
        engine.join()
        assert isinstance(engine.end, ExecutorLost)
        assert "illegal memory access" in str(engine.end)
        told = engine.worker.events.get(1, [])
        assert not [event for event in told if event.finish or event.error]


class LostInACopy(CertifyingExecutor):
    def poll_copies(self) -> list[CopyNews]:
        if self._copies:
            raise RuntimeError("an uncorrectable error was encountered")
        return super().poll_copies()


def test_a_device_that_is_lost_in_a_copy_ends_the_loop() -> None:
    """There may be no step that finds it out: every request waits for an adapter."""
    with running(LostInACopy(LIMITS, OPTIONS)) as engine:
        engine.worker.submit(1, make_request([5], 4, "a"))
        engine.worker.expect(NeedSlab)
        engine.join()
        assert isinstance(engine.end, ExecutorLost)


class NoCopies(CertifyingExecutor):
    def start_copy(self, copy: AdapterCopy) -> None:
        raise RuntimeError("bus error")


def test_a_copy_that_cannot_start_ends_its_waiters_only() -> None:
    with running(NoCopies(LIMITS, OPTIONS)) as engine:
        engine.worker.submit(1, make_request([5], 4, "a"))
        engine.worker.submit(2, make_request([5], 4))
        engine.worker.answer(1)
        assert engine.worker.events[1][-1].error == "adapter_unavailable"
        assert "bus error" not in str(engine.worker.events[1][-1].message)
        assert len(engine.worker.answer(2)) == 4
