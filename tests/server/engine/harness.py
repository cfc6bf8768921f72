"""The scheduler under a certifying executor and a made-up worker, advanced by hand."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from loraplex.adapters.grammar.limits import ServedGrammarLimits
from loraplex.adapters.grammar.vocabulary import Vocabulary, VocabularyError
from loraplex.adapters.manifest import SiteLayout, SlabLayout
from loraplex.server.constraints.constraint import Constraint
from loraplex.server.constraints.constraints import Constraints
from loraplex.server.constraints.rules import TokenRules, mask_words, step_words
from loraplex.server.constraints.wishes import ConstraintNews
from loraplex.server.engine.executor import AdapterCopy, ExecutorLimits, Masks
from loraplex.server.engine.messages import (
    AdapterSettled,
    EncodePicture,
    PicturesWanted,
    PictureTaken,
    SlabStaged,
)
from loraplex.server.engine.plan import SliceResult, StepPlan
from loraplex.server.engine.scheduling.scheduler import Scheduler
from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from loraplex.server.protocol import GenerateRequest, Grid, SamplingParams, TokenEvent
from tests.certifying.certificates import CertifyOptions, certified_output, pictured_ids
from tests.certifying.executor import CertifyingExecutor, FakeTicket
from tests.server.engine.oracle import OracleSource
from tests.server.invariants import check_arena, check_pool, check_snapshots, check_swaps

LIMITS = ExecutorLimits(
    num_pages=24,
    page_size=4,
    max_rows=4,
    max_step_tokens=12,
    max_context=64,
    vocab_size=100,
    eos_token_ids=(2, 3),
    adapter_slots=2,
    arena_extents=6,
    extent_bytes=256,
)


# The first layer of what reads pictures, in adapters whose name begins with "tower".
TOWER_LAYER = 7


def limits(**changes: Any) -> ExecutorLimits:
    return msgspec.structs.replace(LIMITS, **changes)


def layout(
    digest: str, runs: tuple[int, ...] = (1, 1), extent_bytes: int = 256, table_size: int = 0
) -> SlabLayout:
    table = SiteLayout(-1, "lm_head", (0,), (0.0,), 0, (0,), table_offset=0, table_size=table_size)
    sites: tuple[SiteLayout, ...] = (table,) if table_size else ()
    if digest.startswith("tower"):
        sites += (SiteLayout(TOWER_LAYER, "merger", (1,), (1.0,), 0, (0,)),)
    return SlabLayout(digest, "base", "float32", extent_bytes, runs, sites)


def make_request(
    prompt: list[int],
    max_tokens: int = 4,
    adapter: str | None = None,
    **changes: Any,
) -> GenerateRequest:
    """changes: of fields of the request or of its sampling."""
    sampling = {n: changes.pop(n) for n in SamplingParams.__struct_fields__ if n in changes}
    request = GenerateRequest(
        request_id="r",
        attempt=1,
        choice=0,
        adapter=adapter,
        prompt_ids=prompt,
        accepted_ids=[],
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        seed=7,
        drafts="",
    )
    return msgspec.structs.replace(request, **changes)


def no_grammars(limits: ExecutorLimits) -> Constraints:
    """Of a model without a tokenizer."""

    def load() -> Vocabulary:
        raise VocabularyError("it has no tokenizer")

    made = Constraints(load, limits.vocab_size, limits.eos_token_ids, ServedGrammarLimits(), 1)
    made.open()
    return made


class TestExecutor(CertifyingExecutor):
    """Fails copies of digests in `bad_copies`, and rows in `bad_rows` in their next sample."""

    __test__ = False

    def __init__(self, limits: ExecutorLimits, options: CertifyOptions | None = None) -> None:
        super().__init__(limits, options)
        self.bad_copies: set[str] = set()
        self.results: dict[int, SliceResult] = {}

    def _copy_problem(self, copy: AdapterCopy) -> str | None:
        if copy.layout.digest in self.bad_copies:
            return "copy failed"
        return super()._copy_problem(copy)

    def collect(self, ticket: FakeTicket) -> list[SliceResult]:
        real = super().collect(ticket)
        return [
            self.results.pop(piece.seq_row, result)
            for piece, result in zip(ticket.plan.slices, real, strict=True)
        ]


class Harness:
    """`cycle` is one round of the loop: answers in, a plan launched, at most `depth` in flight."""

    def __init__(
        self,
        limits: ExecutorLimits = LIMITS,
        depth: int = 1,
        config: SchedulerConfig | None = None,
        options: CertifyOptions | None = None,
        auto_stage: bool = True,
        right_percent: int | None = None,
        step_s: Callable[[StepPlan], float] | None = None,
    ) -> None:
        """right_percent: of drafts' tokens; None = drafts are those of a scheduler. step_s: how
        long steps take on the device; None = nobody says."""
        self.limits = limits
        self.depth = depth
        self.auto_stage = auto_stage
        self.step_s = step_s
        self.executor = TestExecutor(limits, options)
        self.scheduler = Scheduler(limits, config or SchedulerConfig())
        if right_percent is not None:
            oracle = OracleSource(self.executor.options, right_percent)
            self.scheduler.drafting.source = oracle
        self.tickets: deque[FakeTicket] = deque()
        self.events: dict[int, list[TokenEvent]] = {}
        self.needed: list[str] = []
        self.settled: list[AdapterSettled] = []
        self.held: set[str] = set()  # staged and not released
        self.runs: dict[str, tuple[int, ...]] = {}
        self.table_sizes: dict[str, int] = {}
        self.plans: list[StepPlan] = []
        self.copies: list[AdapterCopy] = []
        self.now = 0.0
        self.keys = 0
        self.late_percent = 0  # of masks
        self.aside: deque[Constraint] = deque()
        self.grids: dict[str, tuple[int, int, int]] = {}  # of pictures, as decoded
        self.auto_pictures = True
        self.asked: list[PicturesWanted] = []  # and not answered
        self.taken: list[PictureTaken] = []
        self.segments = 0  # handed over

    def submit(self, request: GenerateRequest) -> int:
        self.keys += 1
        self.scheduler.submit(self.keys, request, self.now)
        self.exchange()
        return self.keys

    def abort(self, key: int) -> None:
        self.scheduler.abort(key)
        self.exchange()

    def send_picture(self, picture: str, grid: Grid | None = None, **changes: Any) -> None:
        """A picture's patches come, as decoded or with changes. grid: None = the picture's own."""
        limits = self.limits.pictures
        assert limits is not None
        grid = grid or self.grids[picture]
        rows, self.segments = limits.form.patches(grid), self.segments + 1
        segment = self.segment(picture)
        message = EncodePicture(picture, grid, segment, rows, limits.columns)
        self.scheduler.picture_came(msgspec.structs.replace(message, **changes))
        self.exchange()

    def segment(self, picture: str) -> int:
        """Where a picture's patches lie."""
        return self.segments

    def _read_pictures(self) -> bool:
        """Carry pictures on as the loop does; whether anything happened."""
        asked, self.asked = (self.asked, []) if self.auto_pictures else ([], self.asked)
        spans = (span for message in asked for span in message.spans)
        for picture, grid in dict.fromkeys((span.picture, span.grid) for span in spans):
            self.send_picture(picture, grid)  # a worker decodes it once for all
        pictures = self.scheduler.pictures
        if not pictures.busy:
            return bool(asked)
        for news in self.executor.poll_pictures():
            self.scheduler.picture_news(news)
        count = pictures.next_work()
        if count:
            ticket = self.executor.encode(count)
            pictures.launched(count, is_last=ticket.is_last)
            while not ticket.ready():
                time.sleep(0)
            self.scheduler.encoded(ticket.seconds())
        self.exchange()
        return True

    def stage(self, digest: str) -> None:
        """It answers what was asked for; or it comes unasked."""
        if digest in self.needed:
            self.needed.remove(digest)
        assert digest not in self.held, "handed over twice"
        self.held.add(digest)
        runs = self.runs.get(digest, (1, 1))
        of = layout(digest, runs, table_size=self.table_sizes.get(digest, 0))
        staged = SlabStaged(of, tuple(range(len(runs))))
        self.scheduler.slab_staged(staged, self.now)
        self.exchange()

    def miss(self, digest: str, message: str = "gone") -> None:
        self.needed.remove(digest)
        self.scheduler.slab_missing(digest, message)
        self.exchange()

    def plan(self) -> StepPlan | None:
        self._foresee()
        plan = self.scheduler.plan(self.now)
        self.exchange()
        if plan is not None:
            self.plans.append(plan)
            self.tickets.append(self.executor.launch(plan))
            self._constrain()
        self.check()
        return plan

    def commit(self) -> None:
        ticket = self.tickets.popleft()
        if self.step_s is not None:
            self.scheduler.took(self.step_s(ticket.plan))
        self.scheduler.commit(ticket.plan.step, self.executor.collect(ticket))
        self._constrain()
        self.exchange()
        self.check()

    def _constrain(self) -> None:
        if not self.tickets or not self.tickets[0].held:
            return
        slices = [i for i, p in enumerate(self.tickets[0].plan.slices) if p.constrained]
        wishes = self.scheduler.mask_wishes(slices)
        of = [wish.place for wish in wishes for _ in range(wish.num_masks)]
        sizes = [each.constraint.num_ids for each in wishes if each.constraint is not None]
        bits = self.executor.mask_memory(len(of), step_words(self.limits.vocab_size, sizes))
        begin, late = 0, list[int]()
        for place, constraint, draft in wishes:
            rows = bits[begin : begin + 1 + len(draft)]
            rows.fill(-1)
            is_there = constraint is not None and constraint.is_ready and not draft
            if constraint is not None and not is_there and self._is_late(place):
                rows.fill(0)
                late.append(place)
                constraint.is_late = True
                if len(self.plans) % 2:  # a thread was at it, and is done at once
                    self._keep_mask(constraint)
            elif constraint is not None:
                constraint.fill(rows[0])
                constraint.fill_ahead(draft, rows[1:], lambda: True)
            begin += len(rows)
        self.scheduler.note_masks(late)
        self.executor.constrain(self.tickets[0], Masks(of, bits))

    def _is_late(self, place: int) -> bool:
        return (len(self.plans) * 37 + place * 61) % 100 < self.late_percent

    def _fill_aside(self) -> bool:
        """One mask a cycle; whether there was one."""
        wishes = self.scheduler.masks.take_wishes()
        self.aside += [wish.constraint for wish in wishes]
        if self.aside:
            self._keep_mask(self.aside.popleft())
            return True
        return False

    def _keep_mask(self, constraint: Constraint) -> None:
        row = np.zeros(mask_words(constraint.num_ids), np.int32)
        constraint.fill(row)
        constraint.keep(row)
        constraint.is_busy = False

    def _foresee(self) -> None:
        drafting = self.scheduler.drafting
        wishes = drafting.take_wishes()
        drafting.foreseen([w.constraint.foresee(w.draft, w.most) for w in wishes])

    def _make_constraints(self) -> None:
        """Without grammars, and at once."""
        for wish in self.scheduler.grammars.take_wishes():
            key, sampling, accepted_ids, vocab_size, *_ = wish
            vocab = vocab_size or self.limits.vocab_size
            rules = TokenRules.of(sampling, self.limits.eos_token_ids, vocab)
            constraint = Constraint(None, rules, sampling.min_tokens)
            for token_id in accepted_ids:
                constraint.take(token_id)
            self.scheduler.constraint_news(ConstraintNews(key, constraint), self.now)

    def finish_copies(self) -> None:
        for news in self.executor.poll_copies():
            self.scheduler.copy_news(news, self.now)
        self.exchange()

    def cycle(self) -> bool:
        """Returns whether anything can still happen without the outside."""
        for digest in list(self.needed) if self.auto_stage else []:
            self.stage(digest)
        self.finish_copies()
        plan = self.plan()
        filled = self._fill_aside() | self._read_pictures()
        committed = bool(self.tickets) and (plan is None or len(self.tickets) >= self.depth)
        if committed:
            self.commit()
        all_swaps = self.scheduler.all_swaps
        copying = (
            self.scheduler.loads.copying or all_swaps.is_copying or all_swaps.next_look is not None
        )
        busy = committed or filled or bool(self.tickets) or copying
        return busy or bool(self.needed and self.auto_stage)

    def run(self, cycles: int = 2000) -> None:
        for _ in range(cycles):
            self.now += 0.01
            if not self.cycle():
                return
        raise AssertionError("it never comes to rest")

    def exchange(self) -> None:
        self._make_constraints()
        for pages in self.scheduler.all_swaps.take_copies():
            self.executor.copy_pages(pages)
        loads = self.scheduler.loads.take()
        for copy in loads.copies:
            assert copy.layout.digest in self.held, "copied after its host block was given back"
            self.copies.append(copy)
            self.executor.start_copy(copy)
        self.settled += loads.settled
        for digest in loads.released:
            self.held.remove(digest)
        assert not self.held.intersection(loads.needed), "asked for what was not given back"
        self.needed += loads.needed
        pictures, asked, taken = self.scheduler.pictures.take()
        for picture in pictures:
            self.executor.start_picture(picture)
        self.asked += asked
        self.taken += taken
        for event in self.scheduler.take_events():
            events = self.events.setdefault(event.key, [])
            assert not events or events[-1].finish is None, "an event after the terminal one"
            events.append(event.event)

    def check(self) -> None:
        check_pool(self.scheduler.pages.pool)
        check_swaps(self.scheduler.swaps)
        check_arena(self.scheduler.arena)
        pieces = [piece for ticket in self.tickets for piece in ticket.plan.slices]
        written = [save.snapshot for piece in pieces for save in piece.saves]
        check_snapshots(self.scheduler.states, written)
        loads = self.scheduler.loads
        assert loads.num_parked == sum(map(len, loads._parked.values()))

    # ---- what came out

    def tokens(self, key: int) -> list[int]:
        """Output so far; events must be gapless."""
        tokens: list[int] = []
        events = self.events.get(key, [])
        first = events[0].index if events else 0
        for event in events:
            assert event.index == first + len(tokens), "a gap or a repetition in the output"
            tokens += event.token_ids
        return tokens

    def last(self, key: int) -> TokenEvent:
        return self.events[key][-1]

    def assert_at_rest(self) -> None:
        """Nothing is held by anyone."""
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.free_pages == self.limits.num_pages
        assert not self.held
        assert not self.scheduler.loads.copying
        assert all(self.scheduler.arena.leases(d) == 0 for d in self.scheduler.arena.ready)
        assert sorted(self.scheduler.rows.free) == list(
            range(min(self.limits.max_rows, self.limits.max_step_tokens))
        )
        assert not self.scheduler.scaled_slots._uses
        assert not self.scheduler.pages._computing
        assert not self.scheduler._departing
        assert not self.scheduler._sequences
        assert not self.scheduler.swaps.coming
        assert not self.scheduler.states.swaps.coming
        assert not self.scheduler.recalls
        assert not self.scheduler.loads._condemned
        assert len(self.taken) == self.segments
        pictures, limits = self.scheduler.pictures, self.limits.pictures
        for waits in (pictures._held, pictures._wanting, pictures._parked, pictures._started):
            assert not waits
        assert pictures.cache.available == (0 if limits is None else limits.num_blocks)


def right(harness: Harness, request: GenerateRequest) -> list[int]:
    """All tokens of a request's answer."""
    acting = request.acting or ""
    adapter = acting if acting.startswith("tower") and request.adapter_from is not None else ""
    ids = pictured_ids(request.prompt_ids, request.pictures, adapter)
    wanted, begins = request.sampling.max_tokens, request.adapter_from
    options = harness.executor.options
    return certified_output(request.acting, ids, wanted, options, adapter_from=begins)


def check_answer(harness: Harness, key: int, request: GenerateRequest) -> None:
    assert harness.tokens(key) == right(harness, request)
    assert harness.last(key).finish in ("stop", "length")


def answer(harness: Harness, prompt: list[int], **wish: Any) -> int:
    """The answer is right; returns how many tokens of its prompt were not computed."""
    before = harness.scheduler.stats().prefix_hit_tokens
    request = make_request(prompt, **wish)
    key = harness.submit(request)
    harness.run()
    check_answer(harness, key, request)
    return harness.scheduler.stats().prefix_hit_tokens - before
