"""The scheduler: the tokens that each step computes, and what follows from results. Pure.

There is no prefill or decode phase. The computed count of every sequence catches up with its token
count, under one token budget a step. A plan may be made while earlier steps are in flight.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable

from loraplex.server.constraints.wishes import ConstraintNews, MaskWish
from loraplex.server.engine.admission import Refusal, num_ids, refuse, token_limit
from loraplex.server.engine.executor import (
    AdapterCopy,
    CopyNews,
    CopyUsable,
    ExecutorLimits,
    PagesCopied,
    PictureIn,
)
from loraplex.server.engine.memory.pages import PageHash
from loraplex.server.engine.memory.residency import AdapterArena
from loraplex.server.engine.memory.scaled_slots import ScaledSlots
from loraplex.server.engine.messages import EncodePicture, EngineStats, SequenceEvent, SlabStaged
from loraplex.server.engine.plan import SeqSlice, SliceResult, StepPlan
from loraplex.server.engine.scheduling.batch import Batch
from loraplex.server.engine.scheduling.device_shares import DeviceShares
from loraplex.server.engine.scheduling.drafting import Drafting
from loraplex.server.engine.scheduling.events import (
    bad_draw,
    closed_event,
    drawn_event,
    error_event,
    finished_before,
    not_finite,
    token_event,
    with_cost,
)
from loraplex.server.engine.scheduling.kv import SequencePages
from loraplex.server.engine.scheduling.loading import AdapterLoads
from loraplex.server.engine.scheduling.mask_share import MaskShare
from loraplex.server.engine.scheduling.picture_loads import LostPicture, PictureLoads
from loraplex.server.engine.scheduling.prompt_shares import PromptShares, PromptTurn
from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from loraplex.server.engine.scheduling.sequence import (
    BY_PRECEDENCE,
    Precedence,
    Sequence,
    State,
    discard,
)
from loraplex.server.engine.scheduling.waits import (
    Deadlines,
    GrammarWaits,
    PageWaits,
    SequenceRows,
    Waits,
)
from loraplex.server.protocol import ErrorCode, Finish, GenerateRequest


class Scheduler:
    """Single-threaded. A sequence gives up its row, pages and lease only when no step in flight
    contains it. Its terminal event does not wait for that."""

    def __init__(
        self,
        limits: ExecutorLimits,
        config: SchedulerConfig,
        stored: Iterable[PageHash] = (),
        stored_states: Iterable[PageHash] = (),
    ) -> None:
        """stored, stored_states: as `Executor.stored_pages` and `stored_snapshots`."""
        self.limits = limits
        self.config = config
        self.pages = SequencePages(limits, stored, stored_states)
        self.states, self.swaps = self.pages.states, self.pages.swaps
        self.all_swaps = self.pages.all_swaps
        self.arena = AdapterArena(limits.arena_extents, limits.extent_bytes, limits.adapter_slots)
        pictures = limits.pictures
        tower_layer = None if pictures is None else pictures.tower_layer
        waits = (config.max_loading, config.drain_after_s)
        self.loads = AdapterLoads(self.arena, *waits, tower_layer)
        self.shares = DeviceShares(limits, self.arena)
        self.grammars, self.recalls = GrammarWaits(), PageWaits(self.all_swaps)
        self.pictures = PictureLoads(pictures, self.loads)
        self.waits = Waits(self.loads, self.grammars, self.pictures, self.recalls)
        self.masks = MaskShare()
        self.drafting = Drafting(config.max_draft, config.draft_memory)
        self.prompts = PromptShares(config)
        self._eos = frozenset(limits.eos_token_ids)
        # Every running sequence can have a token in every step.
        self.rows = SequenceRows(min(limits.max_rows, limits.max_step_tokens))
        self.scaled_slots = ScaledSlots(limits.adapter_slots, limits.max_rows)
        self._sequences: dict[int, Sequence] = {}
        self._waiting, self._running = list[Sequence](), list[Sequence]()  # in order of precedence
        self._departing: set[Sequence] = set()  # to be released at a later commit
        self._in_flight: deque[Batch] = deque()
        self._deadlines = Deadlines()
        self._events: list[SequenceEvent] = []
        self._arrivals, self._step, self._now = 0, 0, 0.0
        self._preemptions = self._prefix_hit_tokens = self._prompt_tokens = 0

    def submit(self, key: int, request: GenerateRequest, now: float) -> None:
        """Take a request. A bad request ends at once in an error event."""
        self._now = now
        self._arrivals += 1
        precedence = Precedence(request.priority, self._arrivals)
        refusal = refuse(request, self.limits)
        deadline = None if request.deadline_s is None else now + request.deadline_s
        sequence = Sequence(key, request, precedence, token_limit(request, self.limits), deadline)
        pictures = self.limits.pictures
        sequence.joins_pictures = pictures is not None and pictures.is_joined
        if key in self._sequences:
            self._events.append(error_event(sequence, "invalid_request", f"key {key} is in use"))
            return
        self._sequences[key] = sequence
        if refusal is not None:
            self._fail(sequence, *refusal)
        elif deadline is not None and deadline <= now:
            self._fail(sequence, "deadline", "the deadline was over on arrival")
        elif (finish := finished_before(sequence, self._eos)) is not None:
            self._finish(sequence, finish)
        elif len(self._waiting) + len(self.waits) >= self.config.max_waiting:
            self._fail(sequence, "overloaded", f"{self.config.max_waiting} sequences wait already")
        else:
            if deadline is not None:
                self._deadlines.add(key, deadline)
            self._enqueue(sequence)

    def constraint_news(self, news: ConstraintNews, now: float) -> None:
        """A constraint is made, or refused. Its sequence waits for it, or has ended."""
        self._now = now
        sequence, outcome = self.grammars.unpark(news.key), news.outcome
        if sequence is None:
            return
        if isinstance(outcome, Refusal):
            self._fail(sequence, *outcome)
            return
        sequence.constraint = outcome
        if outcome.state == "over":
            self._finish(sequence, "stop")
        else:
            self._wait(sequence)

    def abort(self, key: int) -> None:
        """End a sequence with finish `abort`. An unknown key has ended already."""
        if (sequence := self._sequences.get(key)) is not None:
            self._finish(sequence, "abort")

    def fail_running(self, code: ErrorCode, message: str) -> None:
        """The device lost the steps in flight: end all running sequences."""
        lost = {s for batch in self._in_flight for s in batch.sequences}
        pieces = (piece for batch in self._in_flight for piece in batch.plan.slices)
        self.states.lost(save for piece in pieces for save in piece.saves)
        self._in_flight.clear()
        for sequence in [*self._running, *self._departing]:
            sequence.in_flight = sequence.pending = 0
            if sequence in lost:
                self.pages.forget(sequence)
            if sequence.state is State.RUNNING:
                self._fail(sequence, code, message)
            else:
                self._settle(sequence)
        self.fail_pictures(self.pictures.lost(), code)

    def slab_staged(self, staged: SlabStaged, now: float) -> None:
        copy = AdapterCopy(-1, staged.layout, staged.extents, ())
        if (problem := self.loads.staged(copy, staged.load_s, now)) is not None:
            self._fail_waiters(self.loads.take_waiters(staged.layout.digest), problem)

    def slab_missing(self, digest: str, message: str) -> None:
        self._fail_waiters(self.loads.missing(digest, message), message)

    def copy_news(self, news: CopyNews, now: float) -> None:
        if isinstance(news, PagesCopied):
            self.all_swaps.over(news, now)
            self._go_on_swapping(now)
            return
        if isinstance(news, CopyUsable):
            self.loads.usable(news.digest, now)
            waiters = self.loads.take_waiters(news.digest)
            self.shares.usable(news.digest, waiters)
            for sequence in waiters:
                sequence.load_s += now - sequence.parked_at
                self._wait(sequence)
            return
        self.loads.over(news.digest, news.error)
        self.shares.copied(news.digest, news.copy_s)
        if news.error is not None:
            self._fail_waiters(self.loads.take_waiters(news.digest), news.error)

    def picture_came(self, message: EncodePicture) -> None:
        self.fail_pictures(self.pictures.came(message), "invalid_image")

    def picture_news(self, news: PictureIn) -> None:
        self.fail_pictures(self.pictures.is_in(news), "internal")

    def fail_pictures(self, failed: list[LostPicture], code: ErrorCode) -> None:
        """End the sequences that wait for pictures which do not come."""
        for sequences, message in failed:
            for sequence in sequences:
                if sequence.state is not State.FINISHED:  # by another picture of its
                    self._fail(sequence, code, message)

    def _fail_waiters(self, waiters: list[Sequence], message: str) -> None:
        for sequence in waiters:
            self._fail(sequence, "adapter_unavailable", message)

    def take_events(self) -> list[SequenceEvent]:
        """Return all events since the last call."""
        events, self._events = self._events, []
        return events

    @property
    def num_unfinished(self) -> int:
        """Sequences whose terminal event is still to come."""
        return len(self._sequences)

    def next_deadline(self) -> float | None:
        """The time at which `plan` has something to do even if nothing else happens."""
        first = self._deadlines.next()
        return None if first is None else first[0]

    def stats(self) -> EngineStats:
        return EngineStats(
            free_pages=self.pages.pool.available,
            running=len(self._running),
            waiting=len(self._waiting) + len(self.waits),
            resident=self.arena.num_ready,
            loading=self.loads.loading,
            preemptions=self._preemptions,
            prefix_hit_tokens=self._prefix_hit_tokens,
            prompt_tokens=self._prompt_tokens,
            evictions=dict(self.arena.evictions),
            adapter_bytes=self.arena.used_bytes,
            draft_tokens=self.drafting.drafted,
            accepted_draft_tokens=self.drafting.accepted,
            device_use=self.shares.use,
            swaps=self.swaps.stats(),
            state_swaps=self.states.swaps.stats(),
        )

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can be computed before something else happens."""
        self._now, preempted = now, self._preemptions
        self._expire(now)
        self._make_room(now)
        for sequence in self.pictures.take_ready():
            self._wait(sequence)
        self.pages.begin_plan()
        running = list(self._running)
        soon = len(running) + min(len(self._waiting), len(self.rows.free))
        context = (self.prompts, self.states, self.pictures)
        batch = Batch(self._step + 1, self.limits, self.rows.freed, soon, *context)
        self.masks.begin_plan(running, self.prompts.cost.decode_s)
        self.drafting.begin_plan(running, ahead=bool(self._in_flight), room=batch.drafts_left)
        longer, streams = [], []
        for sequence in running:  # first the sequences that want one token
            wanted = sequence.num_wanted
            if wanted > 1:
                longer.append(sequence)
            elif sequence.awaits_result or not self.masks.takes(sequence):
                streams.append(sequence)
            elif wanted == 1 and self._grow(batch, sequence):
                batch.add(sequence, self._draft(batch, sequence))
                streams.append(sequence)
        self._begin_prompts(streams if longer or self._waiting else [])
        self._add_prompts(batch, longer)
        if not (batch.sequences or self._in_flight) and self.prompts.forgive():
            self._add_prompts(batch, longer)
        self._ask()
        self._go_on_swapping(now)
        if not batch.sequences:
            # The adapter of one that was just preempted may give others its room at once.
            again = self._preemptions > preempted and not self._in_flight
            return self.plan(now) if again else None
        batch.load = self.prompts.end()
        self._step += 1
        self.rows.freed = []
        batch.plan.saves.extend(self.states.take_saves())
        self._in_flight.append(batch)
        return batch.plan

    def _begin_prompts(self, streams: list[Sequence]) -> None:
        queues = (self._running, self._waiting)
        live = any(queue and not queue[0].is_background for queue in queues)
        tenants = (s.request.tenant for s in streams if not s.is_background)
        self.prompts.begin(tenants, has_live=live)

    def _add_prompts(self, batch: Batch, longer: list[Sequence]) -> None:
        """Add the remaining prompts to the step, and admit waiting sequences; tenants take turns.
        longer: running sequences of whose prompts more than a token is to be computed."""
        waiting = {s.key: s for s in sorted(self._waiting, key=self.prompts.waiting_turn)}
        for sequence in sorted(longer, key=self.prompts.turn):
            if sequence.can_run:
                self._admit(batch, waiting, self.prompts.turn(sequence))  # between two chunks
                if batch.room(sequence) > 0 and self._grow(batch, sequence):
                    batch.add(sequence)
        self._admit(batch, waiting)

    def _draft(self, batch: Batch, sequence: Sequence) -> list[int]:
        room = self.masks.room_for_draft(sequence, batch.room_for_draft(sequence))
        draft = self.drafting.draft(sequence, room)
        self.masks.add_draft(sequence, draft)
        return draft

    def go_on_loading(self, now: float) -> None:
        """Advance the loading of absent adapters between two plans, while steps are in flight."""
        self._now = now
        self._make_room(now)
        self._ask()

    def _go_on_swapping(self, now: float) -> None:
        self.all_swaps.go_on(now)
        for sequence in self.recalls.take_served():
            self._wait(sequence)

    def _make_room(self, now: float) -> None:
        self.loads.drop_condemned(self._sequences.values())
        self.loads.give_room(now, self._waiting, self._running)
        refused, self.loads.refused = self.loads.refused, []
        for digest, message in refused:
            self._fail_waiters(self.loads.take_waiters(digest), message)

    def _ask(self) -> None:
        self.loads.ask(self._now)
        # Their last sequence may have ended only now, and the next plan may be long in coming.
        self.loads.drop_condemned(self._sequences.values())

    def _expire(self, now: float) -> None:
        while (first := self._deadlines.next()) is not None and first[0] <= now:
            self._fail(self._sequences[first[1]], "deadline", "the deadline passed")

    def _grow(self, batch: Batch, sequence: Sequence) -> bool:
        """Get missing pages for one more token. If too few are free, preempt the youngest."""
        if sequence.can_run and self.pages.outgrown(sequence):
            self._preempt(sequence)
        while sequence.can_run:
            pages = self.pages.grow(sequence, self.drafting.most(sequence))
            if pages is not None:
                batch.grant(sequence, pages)
                return True
            if self._departing or (sequence.in_flight and self.pages.has_windows):
                return False  # pages come free at a commit
            if self._give_way():
                continue
            if self.swaps.holds_pages:
                return False  # pages come free when copies are over
            self._preempt(self._running[-1])
        return False

    def _give_way(self, to: Sequence | None = None) -> bool:
        """Have the last sequence that waits for pages give up those that it holds, to another one
        before it. to: None = to any. Whether there was one."""
        last = self.recalls.last(None if to is None else to.precedence)
        if last is None:
            return False
        self.recalls.give_up(last)
        self._wait(last)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._preemptions += 1
        sequence.leaving = True
        self._settle(sequence)

    def _admit(
        self, batch: Batch, waiting: dict[int, Sequence], before: PromptTurn | None = None
    ) -> None:
        """Start those of `waiting` whose turn it is. What was tried leaves it: a plan's room only
        shrinks. before: None = all turns."""
        has_row = self.rows.free or (self._running and self._running[-1].is_background)
        if batch.budget <= 0 or not has_row or any(s.leaving for s in self._departing):
            return
        turn = self.prompts.turn
        for sequence in [s for s in waiting.values() if before is None or turn(s) < before]:
            if batch.budget <= 0 or not self._try(batch, sequence):
                return  # in order: small ones must not overtake a large one for ever
            del waiting[sequence.key]

    def _try(self, batch: Batch, sequence: Sequence) -> bool:
        """Start a waiting sequence if that can be. False: those behind it wait, too."""
        if batch.room(sequence) <= 0 or self.loads.holds_back(sequence):
            return True
        if not self._has_row(sequence) or not self.pages.look_up(sequence, bool(self._running)):
            return False
        if self.pages.is_computed_elsewhere(sequence) or not self.masks.admits(sequence):
            return True
        if self.waits.is_ready(sequence):
            return self._begin(batch, sequence)
        discard(self._waiting, sequence)
        self._enqueue(sequence)
        return True

    def _begin(self, batch: Batch, sequence: Sequence) -> bool:
        """Start a waiting sequence, or have it wait for pages that come back to the device. False:
        there are not enough pages."""
        while True:
            reserve = len(self._running) + len(self.recalls)
            is_coming = self.pages.recall(sequence, reserve)
            if is_coming:
                discard(self._waiting, sequence)
                self.recalls.park(sequence)
                return True
            if is_coming is None and self.pages.take(sequence, reserve):
                if sequence.joins_pictures and batch.room(sequence) <= 0:
                    self.pages.release(sequence)  # it goes on within a picture
                    return False
                self._start(batch, sequence)
                return True
            if not self._give_way(sequence):
                return False

    def _has_row(self, sequence: Sequence) -> bool:
        """Whether a row is free for the sequence. With none free, the last running sequence is
        preempted if it is a batch's and this one is not. Its row comes free once no step in
        flight needs it."""
        if not self.rows.free and sequence.takes_row_of_last(self._running):
            self._preempt(self._running[-1])
        return bool(self.rows.free)

    def _start(self, batch: Batch, sequence: Sequence) -> None:
        discard(self._waiting, sequence)
        insort(self._running, sequence, key=BY_PRECEDENCE)
        sequence.move(State.RUNNING)
        sequence.seq_row = self.rows.free.pop()
        if sequence.adapter is not None:
            placement = self.arena.acquire(sequence.adapter)
            assert placement is not None
            sequence.adapter_slot = self._scaled(batch, sequence, placement.adapter_slot)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_len)
            self._prefix_hit_tokens += sequence.cached_tokens
            self._prompt_tokens += sequence.prompt_len
        batch.start(sequence)
        batch.add(sequence)

    def _scaled(self, batch: Batch, sequence: Sequence, slot: int) -> int:
        """The adapter's slot, or one with the scale that the sequence asks for."""
        scale = sequence.request.adapter_scale
        if scale == 1:
            return slot
        slot, news = self.scaled_slots.take(slot, scale)
        if news is not None:
            batch.plan.scaled_slots.append(news)
        return slot

    @property
    def likely_s(self) -> float:
        """How long the newest step in flight is likely to take."""
        return self._in_flight[-1].load.likely_s

    def took(self, step_s: float, *, beside_tower: bool = False) -> None:
        """The oldest step in flight kept the device busy for so long. beside_tower: and what was
        computed of a picture; then nothing is learned of the time."""
        batch = self._in_flight[0]
        self.shares.took(batch.plan, batch.sequences, step_s)
        if beside_tower:
            return
        self.prompts.cost.took(batch.load.tokens, batch.load.attended, step_s)
        if not batch.load.tokens:
            self.drafting.price.saw(batch.plan.num_tokens, step_s)

    def encoded(self, tower_s: float) -> None:
        """The oldest launched work of the tower kept the device busy for so long."""
        self.shares.encoded(self.pictures.settle().shares, tower_s)

    def mask_wishes(self, slices: list[int]) -> list[MaskWish]:
        """Wishes for masks of these slices of the oldest step in flight."""
        return self._in_flight[0].mask_wishes(slices)

    def note_masks(self, late: list[int]) -> None:
        """The masks of the oldest step in flight are filled, but those of `late` slices: these draw
        nothing. Sequences end whose constraints allow no further token."""
        batch = self._in_flight[0]
        for place in late:
            batch.sequences[place].is_late = True
        for sequence in batch.closed():
            assert sequence.constraint is not None
            self._events.append(closed_event(sequence, sequence.constraint))
            self._end(sequence)

    def commit(self, step: int, results: list[SliceResult]) -> None:
        """Take the results of the oldest step in flight."""
        batch = self._in_flight.popleft()
        plan, sequences = batch.plan, batch.sequences
        if plan.step != step or len(results) != len(sequences):
            expected = f"expected {len(sequences)} results of step {plan.step}"
            raise ValueError(f"{expected}, got {len(results)} of {step}")
        for piece, sequence, result in zip(plan.slices, sequences, results, strict=True):
            sequence.in_flight -= 1
            sequence.pending -= piece.sample
            is_valid = sequence.state is State.RUNNING and not result.failed
            self.states.saved(sequence, piece.saves, is_valid=is_valid)
            if sequence.state is State.RUNNING:
                self._apply(sequence, piece, result)
            if sequence.pictures_end and not sequence.is_late:
                self.pictures.computed(sequence, piece.start + piece.num_new)
            sequence.is_late = False
            if sequence in self._departing:
                self._settle(sequence)

    def _apply(self, sequence: Sequence, piece: SeqSlice, result: SliceResult) -> None:
        if result.failed and not sequence.is_late:
            self.pages.forget(sequence)
            self._fail(sequence, "internal", not_finite(sequence.adapter))
            return
        self._note(sequence, piece, result)
        end = piece.start + piece.num_new
        if sequence.is_late:
            end -= 1 + len(piece.draft)
            sequence.rewind(end)
            self.pages.publish(sequence, end)
            if self.limits.has_states:  # which have the token already
                self._preempt(sequence)
            return
        if not piece.sample:
            self.pages.publish(sequence, end)
            if end >= sequence.limit:  # the prompt was only to be scored, or read for its vector
                self._finish(sequence, "length", result.vector)
            return
        problem = bad_draw(piece, result.token_ids, num_ids(sequence.request, self.limits))
        if problem is not None:
            self._fail(sequence, "internal", problem)
            return
        self._events.append(drawn_event(sequence, result.token_ids, result.logprobs, self._eos))
        if piece.draft:  # some of it may be wrong
            end = max(piece.start + 1, len(sequence.tokens) - 1)
            sequence.rewind(end)
        self.drafting.note(sequence, piece, len(result.token_ids))
        self.pages.publish(sequence, end)
        if self._events[-1].event.finish is not None:
            self._end(sequence)

    def _note(self, sequence: Sequence, piece: SeqSlice, result: SliceResult) -> None:
        """Keep what the sequence's events report beside its tokens."""
        if piece.prompt_logprobs:
            sequence.prompt_logprobs += result.prompt_logprobs or ()
        if result.routed is not None and self.limits.routing is not None:
            sequence.note_routed(piece.start, result.routed, self.limits.routing)

    def _fail(self, sequence: Sequence, code: ErrorCode, message: str) -> None:
        self._events.append(error_event(sequence, code, message))
        self._end(sequence)

    def _finish(self, sequence: Sequence, finish: Finish, vector: bytes | None = None) -> None:
        self._events.append(token_event(sequence, finish=finish, vector=vector))
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.key]
        self._events[-1] = with_cost(self._events[-1], sequence)
        self.drafting.end(sequence)
        self._deadlines.discard(sequence.key)
        if not self.waits.give_up(sequence):
            discard(self._waiting, sequence)
        sequence.move(State.FINISHED)
        self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """Release a sequence that is over or leaving, once no step in flight contains it."""
        over = sequence.state is State.FINISHED
        if sequence.seq_row < 0 or not (over or sequence.leaving):
            return
        if over:
            discard(self._running, sequence)
        if sequence.in_flight:
            self._departing.add(sequence)
            return
        self._departing.discard(sequence)
        self._release(sequence)
        if not over:
            discard(self._running, sequence)
            self._wait(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.leaving and sequence.state is State.RUNNING:
            self.pages.leave(sequence)
        self.pages.release(sequence)
        self.pictures.release(sequence)
        self.rows.give_back(sequence.seq_row)
        if sequence.adapter is not None:
            self.arena.release(sequence.adapter)
            self.scaled_slots.give_back(sequence.adapter_slot)
        sequence.seq_row = sequence.adapter_slot = -1
        sequence.leaving = False
        sequence.prompt_logprobs.clear()

    def _wait(self, sequence: Sequence) -> None:
        sequence.move(State.WAITING)
        self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        if self.waits.park(sequence, self._now):
            return
        if (problem := self.loads.misfit(sequence)) is not None:
            self._fail(sequence, "invalid_request", problem)
        else:
            insort(self._waiting, sequence, key=BY_PRECEDENCE)
