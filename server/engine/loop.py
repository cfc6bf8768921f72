"""The step loop: inbox -> plan -> launch / collect -> commit -> outbox, on one thread.

The thread waits for the device's next result, and for the inbox when there is nothing to compute.
It waits for nothing else.
"""

import enum
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Generic, NamedTuple, TypeVar

from loraplex.server.constraints.constraints import Constraints
from loraplex.server.engine.begun import BegunSequences
from loraplex.server.engine.channel import Channel, WorkerGone
from loraplex.server.engine.executor import (
    COPY_FAILED,
    CopyOver,
    Executor,
    Masks,
    Ticket,
    TowerTicket,
)
from loraplex.server.engine.messages import (
    AbortSequence,
    AdapterPlaced,
    AdapterSettled,
    EncodePicture,
    EngineStats,
    EvictAdapter,
    NeedSlab,
    PictureFailed,
    PinAdapters,
    PreloadAdapter,
    Shutdown,
    SlabMissing,
    SlabReleased,
    SlabStaged,
    StepOutput,
    StepWork,
    Submit,
    ToEngine,
    WithdrawPreload,
)
from loraplex.server.engine.plan import StepPlan
from loraplex.server.engine.scheduling.pace import Pace
from loraplex.server.engine.scheduling.scheduler import Scheduler
from loraplex.server.protocol import ErrorCode

log = logging.getLogger(__name__)

# The end of a copy is polled. With nothing else to do the loop looks this often.
COPY_POLL_S = 0.0002
GRAMMAR_POLL_S = 0.0005  # the same for constraints that are being made
# While the device computes, messages are taken as they come, and the device is polled this often.
STEP_POLL_S = 0.0001
# With unfinished sequences and nothing to compute, the loop still reports to the worker this often.
HEARTBEAT_S = 1.0
MAX_FAILURES_IN_A_ROW = 3

T = TypeVar("T", bound=Ticket)


class ExecutorLost(Exception):
    """Steps keep failing: only a new process can help."""


class _InFlight(NamedTuple, Generic[T]):
    """Step that was launched, and is not yet collected. planned, launched: times of that.
    constrained: places of slices whose draws wait for masks. is_held: they still wait."""

    plan: StepPlan
    ticket: T
    planned: float
    launched: float
    constrained: list[int]
    is_held: bool


class _Chunk(NamedTuple):
    """Work of the tower that was launched, and when."""

    ticket: TowerTicket
    launched: float


class _Collected(NamedTuple):
    plan: StepPlan
    step_s: float


class Phase(enum.IntEnum):
    """Phases of the thread's work for steps; places in StepWork.phases_s."""

    PLAN = 0
    LAUNCH = 1
    WAIT = 2
    COMMIT = 3
    MASKS = 4


class EngineLoop(Generic[T]):
    """Run the engine's steps: receive frames, plan, launch, collect and send. pipeline_depth: steps
    in flight at once; 2 lets the host plan while the device computes. begun: for the worker, should
    this process die; None = nobody reads it.
    """

    def __init__(
        self,
        executor: Executor[T],
        scheduler: Scheduler,
        channel: Channel,
        pipeline_depth: int,
        constraints: Constraints,
        clock: Callable[[], float] = time.monotonic,
        begun: BegunSequences | None = None,
    ) -> None:
        self._begun = begun or BegunSequences(memoryview(bytearray(BegunSequences.NBYTES)))
        self._executor = executor
        self._scheduler = scheduler
        self._channel = channel
        self._depth = pipeline_depth
        self._constraints = constraints
        self._clock = clock
        scheduler.masks.threads = constraints.mask_threads
        self._in_flight: deque[_InFlight[T]] = deque()
        self._pace = Pace()
        self._chunks = deque[_Chunk]()  # of the tower, which may not be over
        self._ready_at = clock()  # when the device was done with the last step collected
        self._failures = 0
        self._steps = 0
        self._settled: list[AdapterSettled] = []
        self._copied: dict[str, SlabReleased] = {}  # not reported yet
        self._phases_s = [0.0] * len(Phase)
        self._num_constrained = 0  # tokens, not reported yet
        self._aside_s = 0.0  # time of the current launch that was spent on other work
        self._reported: EngineStats | None = None
        self._reported_at = clock()
        self._leaving = False

    def run(self) -> None:
        """Run steps until a Shutdown frame. Raises WorkerGone, ExecutorLost."""
        idle_s: float | None = 0.0
        self._leaving = False
        while self._receive(idle_s):
            worked = self._turn()
            idle_s = 0.0 if worked else self._idle_s()

    # ---- inbox

    def _receive(self, wait_s: float | None) -> bool:
        """Take all messages, waiting for the first. False: leave."""
        self._mind_begun()
        self._take_messages(wait_s)
        return not self._leaving

    def _take_messages(self, wait_s: float | None) -> bool:
        """Whether there was a message. A slab that follows its sequence is taken with it."""
        message = None if self._leaving else self._channel.receive(wait_s)
        anything = message is not None
        while message is not None:
            self._take(message)
            message = None if self._leaving else self._channel.receive(0)
        return anything

    def _take(self, message: ToEngine) -> None:
        scheduler = self._scheduler
        match message:
            case Submit(key, request):
                self._begun.begin(key)
                scheduler.submit(key, request, self._clock())
                self._begun.take_back()
            case AbortSequence(key):
                scheduler.abort(key)
            case SlabStaged():
                scheduler.slab_staged(message, self._clock())
            case SlabMissing(digest, text):
                scheduler.slab_missing(digest, text)
            case EncodePicture():
                scheduler.picture_came(message)
            case PictureFailed():
                scheduler.fail_pictures(scheduler.pictures.missing(message), message.error)
            case Shutdown():
                self._leaving = True
            case _:
                self._take_order(message)

    def _take_order(
        self, order: PinAdapters | PreloadAdapter | WithdrawPreload | EvictAdapter
    ) -> None:
        """Take a wish of the operator."""
        loads = self._scheduler.loads
        match order:
            case PinAdapters(digests):
                loads.pin_only(digests)
            case PreloadAdapter(number, digest):
                loads.preload(number, digest)
            case WithdrawPreload(number, digest):
                loads.withdraw(number, digest)
            case EvictAdapter(number, digest):
                loads.condemn(number, digest)
                self._scheduler.drafting.source.drop(digest)

    def _idle_s(self) -> float | None:
        """Seconds for which nothing can happen unless a message comes; None = for ever."""
        scheduler = self._scheduler
        if scheduler.loads.copying or scheduler.pictures.busy or scheduler.all_swaps.is_copying:
            return COPY_POLL_S
        if self._constraints.busy:
            return GRAMMAR_POLL_S
        times = (self._scheduler.next_deadline(), self._scheduler.all_swaps.next_look)
        waits = [max(0.0, time - self._clock()) for time in times if time is not None]
        if self._scheduler.num_unfinished:
            waits.append(HEARTBEAT_S)
        return min(waits, default=None)

    # ---- steps

    def _turn(self) -> bool:
        """Run one round of the loop, and say whether a step was launched or collected in it."""
        with self._guarding_steps():
            self._wait_to_plan()
        self._begun.mind_all(True)
        self._note_copies()
        self._note_constraints()
        self._load_on()
        self._note_copies()  # a copy that has just begun may be usable at once
        began = self._clock()
        self._foresee()
        plan = self._scheduler.plan(began)
        collected = None
        worked = plan is not None or bool(self._in_flight)
        last = self._steps
        with self._guarding_steps():
            if plan is not None:
                self._launch(plan, began)
            self._carry_out_loads()
            if self._scheduler.pictures.busy:
                worked |= self._encode(beside=plan is not None)
            if self._in_flight and (plan is None or len(self._in_flight) >= self._depth):
                collected = self._collect()
            if self._steps != last:  # a step was collected, perhaps during the launch
                self._failures = 0
        self._report(collected)
        return worked

    @contextmanager
    def _guarding_steps(self) -> Iterator[None]:
        try:
            yield
        except (WorkerGone, ExecutorLost):
            raise
        except Exception as error:  # failures of the device have any type
            self._fail(error)

    def _note_copies(self) -> bool:
        """Pass what has become of copies on to the scheduler. Whether there was anything."""
        try:
            news = self._executor.poll_copies()
        except Exception as lost:
            raise ExecutorLost(f"the device is lost: {lost}") from lost
        for item in news:
            if isinstance(item, CopyOver) and item.error is None:
                report = SlabReleased(item.digest, item.copy_s, item.is_finished)
                self._copied[item.digest] = report
            self._scheduler.copy_news(item, self._clock())
        return bool(news)

    def _note_constraints(self) -> bool:
        """Pass finished constraints on to the scheduler. Whether there was any."""
        news = self._constraints.poll()
        for item in news:
            self._scheduler.constraint_news(item, self._clock())
        return bool(news)

    def _foresee(self) -> None:
        """Look at drafts of constrained sequences for the next plan."""
        drafting = self._scheduler.drafting
        if wishes := drafting.take_wishes():
            wait_s = self._scheduler.masks.late_s
            drafting.foreseen(self._constraints.foresee(wishes, wait_s))

    def _wait_to_plan(self) -> None:
        """Wait while a step runs, so that requests that arrive now are in the next plan.

        Not beside masks: their step lasts as long as the host takes, so waiting would draw it out.
        """
        if self._in_flight and not self._in_flight[-1].constrained:
            running = self._in_flight[-1]
            spare_s = self._pace.spare_s(self._scheduler.likely_s)
            began = self._clock()
            until = max(running.planned, self._ready_at) + spare_s
            self._load_while(lambda: self._clock() < until and not running.ticket.ready())
            self._phases_s[Phase.WAIT] += self._clock() - began

    def _mind_begun(self) -> None:
        """From here on only sequences that have begun have a part in what happens, but for pictures
        and constraints on their way.
        """
        self._begun.mind_all(bool(self._chunks) or self._constraints.busy)

    def _load_while(self, computing: Callable[[], bool]) -> None:
        """Take messages and load adapters while the device computes. An absent adapter may then be
        usable before the next plan."""
        self._mind_begun()
        while computing() and not self._leaving:
            self._look_at_loads(STEP_POLL_S)

    def _meanwhile(self) -> None:
        """Other work during a launch that the device's full queue delays."""
        began = self._clock()
        if self._in_flight and self._in_flight[0].ticket.ready():
            self._report(self._collect())
        self._look_at_loads(0.0)
        self._aside_s += self._clock() - began

    def _look_at_loads(self, wait_s: float) -> None:
        taken = self._take_messages(wait_s)
        if self._note_copies() | self._note_constraints() | taken:
            self._load_on()

    def _load_on(self) -> None:
        self._scheduler.go_on_loading(self._clock())
        self._carry_out_loads()

    def _launch(self, plan: StepPlan, began: float) -> None:
        """Launch a planned step, and note the times. began: when planning began."""
        planned = self._clock()
        self._aside_s = 0.0
        for start in plan.new_rows:
            self._begun.begin(start.key)
        self._mind_begun()
        ticket = self._executor.launch(plan, self._meanwhile)
        launched = self._clock()
        constrained = [i for i, piece in enumerate(plan.slices) if piece.constrained]
        step = (plan, ticket, planned, launched, constrained)
        self._in_flight.append(_InFlight(*step, is_held=bool(constrained)))
        self._pace.prepared(planned - began, launched - planned)
        self._phases_s[Phase.PLAN] += planned - began
        self._phases_s[Phase.LAUNCH] += launched - planned - self._aside_s
        self._constrain()

    def _encode(self, *, beside: bool) -> bool:
        """Launch some of the tower's work, one chunk behind each step; the next step waits for no
        more. Whether anything happened. beside: a step has just been launched. Without one the last
        chunk has to be over, or a step that comes soon would wait.
        """
        pictures, news = self._scheduler.pictures, self._executor.poll_pictures()
        for item in news:
            self._scheduler.picture_news(item)
        if not self._in_flight:
            self._settle_chunks()
        count = pictures.next_work()
        is_free = beside or not self._chunks or self._chunks[-1].ticket.ready()
        if count and is_free:
            launched = self._clock()
            self._begun.mind_all(True)
            ticket = self._executor.encode(count)
            self._chunks.append(_Chunk(ticket, launched))
            pictures.launched(count, is_last=ticket.is_last)
        return bool(news) or (count > 0 and is_free)

    def _settle_chunks(self, since: float = inf) -> float | None:
        """Charge the chunks that are over. Returns seconds of them behind a time; None = there were
        none."""
        found = None
        while self._chunks and self._chunks[0].ticket.ready():
            ticket, launched = self._chunks.popleft()
            tower_s = ticket.seconds()
            self._scheduler.encoded(tower_s)
            began = max(launched, self._ready_at)
            found = (found or 0.0) + min(max(began + tower_s - since, 0.0), tower_s)
        return found

    def _collect(self) -> _Collected:
        running = self._in_flight[0]
        began = self._clock()
        self._load_while(lambda: not running.ticket.ready())
        results = self._executor.collect(running.ticket)
        ready = self._clock()
        since = max(running.planned, self._ready_at)
        tower_s = self._settle_chunks(since)
        step_s = max(ready - since - (tower_s or 0.0), 0.0)
        is_sure = tower_s is None and not self._chunks
        self._scheduler.took(step_s, beside_tower=not is_sure)
        self._ready_at = ready
        self._in_flight.popleft()
        self._scheduler.commit(running.plan.step, results)
        self._num_constrained += sum(len(results[i].token_ids) for i in running.constrained)
        self._steps = running.plan.step
        done = self._clock()
        self._phases_s[Phase.WAIT] += ready - began
        self._phases_s[Phase.COMMIT] += done - ready
        self._constrain()
        return _Collected(running.plan, done - running.launched)

    def _constrain(self) -> None:
        """Fill the masks of the oldest step in flight. The tokens that they depend on are known.
        What is late draws nothing."""
        if not self._in_flight or not self._in_flight[0].is_held:
            return
        began = self._clock()
        oldest = self._in_flight[0] = self._in_flight[0]._replace(is_held=False)
        wishes = self._scheduler.mask_wishes(oldest.constrained)
        of = [wish.place for wish in wishes for _ in range(wish.num_masks)]
        memory, wait_s = self._executor.mask_memory, self._scheduler.masks.late_s
        bits, late = self._constraints.filled(wishes, memory, wait_s)
        self._scheduler.note_masks(late)
        filled = self._clock()
        self._executor.constrain(oldest.ticket, Masks(of, bits))
        self._phases_s[Phase.MASKS] += filled - began
        self._phases_s[Phase.LAUNCH] += self._clock() - filled

    def _fail(self, error: Exception) -> None:
        """End all running sequences. Raises ExecutorLost if steps keep failing."""
        self._failures += 1
        log.error("a step failed", exc_info=error)
        self._in_flight.clear()
        self._chunks.clear()
        try:
            # Pages and rows are given up below: no running step may still read them.
            self._executor.wait_idle()
        except Exception as lost:
            # No sequence gets an end: the worker makes them go on elsewhere.
            raise ExecutorLost(f"the device is lost: {lost}") from lost
        self._scheduler.fail_running(*_describe(error))
        if self._failures >= MAX_FAILURES_IN_A_ROW:
            self._report(None)
            raise ExecutorLost(f"{self._failures} steps failed in a row, the last: {error}")

    # ---- outbox

    def _carry_out_loads(self) -> None:
        """Start copies and constraints, and send what the scheduler has for the worker."""
        for key in self._scheduler.grammars.take_abandoned():
            self._constraints.abandon(key)
        for wish in self._scheduler.grammars.take_wishes():
            self._constraints.start(wish)
        for mask in self._scheduler.masks.take_wishes():
            self._constraints.fill_aside(mask)
        for pages in self._scheduler.all_swaps.take_copies():
            self._executor.copy_pages(pages)
        copies, needed, released, settled = self._scheduler.loads.take()
        for copy in copies:
            digest = copy.layout.digest
            self._channel.send(AdapterPlaced(digest, self._scheduler.loads.arena.spans(digest)))
            try:
                self._executor.start_copy(copy)
            except Exception as error:  # of any type; other adapters go on
                log.error("a copy failed", exc_info=error)
                failed = CopyOver(copy.adapter_slot, digest, COPY_FAILED)
                self._scheduler.copy_news(failed, self._clock())
        # Releases first: an adapter that was evicted at once may be needed again.
        for digest in released:
            self._channel.send(self._copied.pop(digest, SlabReleased(digest)))
        for digest in needed:
            self._channel.send(NeedSlab(digest))
        self._settled += settled
        self._carry_out_pictures()

    def _carry_out_pictures(self) -> None:
        """Start copies of patches, and send what the worker is to know of pictures."""
        pictures, wanted, taken = self._scheduler.pictures.take()
        for picture in pictures:
            self._executor.start_picture(picture)
        for segment in taken:
            self._channel.send(segment)
        for message in wanted:
            self._channel.send(message)

    def _report(self, collected: _Collected | None) -> None:
        events = tuple(self._scheduler.take_events())
        stats = self._scheduler.stats()
        now = self._clock()
        alive = now - self._reported_at >= HEARTBEAT_S and self._scheduler.num_unfinished
        compiled = tuple(self._constraints.take_compiled())
        if events or collected or compiled or alive or stats != self._reported:
            self._reported, self._reported_at = stats, now
            step_s, num_tokens, work = 0.0, 0, None
            if collected is not None:
                step_s, num_tokens = collected.step_s, collected.plan.num_tokens
                work = self._work(collected.plan)
            resident = self._scheduler.arena.take_resident()
            self._channel.send(
                StepOutput(self._steps, events, stats, step_s, num_tokens, work, resident, compiled)
            )
        # After the stats that show their effect.
        settled, self._settled = self._settled, []
        for answer in settled:
            self._channel.send(answer)

    def _work(self, plan: StepPlan) -> StepWork:
        plan_s, launch_s, wait_s, commit_s, masks_s = self._phases_s
        self._phases_s = [0.0] * len(Phase)
        constrained, self._num_constrained = self._num_constrained, 0
        return StepWork(
            sequences=len(plan.slices),
            adapters=plan.num_adapters,
            adapter_tokens=plan.num_adapter_tokens,
            phases_s=(plan_s, launch_s, wait_s, commit_s, masks_s),
            constrained=constrained,
        )


def _describe(error: Exception) -> tuple[ErrorCode, str]:
    # torch.OutOfMemoryError by its name: this module does not know torch.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out_of_memory", "the device ran out of memory in this step"
    return "internal", "the device failed in this step"
