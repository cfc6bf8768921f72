"""An executor without a model, for tests and chaos: its tokens certify their origin.

Every token is a function of all tokens before it and of the adapter that acts on each. So an
answer alone proves the right prompt, adapter, position and KV pages. The executor also checks
strictly what plans promise.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from itertools import islice

import numpy as np

from loraplex.server.engine.executor import (
    AdapterCopy,
    CopyNews,
    CopyOver,
    CopyUsable,
    ExecutorLimits,
    Masks,
    MemoryLine,
    PageCopies,
    PictureCopy,
    PictureIn,
)
from loraplex.server.engine.memory.residency import each
from loraplex.server.engine.plan import (
    PageGrant,
    RowStart,
    ScaledSlot,
    SeqSlice,
    SliceResult,
    StepPlan,
)
from loraplex.server.protocol import TokenLogprob, acting
from tests.certifying.certificates import (
    ROOT_MARK,
    WRONG_MARK,
    CertifyOptions,
    Mark,
    certified_token,
    certified_vector,
    next_mark,
)
from tests.certifying.page_copies import FakePages, Page
from tests.certifying.pictures import Encoded, FakePictures
from tests.certifying.slab_witness import SlabWitness


class ContractError(AssertionError):
    """A plan or copy that no executor could carry out correctly."""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ContractError(message)


class FakeRow:
    """A row: its tokens, pages and marks. images: for each group of layers, what its pages hold
    where they are right."""

    def __init__(self, start: RowStart, limits: ExecutorLimits) -> None:
        self.start = start
        self.tokens = list(start.token_ids)
        short, size = limits.short_context, len(start.token_ids)
        self.kind = b"long" if short is not None and size > short else b""
        self.most_tokens = limits.max_context if self.kind or short is None else short
        # What a place of each group's pages holds behind the mark.
        self.tags = [self.kind + bytes((group,)) for group in range(len(limits.page_windows))]
        # For each group of layers: pages by place in the page table.
        self.pages: list[dict[int, int]] = [{} for _ in limits.page_windows]
        self.num_computed = -1  # unknown before the first slice
        self.num_cached = 0
        self.adapter: str | None = None
        self.pictured: dict[int, int] = {}  # what placeholders of pictures count as
        self.marks: list[Mark] = []  # after each computed token
        self.images: list[list[Page]] = [[] for _ in limits.page_windows]
        self._page_size = limits.page_size
        self.taken = 0  # tokens that the row's state has taken, each once
        self.state = ROOT_MARK  # after them
        self.num_drafted = 0  # tokens behind them whose inputs are kept

    def said(self, position: int) -> int:
        """The token there, as marks count it."""
        return self.pictured.get(position, self.tokens[position])

    def add(self, mark: Mark) -> None:
        """One more token is computed."""
        starts_page = len(self.marks) % self._page_size == 0
        self.marks.append(mark)
        for images, tag in zip(self.images, self.tags, strict=True):
            place = (mark + tag,)
            if starts_page:
                images.append(place)
            else:
                images[-1] += place

    def take(self, marks: list[Mark]) -> None:
        """Begin with tokens that lie in reused pages. marks: after each of them."""
        self.marks = []
        for images in self.images:
            images.clear()
        for mark in marks:
            self.add(mark)

    def replay(self, piece: SeqSlice) -> None:
        """The state takes tokens of the last draft."""
        missing = piece.start - self.taken
        check(missing == piece.replays, f"the state has {self.taken} tokens, not {piece.start}")
        check(piece.replays <= self.num_drafted, "replays of no draft")
        for position in range(self.taken, piece.start):
            self.state = next_mark(self.state, self.said(position), self.adapter)
        self.num_drafted = len(piece.draft)

    def take_back(self) -> None:
        """A later slice computes the last known token again, for want of a mask."""
        self.num_computed -= 1
        self.marks.pop()
        for images in self.images:
            images[-1] = images[-1][:-1]
            if not images[-1]:
                images.pop()

    def vector(self, piece: SeqSlice, limits: ExecutorLimits) -> bytes | None:
        """Vector of the slice that ends a prompt whose vector is wanted."""
        vector, is_over = piece.vector, self.num_computed >= self.start.prompt_len
        if vector is None:
            return None
        if vector.pooling == "mean":
            check(self.num_cached == 0, "a mean over tokens that were not computed")
        else:
            check(is_over, "a slice for a vector that does not end its prompt")
        return certified_vector(self.marks, vector, limits.num_classes) if is_over else None


def next_allowed(mask: np.ndarray, token_id: int, vocab_size: int) -> int:
    """First id from `token_id` on, round the vocabulary, whose bit is set; some must be."""
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size])
    check(bool(len(allowed)), "a mask of nothing")
    return int(allowed[np.searchsorted(allowed, token_id) % len(allowed)])


class FakeTicket:
    """A launched step; its results are known, but not before `collect`. held: whether constrained
    slices wait for their masks; what was drawn for them without is not theirs. over: when the step
    is, on the monotonic clock."""

    def __init__(self, plan: StepPlan, results: list[SliceResult], over: float = 0.0) -> None:
        self.plan = plan
        self.results = results
        self.over = over
        self.held = any(piece.constrained for piece in plan.slices)

    def ready(self) -> bool:
        return not self.held


class CertifyingExecutor:
    """Keeps in each KV place the mark of all tokens up to it, and reads them back in every step."""

    def __init__(
        self,
        limits: ExecutorLimits,
        options: CertifyOptions | None = None,
        host_memory: memoryview | None = None,
    ) -> None:
        self.limits = limits
        self.summary: tuple[str, ...] = ("no model: tokens are certificates",)
        self.memory: tuple[MemoryLine, ...] = ()
        self.options = options or CertifyOptions(limits.vocab_size, limits.eos_token_ids)
        checked = host_memory if self.options.check_bytes else None
        self.pictures = FakePictures(limits.pictures, self.options.copy_polls, checked)
        self._witness = None if checked is None else SlabWitness(checked)
        self._kv: list[Page] = [()] * limits.num_pages
        self._holders: list[set[int]] = [set() for _ in range(limits.num_pages)]
        sizes = (limits.host_pages, limits.disk_pages)
        self.pages_below = FakePages(self._kv, self._is_read, sizes, check)
        self.stored_pages: tuple[bytes, ...] = ()
        self.stored_snapshots: tuple[bytes, ...] = ()
        self._rows: dict[int, FakeRow] = {}
        # Tokens, and the mark after them.
        self._snapshots: list[Page] = [(None, None)] * limits.num_snapshots
        # The device reads a snapshot, and writes it again, in the order of launches and copies.
        self.states_below = FakePages(
            self._snapshots,
            lambda snapshot: False,
            (limits.host_snapshots, limits.disk_snapshots),
            check,
        )
        self._slots: dict[int, tuple[str, frozenset[int]]] = {}
        # Until they are usable, and from then on until they are over; with polls left.
        self._copies: list[tuple[int, AdapterCopy]] = []
        self._ending: list[tuple[int, AdapterCopy]] = []
        self._in_flight: deque[FakeTicket] = deque()
        self._step = 0
        self._free_at = 0.0  # of the device

    # ---- steps

    def launch(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> FakeTicket:
        check(not any(t.held for t in self._in_flight), "a launch before the last one's masks")
        check(plan.step > self._step, f"step {plan.step} after step {self._step}")
        check(bool(plan.slices), "an empty plan")
        check(plan.num_tokens <= self.limits.max_step_tokens, "over the token budget")
        self._step = plan.step
        for copy in plan.saves:
            self._save(copy.snapshot, self._rows[copy.seq_row])
        for seq_row in plan.freed_rows:
            self._free(seq_row)
        for scaled in plan.scaled_slots:
            self._scale(scaled)
        for start in plan.new_rows:
            if self.options.deadly_id in start.token_ids[: start.prompt_len]:
                os.abort()
            check(0 <= start.seq_row < self.limits.max_rows, f"no row {start.seq_row}")
            check(start.seq_row not in self._rows, f"row {start.seq_row} is in use")
            self._rows[start.seq_row] = FakeRow(start, self.limits)
            self._read_pictures(self._rows[start.seq_row])
        for grant in plan.grants:
            self._grant(grant)
        for copy in plan.restores:
            row = self._rows[copy.seq_row]
            row.taken, row.state = self._snapshots[copy.snapshot]
        rows = [piece.seq_row for piece in plan.slices]
        check(len(rows) == len(set(rows)), "two slices of one row")
        decodes = sum(piece.num_new for piece in plan.slices if piece.kind == "decode")
        most = max(self.limits.max_decodes, self.limits.max_rows)
        check(decodes <= most, "longer drafts than a step holds")
        if meanwhile is not None:
            meanwhile()
        results = [self._compute(piece) for piece in plan.slices]
        self._free_at = max(self._free_at, time.monotonic()) + self.options.step_s
        ticket = FakeTicket(plan, results, self._free_at)
        self._in_flight.append(ticket)
        return ticket

    def _save(self, snapshot: int, row: FakeRow) -> None:
        check(0 <= snapshot < self.limits.num_snapshots, f"no snapshot {snapshot}")
        self._snapshots[snapshot] = row.taken, row.state

    def mask_memory(self, count: int, words: int) -> np.ndarray:
        return np.zeros((count, words), dtype=np.int32)

    def constrain(self, ticket: FakeTicket, masks: Masks) -> None:
        """A token that its mask forbids gives way to the next one allowed, round the vocabulary.
        Slices without a mask draw any token."""
        check(ticket.held, "no draw of the step waits for masks")
        ticket.held = False
        bits = dict[int, list[np.ndarray]]()
        for index, mask in zip(masks.slices, masks.bits, strict=True):
            bits.setdefault(index, []).append(mask)
        slices = ticket.plan.slices
        for index, piece in enumerate(slices):
            of = bits.pop(index, None)
            check(of is None or piece.constrained, "a mask of another slice")
            check(of is None or len(of) == 1 + len(piece.draft), "masks of another draft")
            if piece.constrained:
                first = ticket.results[index].prompt_logprobs
                ticket.results[index] = self._draw(self._rows[piece.seq_row], piece, first, of)
        check(not bits, "a mask of no slice")

    def collect(self, ticket: FakeTicket) -> list[SliceResult]:
        check(bool(self._in_flight) and self._in_flight[0] is ticket, "not the oldest step")
        check(not ticket.held, "a step was collected before its masks came")
        time.sleep(max(0.0, ticket.over - time.monotonic()))
        self._in_flight.popleft()
        for piece, result in zip(ticket.plan.slices, ticket.results, strict=True):
            self._leave_behind(piece, result)
        return ticket.results

    def close(self) -> None:
        self._in_flight.clear()
        self._rows.clear()

    def _scale(self, scaled: ScaledSlot) -> None:
        slot, source = scaled.adapter_slot, scaled.source_slot
        is_own = 0 <= slot - self.limits.adapter_slots < self.limits.max_rows
        check(is_own, f"slot {slot} is not for scales")
        check(source in self._slots, f"slot {source} is not loaded")
        read = {piece.adapter_slot for t in self._in_flight for piece in t.plan.slices}
        check(slot not in read, f"slot {slot} is overwritten under a step in flight")
        digest, extents = self._slots[source]
        self._slots[slot] = (acting(digest, scaled.scale), extents)

    def _free(self, seq_row: int) -> None:
        row = self._rows.pop(seq_row, None)
        check(row is not None, f"row {seq_row} freed twice")
        assert row is not None
        busy = {piece.seq_row for t in self._in_flight for piece in t.plan.slices}
        check(seq_row not in busy, f"row {seq_row} freed under a step in flight")
        for pages in row.pages:
            for page in pages.values():
                self._holders[page].discard(seq_row)

    def _grant(self, grant: PageGrant) -> None:
        row = self._rows.get(grant.seq_row)
        check(row is not None, f"pages for no row {grant.seq_row}")
        assert row is not None
        pages = row.pages[grant.group]
        follows = not pages or grant.first == next(reversed(pages)) + 1
        check(follows, f"pages of row {grant.seq_row} leave a gap")
        for place, page in enumerate(grant.pages, grant.first):
            check(0 <= page < self.limits.num_pages, f"no page {page}")
            check(grant.seq_row not in self._holders[page], f"page {page} twice in one row")
            self._holders[page].add(grant.seq_row)
            pages[place] = page

    def _leave_behind(self, piece: SeqSlice, result: SliceResult) -> None:
        """No token after those of a collected slice sees the pages before its windows."""
        row = self._rows[piece.seq_row]
        many = piece.num_new if piece.kind == "prompt" else len(result.token_ids)
        if piece.sample and not result.token_ids:  # its last known token comes again
            many = piece.num_new - len(piece.draft) - 1
        for pages, window in zip(row.pages, self.limits.page_windows, strict=True):
            if window is None:
                continue
            first = self._first_seen(window, piece.start + many)
            for place in [place for place in pages if place < first]:
                self._holders[pages.pop(place)].discard(piece.seq_row)

    def _first_seen(self, window: int | None, position: int) -> int:
        """The first page that the token at `position` sees."""
        return 0 if window is None else max(0, position - window + 1) // self.limits.page_size

    # ---- a slice

    def _compute(self, piece: SeqSlice) -> SliceResult:
        row = self._rows.get(piece.seq_row)
        check(row is not None, f"a slice of no row {piece.seq_row}")
        assert row is not None
        end = piece.start + piece.num_new
        known = end - len(piece.draft)
        if self.limits.has_states:
            row.replay(piece)
        self._check_inputs(row, piece, known, end)
        self._check_adapter(row, piece)
        self._read_prefix(row, piece.start)
        if piece.kind == "prompt" and piece.start < max(row.pictured, default=-1):
            self._read_pictures(row)  # again: their blocks must not have changed
        mark = row.marks[-1] if row.marks else ROOT_MARK
        check(not self.limits.has_states or row.state == mark, "the state is of another prefix")
        saves = {save.position: save.snapshot for save in piece.saves}
        scored = []
        for position in range(piece.start, known):
            mark = next_mark(mark, row.said(position), row.adapter)
            row.add(mark)
            row.taken, row.state = position + 1, mark
            if row.taken in saves:
                self._save(saves.pop(row.taken), row)
            if piece.prompt_logprobs and position + 1 < row.start.prompt_len:
                count = row.start.sampling.prompt_logprobs or 0
                listed = row.start.sampling.logprob_token_ids
                scored.append(self._logprob(mark, row.tokens[position + 1], count, listed))
        check(not saves, "a save of no token of the slice")
        self._write(row, piece.seq_row, piece.start, known)
        row.num_computed = known
        prompt_logprobs = scored if piece.prompt_logprobs else None
        if not piece.sample:
            return SliceResult(
                prompt_logprobs=prompt_logprobs, vector=row.vector(piece, self.limits)
            )
        check(piece.vector is None, "a sample of a slice that is for a vector")
        check(known == len(row.tokens), "a sample before all inputs are computed")
        if piece.constrained:  # it draws when its masks are there
            return SliceResult(prompt_logprobs=prompt_logprobs)
        return self._draw(row, piece, prompt_logprobs, None)

    def _draw(
        self,
        row: FakeRow,
        piece: SeqSlice,
        prompt_logprobs: list[TokenLogprob] | None,
        masks: list[np.ndarray] | None,
    ) -> SliceResult:
        """One token, and one more for each leading token of the draft that is right. A wrong one
        leaves wrong values in the KV places of the slice. masks: of each token; one of nothing ends
        the draft."""
        if masks is not None and not masks[0].any():
            row.take_back()
            return SliceResult(prompt_logprobs=prompt_logprobs)
        mark, end = row.marks[-1], piece.start + piece.num_new
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        count, listed = row.start.sampling.logprobs, row.start.sampling.logprob_token_ids
        begin = row.num_computed
        for position in range(begin, end + 1):
            index = len(row.tokens) - row.start.prompt_len
            token_id = certified_token(mark, self.options, index >= row.start.eos_suppressed_until)
            if masks is not None:
                token_id = next_allowed(masks[len(token_ids)], token_id, self.limits.vocab_size)
            row.tokens.append(token_id)
            token_ids.append(token_id)
            if count is not None:
                logprobs.append(self._logprob(mark, token_id, count, listed))
            if position == end:
                break
            goes_on = masks is None or masks[len(token_ids)].any()
            if not goes_on or piece.draft[position - piece.start - 1] != token_id:
                break
            mark = next_mark(mark, token_id, row.adapter)
            row.add(mark)
            row.num_computed = position + 1
        self._write(row, piece.seq_row, begin, end)
        return SliceResult(tuple(token_ids), tuple(logprobs), prompt_logprobs)

    def _logprob(
        self, mark: Mark, token_id: int, count: int, listed: tuple[int, ...]
    ) -> TokenLogprob:
        """Made-up logprob of the mark alone, so that it certifies as much as the token."""
        best, size = -(mark[0] + 1) / 256, self.limits.vocab_size
        top = tuple(((token_id + i) % size, best - i) for i in range(min(count, size)))
        asked = tuple(best - (i - token_id) % size for i in listed)
        return TokenLogprob(token_id, best, top, rank=1, listed=asked)

    def _check_inputs(self, row: FakeRow, piece: SeqSlice, known: int, end: int) -> None:
        """The slice computes known tokens up to `known`, and its draft from there to `end`."""
        most = self.limits.max_decodes if piece.sample else 0
        check(piece.num_new > 0, "an empty slice")
        check(known <= len(row.tokens) and end - known <= most, "tokens that are not there")
        check(end <= row.most_tokens, "tokens beyond the context, or of another kind")
        last = (end - 1) // self.limits.page_size
        check(all(last in pages for pages in row.pages), "tokens without pages")
        if row.num_computed >= 0:
            check(piece.start == row.num_computed, "a gap or an overlap in computed tokens")
        if piece.kind == "decode":
            sampled = len(row.tokens) > len(row.start.token_ids)
            check(sampled and known == len(row.tokens), "no sample on the device to go on from")
            check(piece.start + 1 == known, "a draft of another length")
        else:
            check(piece.token_ids == row.tokens[piece.start : end], "other tokens than the row's")

    def _check_adapter(self, row: FakeRow, piece: SeqSlice) -> None:
        digest = None
        if piece.adapter_slot >= 0:
            check(piece.adapter_slot in self._slots, f"slot {piece.adapter_slot} is not loaded")
            digest = self._slots[piece.adapter_slot][0]
        if row.adapter is None:  # that of an activated adapter begins to act after some tokens
            row.adapter = digest
        check(row.adapter == digest, f"row {piece.seq_row} changed its adapter")

    def _read_prefix(self, row: FakeRow, start: int) -> None:
        if len(row.marks) < start:  # reused pages, before the first slice
            row.num_cached = start
            begins = range(start + 1) if row.adapter is not None else (start,)
            for begin in begins:
                row.take(self._chain(row, begin, start))
                if self._holds(row):
                    return
        if not self._holds(row):
            raise ContractError(f"pages of row {row.start.seq_row} hold another prefix")

    @staticmethod
    def _chain(row: FakeRow, begin: int, end: int) -> list[Mark]:
        """Marks of the row's first tokens, if its adapter acts from `begin` on."""
        marks, mark = list[Mark](), ROOT_MARK
        for position in range(end):
            acting = row.adapter if position >= begin else None
            mark = next_mark(mark, row.said(position), acting)
            marks.append(mark)
        return marks

    def _holds(self, row: FakeRow) -> bool:
        """Tells whether the row's state and pages hold its marks, as far as the next token sees
        them."""
        if self.limits.has_states and row.marks and row.state != row.marks[-1]:
            return False
        return all(
            self._group_holds(row, group, self._first_seen(window, len(row.marks)))
            for group, window in enumerate(self.limits.page_windows)
        )

    def _group_holds(self, row: FakeRow, group: int, first: int) -> bool:
        """The pages of one group, from its first that the next token sees."""
        pages, images = row.pages[group], row.images[group][first:]
        if first in pages:
            seen = islice(pages.values(), first - next(iter(pages)), None)
            held = list(map(self._kv.__getitem__, islice(seen, len(images))))
        else:
            held = []
        if len(held) < len(images):
            raise ContractError(f"a page of row {row.start.seq_row} is gone")
        if images:  # the last page may not be full
            held[-1] = held[-1][: len(images[-1])]
        if held != images:
            return False
        row.images[group][first:] = held  # the very same: compared at once until one changes
        return True

    def _write(self, row: FakeRow, seq_row: int, begin: int, end: int) -> None:
        """Write the row's places from `begin` to `end`; those without a mark become wrong. What lay
        behind them is nobody's."""
        size = self.limits.page_size
        for place in range(begin // size, -(-end // size)):
            first, most = max(begin - place * size, 0), min(end - place * size, size)
            for pages, images in zip(row.pages, row.images, strict=True):
                page = pages[place]
                if self._holders[page] != {seq_row}:
                    raise ContractError(f"page {page} is written while it is shared")
                right = images[place][first:most] if place < len(images) else ()
                wrong = [WRONG_MARK] * (most - first - len(right))
                self._kv[page] = (*self._kv[page][:first], *right, *wrong)

    def wait_idle(self) -> None:
        self._in_flight.clear()
        self.pictures.forget()

    # ---- pictures

    def _read_pictures(self, row: FakeRow) -> None:
        for placed in row.start.pictures:
            ids = self.pictures.ids(placed)
            found = dict(enumerate(ids, placed.start))
            check(all(row.pictured.get(at, said) == said for at, said in found.items()), "changed")
            row.pictured |= found

    def start_picture(self, copy: PictureCopy) -> None:
        self.pictures.start(copy)

    def poll_pictures(self) -> list[PictureIn]:
        return self.pictures.poll()

    def encode(self, pictures: int) -> Encoded:
        return self.pictures.encode(pictures, self._seen_by)

    def _seen_by(self, copy: PictureCopy) -> str:
        """The adapter that changes the tower."""
        if copy.adapter_slot < 0:
            return ""
        check(copy.adapter_slot in self._slots, f"slot {copy.adapter_slot} is not loaded")
        return acting(self._slots[copy.adapter_slot][0], copy.scale)

    # ---- adapters

    def start_copy(self, copy: AdapterCopy) -> None:
        check(0 <= copy.adapter_slot < self.limits.adapter_slots, f"no slot {copy.adapter_slot}")
        runs = copy.layout.runs
        check(len(copy.host_extents) == len(copy.device_extents) == len(runs), "runs do not match")
        problem = self._other_bytes(copy)
        check(problem is None, problem or "")
        target = _extents(copy)
        check(len(target) == sum(runs), "the slab's runs overlap")
        check(all(0 <= x < self.limits.arena_extents for x in target), "outside the arena")
        for _, other in self._copies:
            check(other.adapter_slot != copy.adapter_slot, "two copies to one slot")
            check(not _extents(other) & target, "two copies to one extent")
        read = {p.adapter_slot for t in self._in_flight for p in t.plan.slices}
        for slot, (digest, extents) in list(self._slots.items()):
            if slot == copy.adapter_slot or extents & target:
                check(slot not in read, f"{digest} is overwritten under a step in flight")
                del self._slots[slot]
        self._copies.append((self.options.copy_polls, copy))

    def _is_read(self, page: int) -> bool:
        """Whether a step in flight reads or writes a page."""
        rows = {piece.seq_row for t in self._in_flight for piece in t.plan.slices}
        return bool(rows & self._holders[page])

    def copy_pages(self, copies: PageCopies) -> None:
        (self.states_below if copies.of_states else self.pages_below).start(copies)

    def poll_copies(self) -> list[CopyNews]:
        news: list[CopyNews] = [*self.pages_below.poll(), *self.states_below.poll()]
        ready, self._copies = _due(self._copies)
        for copy in ready:
            slot, digest = copy.adapter_slot, copy.layout.digest
            problem = self._copy_problem(copy)
            if problem is not None:
                news.append(CopyOver(slot, digest, problem))
                continue
            self._slots[slot] = (digest, frozenset(_extents(copy)))
            self._ending.append((self.options.ending_polls + 1, copy))
            news.append(CopyUsable(slot, digest))
        over, self._ending = _due(self._ending)
        for copy in over:
            problem = self._other_bytes(copy)
            check(problem is None, f"of a copy that steps may have used: {problem}")
            news.append(CopyOver(copy.adapter_slot, copy.layout.digest))
        return news

    def _copy_problem(self, copy: AdapterCopy) -> str | None:
        """Reason why a copy cannot become usable, or None."""
        return self._other_bytes(copy)

    def _other_bytes(self, copy: AdapterCopy) -> str | None:
        return None if self._witness is None else self._witness.problem(copy)


def _due(
    copies: list[tuple[int, AdapterCopy]],
) -> tuple[list[AdapterCopy], list[tuple[int, AdapterCopy]]]:
    """Divides copies into those at their last poll, and the others."""
    due = [copy for polls, copy in copies if polls <= 1]
    return due, [(polls - 1, copy) for polls, copy in copies if polls > 1]


def _extents(copy: AdapterCopy) -> set[int]:
    return set(each(zip(copy.device_extents, copy.layout.runs, strict=True)))
