"""An executor without a model, for tests and failover drills: its tokens certify their origin.

Every token is a function of the adapter's digest and all tokens before it. So an answer alone
proves the right prompt, adapter, position and KV pages. The executor also checks strictly what
plans promise.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec
import numpy as np

from server.constraints.rules import mask_words
from server.engine.executor import (
    AdapterCopy,
    CopyNews,
    CopyOver,
    CopyUsable,
    ExecutorLimits,
    Masks,
)
from server.engine.memory.extents import each
from server.engine.plan import PageGrant, RowStart, SeqSlice, SliceResult, StepPlan
from server.engine.witness import SlabWitness
from server.protocol import TokenLogprob

_Mark = bytes


class ContractError(AssertionError):
    """A plan or copy that no executor could carry out correctly."""


class CertifyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """eos_percent: how often a token is the first end-of-sequence id (0 = never).

    step_s: seconds that a step takes. copy_polls: calls of `poll_copies` until a copy is usable.
    ending_polls: calls from then on until the copy is over (0 = at once).
    check_bytes: slabs are read when a copy starts, is usable and is over. Their bytes must be the
    same as before.
    max_guesses: as in ExecutorLimits. right_percent: how often a guess is right.
    """

    vocab_size: int = 512
    eos_token_ids: tuple[int, ...] = (2,)
    eos_percent: int = 0
    step_s: float = 0.0
    copy_polls: int = 1
    ending_polls: int = 0
    check_bytes: bool = False
    max_guesses: int = 0
    right_percent: int = 50


def _root(adapter: str | None) -> _Mark:
    return blake2b(b"base" if adapter is None else b"lora" + adapter.encode()).digest()


def _next_mark(mark: _Mark, token_id: int) -> _Mark:
    return blake2b(mark + token_id.to_bytes(8, "little"), digest_size=16).digest()


def _token_of(mark: _Mark, options: CertifyOptions, may_stop: bool = True) -> int:
    number = int.from_bytes(mark, "little")
    if may_stop and options.eos_token_ids and number % 100 < options.eos_percent:
        return options.eos_token_ids[0]
    token_id = (number >> 8) % options.vocab_size
    while token_id in options.eos_token_ids:
        token_id = (token_id + 1) % options.vocab_size
    return token_id


def certified_output(
    adapter: str | None,
    prompt_ids: Sequence[int],
    count: int,
    options: CertifyOptions,
    min_tokens: int = 0,
) -> list[int]:
    """The right output for a prompt: at most `count` tokens, ending after an end-of-sequence id.

    adapter: digest, or None for the base.
    """
    mark = _root(adapter)
    for token_id in prompt_ids:
        mark = _next_mark(mark, token_id)
    output: list[int] = []
    while len(output) < count and not (output and output[-1] in options.eos_token_ids):
        output.append(_token_of(mark, options, len(output) >= min_tokens))
        mark = _next_mark(mark, output[-1])
    return output


def next_allowed(mask: np.ndarray, token_id: int, vocab_size: int) -> int:
    """The first from `token_id` on, round the vocabulary, whose bit is set; some must be."""
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size])
    _check(bool(len(allowed)), "a mask of nothing")
    return int(allowed[np.searchsorted(allowed, token_id) % len(allowed)])


class FakeTicket:
    """A launched step; its results are known, but not before `collect`. held: whether constrained
    slices wait for their masks."""

    def __init__(self, plan: StepPlan, results: list[SliceResult]) -> None:
        self.plan = plan
        self.results = results
        self.held = any(piece.constrained for piece in plan.slices)

    def ready(self) -> bool:
        return not self.held


class _Row:
    def __init__(self, start: RowStart, limits: ExecutorLimits) -> None:
        self.start = start
        self.tokens = list(start.token_ids)
        short, size = limits.short_context, len(start.token_ids)
        self.kind = b"long" if short is not None and size > short else b""
        self.most_tokens = limits.max_context if self.kind or short is None else short
        self.pages: list[int] = []
        self.num_computed = -1  # unknown before the first slice
        self.adapter: str | None = None
        self.marks: list[_Mark] = []  # after each computed token


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ContractError(message)


class CertifyingExecutor:
    """Keeps in each KV place the mark of all tokens up to it, and reads them back in every step."""

    def __init__(
        self,
        limits: ExecutorLimits,
        options: CertifyOptions | None = None,
        host_arena: memoryview | None = None,
    ) -> None:
        self.limits = limits
        self.summary: tuple[str, ...] = ("no model: tokens are certificates",)
        self.options = options or CertifyOptions(limits.vocab_size, limits.eos_token_ids)
        self._witness: SlabWitness | None = None
        if self.options.check_bytes and host_arena is not None:
            self._witness = SlabWitness(host_arena)
        empty: list[_Mark | None] = [None] * limits.page_size
        self._kv = [list(empty) for _ in range(limits.num_pages)]
        self._holders: list[set[int]] = [set() for _ in range(limits.num_pages)]
        self._rows: dict[int, _Row] = {}
        self._slots: dict[int, tuple[str, frozenset[int]]] = {}
        # Until they are usable, and from then on until they are over; with polls left.
        self._copies: list[tuple[int, AdapterCopy]] = []
        self._ending: list[tuple[int, AdapterCopy]] = []
        self._in_flight: deque[FakeTicket] = deque()
        self._step = 0

    # ---- steps

    def launch(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> FakeTicket:
        _check(not any(t.held for t in self._in_flight), "a launch before the last one's masks")
        _check(plan.step > self._step, f"step {plan.step} after step {self._step}")
        _check(bool(plan.slices), "an empty plan")
        _check(plan.num_tokens <= self.limits.max_step_tokens, "over the token budget")
        self._step = plan.step
        for seq_row in plan.freed_rows:
            self._free(seq_row)
        for start in plan.new_rows:
            _check(0 <= start.seq_row < self.limits.max_rows, f"no row {start.seq_row}")
            _check(start.seq_row not in self._rows, f"row {start.seq_row} is in use")
            self._rows[start.seq_row] = _Row(start, self.limits)
        for grant in plan.grants:
            self._grant(grant)
        rows = [piece.seq_row for piece in plan.slices]
        _check(len(rows) == len(set(rows)), "two slices of one row")
        if meanwhile is not None:
            meanwhile()
        ticket = FakeTicket(plan, [self._compute(piece) for piece in plan.slices])
        self._in_flight.append(ticket)
        return ticket

    def mask_memory(self, count: int) -> np.ndarray:
        return np.zeros((count, mask_words(self.limits.vocab_size)), dtype=np.int32)

    def constrain(self, ticket: FakeTicket, masks: Masks) -> None:
        """A token that its mask forbids gives way to the next one allowed, round the vocabulary."""
        _check(ticket.held, "no draw of the step waits for masks")
        ticket.held = False
        for index, bits in zip(masks.slices, masks.bits, strict=True):
            piece, result = ticket.plan.slices[index], ticket.results[index]
            _check(piece.constrained and len(result.token_ids) == 1, "a mask of another slice")
            token_id = next_allowed(bits, result.token_ids[0], self.limits.vocab_size)
            self._rows[piece.seq_row].tokens[-1] = token_id
            logprobs = tuple(msgspec.structs.replace(x, token_id=token_id) for x in result.logprobs)
            ticket.results[index] = SliceResult((token_id,), logprobs, result.prompt_logprobs)

    def collect(self, ticket: FakeTicket) -> list[SliceResult]:
        _check(bool(self._in_flight) and self._in_flight[0] is ticket, "not the oldest step")
        _check(not ticket.held, "a step was collected before its masks came")
        if self.options.step_s:
            time.sleep(self.options.step_s)
        self._in_flight.popleft()
        return ticket.results

    def close(self) -> None:
        self._in_flight.clear()
        self._rows.clear()

    def _free(self, seq_row: int) -> None:
        row = self._rows.pop(seq_row, None)
        _check(row is not None, f"row {seq_row} freed twice")
        assert row is not None
        busy = {piece.seq_row for t in self._in_flight for piece in t.plan.slices}
        _check(seq_row not in busy, f"row {seq_row} freed under a step in flight")
        for page in row.pages:
            self._holders[page].discard(seq_row)

    def _grant(self, grant: PageGrant) -> None:
        row = self._rows.get(grant.seq_row)
        _check(row is not None, f"pages for no row {grant.seq_row}")
        assert row is not None
        _check(grant.first == len(row.pages), f"pages of row {grant.seq_row} leave a gap")
        for page in grant.pages:
            _check(0 <= page < self.limits.num_pages, f"no page {page}")
            _check(page not in row.pages, f"page {page} twice in row {grant.seq_row}")
            self._holders[page].add(grant.seq_row)
            row.pages.append(page)

    # ---- a slice

    def _compute(self, piece: SeqSlice) -> SliceResult:
        row = self._rows.get(piece.seq_row)
        _check(row is not None, f"a slice of no row {piece.seq_row}")
        assert row is not None
        end = piece.start + piece.num_new
        known = end if piece.kind == "prompt" else piece.start + 1
        self._check_inputs(row, piece, known, end)
        self._check_adapter(row, piece)
        self._read_prefix(row, piece.start)
        mark = row.marks[-1] if row.marks else _root(row.adapter)
        scored = []
        for position in range(piece.start, known):
            mark = _next_mark(mark, row.tokens[position])
            self._write(row, piece.seq_row, position, mark)
            row.marks.append(mark)
            if piece.prompt_logprobs and position + 1 < row.start.prompt_len:
                count = row.start.sampling.prompt_logprobs or 0
                scored.append(self._logprob(mark, row.tokens[position + 1], count))
        row.num_computed = known
        prompt_logprobs = scored if piece.prompt_logprobs else None
        if not piece.sample:
            return SliceResult(prompt_logprobs=prompt_logprobs)
        _check(known == len(row.tokens), "a sample before all inputs are computed")
        token_ids, logprobs = self._draw(row, piece, mark, end)
        return SliceResult(tuple(token_ids), tuple(logprobs), prompt_logprobs)

    def _draw(
        self, row: _Row, piece: SeqSlice, mark: _Mark, end: int
    ) -> tuple[list[int], list[TokenLogprob]]:
        """One token, and one more for each leading guess that is right. Wrong guesses leave wrong
        values in the KV places up to `end`."""
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        count = row.start.sampling.logprobs
        for position in range(row.num_computed, end + 1):
            index = len(row.tokens) - row.start.prompt_len
            token_id = _token_of(mark, self.options, index >= row.start.eos_suppressed_until)
            row.tokens.append(token_id)
            token_ids.append(token_id)
            if count is not None:
                logprobs.append(self._logprob(mark, token_id, count))
            if position == end:
                break
            if mark[1] % 100 >= self.options.right_percent:
                for place in range(position, end):
                    self._write(row, piece.seq_row, place, _root("a wrong guess"))
                break
            mark = _next_mark(mark, token_id)
            self._write(row, piece.seq_row, position, mark)
            row.marks.append(mark)
            row.num_computed = position + 1
        return token_ids, logprobs

    def _logprob(self, mark: _Mark, token_id: int, count: int) -> TokenLogprob:
        """Made up from the mark alone, so that it certifies as much as the token."""
        best = -(mark[0] + 1) / 256
        top = tuple(
            ((token_id + i) % self.limits.vocab_size, best - i)
            for i in range(min(count, self.limits.vocab_size))
        )
        return TokenLogprob(token_id, best, top, rank=1)

    def _check_inputs(self, row: _Row, piece: SeqSlice, known: int, end: int) -> None:
        """The slice computes known tokens up to `known`, and guesses from there to `end`."""
        most = 0 if piece.constrained or not piece.sample else self.limits.max_guesses
        _check(piece.num_new > 0, "an empty slice")
        _check(known <= len(row.tokens) and end - known <= most, "tokens that are not there")
        _check(end <= row.most_tokens, "tokens beyond the context, or of another kind")
        _check(len(row.pages) * self.limits.page_size >= end, "tokens without pages")
        if row.num_computed >= 0:
            _check(piece.start == row.num_computed, "a gap or an overlap in computed tokens")
        if piece.kind == "decode":
            sampled = len(row.tokens) > len(row.start.token_ids)
            _check(sampled and known == len(row.tokens), "no sample on the device to go on from")
            _check(not piece.token_ids, "other tokens than the row's")
        else:
            _check(piece.token_ids == row.tokens[piece.start : end], "other tokens than the row's")

    def _check_adapter(self, row: _Row, piece: SeqSlice) -> None:
        digest = None
        if piece.adapter_slot >= 0:
            _check(piece.adapter_slot in self._slots, f"slot {piece.adapter_slot} is not loaded")
            digest = self._slots[piece.adapter_slot][0]
        if row.num_computed < 0:
            row.adapter = digest
        _check(row.adapter == digest, f"row {piece.seq_row} changed its adapter")

    def _read_prefix(self, row: _Row, start: int) -> None:
        mark = row.marks[-1] if row.marks else _root(row.adapter)
        for token_id in row.tokens[len(row.marks) : start]:  # reused pages, before the first slice
            mark = _next_mark(mark, token_id)
            row.marks.append(mark)
        size = self.limits.page_size
        for i in range(-(-start // size)):
            places = range(i * size, min(start, (i + 1) * size))
            expected = [row.marks[place] + row.kind for place in places]
            found = self._kv[row.pages[i]][: len(expected)]
            _check(found == expected, f"page {row.pages[i]} holds another prefix")

    def _write(self, row: _Row, seq_row: int, position: int, mark: _Mark) -> None:
        page = row.pages[position // self.limits.page_size]
        _check(self._holders[page] == {seq_row}, f"page {page} is written while it is shared")
        self._kv[page][position % self.limits.page_size] = mark + row.kind

    def wait_idle(self) -> None:
        self._in_flight.clear()

    # ---- adapters

    def start_copy(self, copy: AdapterCopy) -> None:
        _check(0 <= copy.adapter_slot < self.limits.adapter_slots, f"no slot {copy.adapter_slot}")
        runs = copy.layout.runs
        _check(len(copy.host_extents) == len(copy.device_extents) == len(runs), "runs do not match")
        problem = self._other_bytes(copy)
        _check(problem is None, problem or "")
        target = _extents(copy)
        _check(len(target) == sum(runs), "the slab's runs overlap")
        _check(all(0 <= x < self.limits.arena_extents for x in target), "outside the arena")
        for _, other in self._copies:
            _check(other.adapter_slot != copy.adapter_slot, "two copies to one slot")
            _check(not _extents(other) & target, "two copies to one extent")
        read = {p.adapter_slot for t in self._in_flight for p in t.plan.slices}
        for slot, (digest, extents) in list(self._slots.items()):
            if slot == copy.adapter_slot or extents & target:
                _check(slot not in read, f"{digest} is overwritten under a step in flight")
                del self._slots[slot]
        self._copies.append((self.options.copy_polls, copy))

    def poll_copies(self) -> list[CopyNews]:
        news: list[CopyNews] = []
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
            _check(problem is None, f"of a copy that steps may have used: {problem}")
            news.append(CopyOver(copy.adapter_slot, copy.layout.digest))
        return news

    def _copy_problem(self, copy: AdapterCopy) -> str | None:
        """Why it cannot become usable."""
        return self._other_bytes(copy)

    def _other_bytes(self, copy: AdapterCopy) -> str | None:
        return None if self._witness is None else self._witness.problem(copy)


def _due(
    copies: list[tuple[int, AdapterCopy]],
) -> tuple[list[AdapterCopy], list[tuple[int, AdapterCopy]]]:
    """Those whose last poll this is, and the others."""
    due = [copy for polls, copy in copies if polls <= 1]
    return due, [(polls - 1, copy) for polls, copy in copies if polls > 1]


def _extents(copy: AdapterCopy) -> set[int]:
    return set(each(zip(copy.device_extents, copy.layout.runs, strict=True)))
