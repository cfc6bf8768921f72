"""A request inside the engine: its tokens, how many are computed, its row and pages. Pure."""

import enum
import sys
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest
from operator import attrgetter
from typing import NamedTuple

from loraplex.server.constraints.constraint import Constraint
from loraplex.server.engine.drafts.draft import Draft
from loraplex.server.engine.drafts.gain import Acceptance, Patience
from loraplex.server.engine.drafts.source import Drafts
from loraplex.server.engine.memory.pages import (
    GroupPages,
    PageHash,
    activated_hash,
    page_hash,
    picture_mark,
    root_hash,
)
from loraplex.server.protocol import (
    BACKGROUND_PRIORITY,
    GenerateRequest,
    RoutedExperts,
    RoutingForm,
    TokenLogprob,
    VectorParams,
)


class State(enum.Enum):
    NEEDS_GRAMMAR = "needs_grammar"  # its constraint is being made
    WAITING = "waiting"  # for a row and pages
    NEEDS_ADAPTER = "needs_adapter"  # its adapter is not on the device
    NEEDS_PICTURES = "needs_pictures"  # results of its pictures are not on the device
    NEEDS_PAGES = "needs_pages"  # pages of its prompt are on their way back to the device
    RUNNING = "running"  # holds a row, pages and its adapter's lease
    FINISHED = "finished"  # its terminal event is out; steps in flight may still use its pages


TRANSITIONS: dict[State, frozenset[State]] = {
    State.NEEDS_GRAMMAR: frozenset({State.WAITING, State.FINISHED}),
    State.WAITING: frozenset(
        {
            *(State.NEEDS_GRAMMAR, State.NEEDS_ADAPTER, State.NEEDS_PICTURES),
            *(State.NEEDS_PAGES, State.RUNNING, State.FINISHED),
        }
    ),
    State.NEEDS_ADAPTER: frozenset({State.WAITING, State.FINISHED}),
    State.NEEDS_PICTURES: frozenset({State.WAITING, State.FINISHED}),
    State.NEEDS_PAGES: frozenset({State.WAITING, State.FINISHED}),
    State.RUNNING: frozenset({State.WAITING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


class Precedence(NamedTuple):
    """Place of a sequence in the order of service. Sequences of lower `priority` go first, then
    those of earlier arrival.
    """

    priority: int
    arrival: int


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence in the scheduler. tokens: all known tokens, prompt first. limit: tokens
    that prompt and output can have.

    num_computed: tokens whose KV is computed, or being computed by steps in flight. It counts
    drafts in flight, so no further step is planned before their result is known. in_flight:
    launched steps, not yet collected, that contain this sequence. pending: slices in flight that
    draw; each gives at least one token. pages: of each group of layers. leaving: the sequence is
    preempted as soon as no step in flight uses what it holds. is_long: whether its keys and values
    are those of more tokens than `ExecutorLimits.short_context`. drafts: where its drafts come
    from, None = it has none. holds: no step contains it before the result of the last one is known,
    since a draft will follow. expected: tokens of its latest draft that are right by its chances.
    acceptance: how much of that came true. forced: the same of drafts that its grammar forces.
    patience: until it looks for a draft again. proposed: where it is constrained, what may follow
    the known tokens, None = that has not been looked at. constraint: which tokens it may draw, None
    = all. The constraint has taken every known token of the output. is_late: its slice in flight
    draws nothing, for want of a mask, and a later step computes its last known token again.

    num_in_state: tokens that the state of its row holds, with steps in flight; none of a draft.
    borders: tokens after which the state is to be saved, ascending. snapshot: which its next step
    restores; -1 = none. left_at: tokens after which a state was saved when it last gave up its row.
    beside: a running sequence, and how many first tokens both have.

    device_s: its part of the time of steps. copy_s: the time of its adapter's copy, if it waited
    for that as the first.
    """

    key: int
    request: GenerateRequest
    precedence: Precedence
    limit: int
    deadline: float | None
    state: State = State.WAITING
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    in_flight: int = 0
    pending: int = 0
    leaving: bool = False
    is_long: bool = False
    constraint: Constraint | None = None
    is_late: bool = False
    drafts: Drafts | None = None
    holds: bool = False
    expected: float = 0.0
    acceptance: Acceptance = field(default_factory=Acceptance)
    forced: Acceptance = field(default_factory=Acceptance)
    patience: Patience = field(default_factory=Patience)
    proposed: Draft | None = None
    seq_row: int = -1
    row_tokens: int = 0  # tokens known when the row was taken; later tokens were sampled on it
    adapter_slot: int = -1
    pages: list[GroupPages] = field(default_factory=list)
    num_published: int = 0
    hashes: list[PageHash] = field(default_factory=list)
    cached_tokens: int | None = None
    num_in_state: int = 0
    borders: list[int] = field(default_factory=list)
    snapshot: int = -1
    left_at: int = 0
    beside: "tuple[Sequence, int] | None" = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    started: bool = False  # its first event is out
    parked_at: float = 0.0  # when it last began to wait for its adapter
    load_s: float = 0.0  # seconds for which it waited for its adapter in all
    device_s: float = 0.0
    copy_s: float = 0.0
    prompt_len: int = 0
    last_input: int = 0  # tokens that are ever inputs; an output's last token never is
    pictures_end: int = 0  # the first token behind all pictures; 0 = there are none
    joins_pictures: bool = False  # the tokens of a picture are computed together
    routed: RoutedExperts | None = None  # that no event has reported
    routed_end: int = 0  # tokens whose experts were noted

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt_ids)
        self.last_input = max(self.limit - 1, self.prompt_len)
        self.tokens = [*self.request.prompt_ids, *self.request.accepted_ids]
        if self.request.pictures:
            last = self.request.pictures[-1]
            self.pictures_end = last.start + last.length

    def move(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"sequence {self.key}: {self.state.name} -> {state.name}")
        self.state = state

    @property
    def is_background(self) -> bool:
        """Whether nobody waits for the sequence's tokens."""
        return self.precedence.priority >= BACKGROUND_PRIORITY

    def takes_row_of_last(self, running: "list[Sequence]") -> bool:
        """Say whether the sequence may take the row of the last running one. The last one is a
        batch's, and this one is not. running: in order of precedence.
        """
        return bool(running) and running[-1].is_background and not self.is_background

    @property
    def can_run(self) -> bool:
        """Whether a step may compute some of its tokens."""
        return self.state is State.RUNNING and not self.leaving

    @property
    def awaits_result(self) -> bool:
        """Whether the sequence waits for the result of its last step before it has another one."""
        return (self.holds or self.is_late) and self.in_flight > 0

    def accept(self, token_ids: Iterable[int]) -> None:
        """The output goes on with these tokens."""
        self.tokens += token_ids

    def rewind(self, num_computed: int) -> None:
        """Keep only the first `num_computed` tokens as computed: the others' are not valid."""
        self.num_computed = min(self.num_computed, num_computed)

    @property
    def adapter(self) -> str | None:
        """The digest of the one that acts on some of its tokens."""
        return None if self.request.adapter_from is None else self.request.adapter

    @property
    def acting(self) -> str | None:
        """The name of the adapter's effect on the prompt's last tokens; None without one."""
        return None if self.request.adapter_from is None else self.request.acting

    @property
    def adapter_from(self) -> int:
        """The first token on which its adapter acts."""
        return self.request.adapter_from or 0

    @property
    def num_output(self) -> int:
        """Output tokens known; the next event's index."""
        return len(self.tokens) - self.prompt_len

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def num_wanted(self) -> int:
        """Tokens to compute now; at most 0 while a draft is in flight."""
        return min(len(self.tokens) + self.pending, self.last_input) - self.num_computed

    @property
    def remaining(self) -> int:
        """Upper bound of the samples still to come."""
        return self.limit - self.num_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        asked = self.request.sampling.prompt_logprobs is not None
        return asked and not self.started and not self.request.accepted_ids

    @property
    def computes_all(self) -> bool:
        """Whether every token of the prompt must be computed, also one whose keys and values are
        cached: the cache holds nothing that its result, or a mean over results, could be made of,
        and no experts.
        """
        vector = self.request.vector
        of_all = vector is not None and vector.pooling in ("mean", "all")
        return self.needs_prompt_logprobs or of_all or self.request.routed_experts

    def note_routed(self, start: int, chosen: bytes, form: RoutingForm) -> None:
        """Keep the experts of tokens from `start` on for the next event. Those of tokens that are
        computed again, as after a preemption, were noted before."""
        new = chosen[(self.routed_end - start) * form.nbytes :]
        if new:
            before = self.routed or RoutedExperts(form, self.routed_end, b"")
            self.routed = RoutedExperts(form, before.start, before.chosen + new)
            self.routed_end = self.routed.end

    def take_routed(self) -> RoutedExperts | None:
        """Take the experts that no event has reported."""
        routed, self.routed = self.routed, None
        return routed

    def vector_at(self, end: int) -> VectorParams | None:
        """The vector for which a slice that ends there is computed, if the slice gives no token."""
        vector = self.request.vector
        if vector is None or (vector.pooling == "last" and end < self.prompt_len):
            return None
        return vector

    def set_long(self, is_long: bool) -> None:
        """Set the kind, before the sequence takes a row. Long ones and others share no pages."""
        if is_long != self.is_long:
            self.is_long = is_long
            self.hashes.clear()

    def whole(self, count: int, budget: int) -> int:
        """How many of its next `count` tokens one slice can have; 0 = none. Of pictures that are
        joined it has all tokens or none, and more than `count` only of the first one. budget: the
        most that it may have.
        """
        start = self.num_computed
        for span in self.request.pictures if self.joins_pictures else ():
            end = span.start + span.length
            if span.start < start + count < end:
                rest = end - start if start >= span.start else span.start - start
                return rest if rest <= budget else 0
        return count

    @property
    def least_end(self) -> int:
        """Where the shortest slice ends that it can have now."""
        start = self.num_computed
        return start + self.whole(1, sys.maxsize)

    def slot_at(self, position: int) -> int:
        """The adapter's slot if it acts on the token there, else -1."""
        return self.adapter_slot if position >= self.adapter_from else -1

    def _parent(self, page_size: int, page: int) -> PageHash:
        """The parent of page number `page`; those before it are hashed."""
        begins, adapter = self.adapter_from, self.acting
        if page:
            parent = self.hashes[page - 1]
        else:
            parent = root_hash(self.request.salt, None if begins else adapter, self.is_long)
        if begins and adapter is not None and page == begins // page_size:
            return activated_hash(parent, adapter, begins % page_size)
        return parent

    def room(self, page_size: int) -> int:
        """Tokens beyond the computed ones that its pages in every group can take."""
        ends = [group.end for group in self.pages]
        return (min(ends) if ends else sys.maxsize) * page_size - self.num_computed

    def page_hash(self, page_size: int, page: int) -> PageHash:
        """The hash of page number `page`, which is full of known tokens. Hashes are kept."""
        hashes = self.hashes
        while len(hashes) <= page:
            begin = len(hashes) * page_size
            hashes.append(self._hash(page_size, len(hashes), begin + page_size))
        return hashes[page]

    def _hash(self, page_size: int, page: int, end: int) -> PageHash:
        """The hash of page number `page` up to the token `end`; pages before it are hashed."""
        begin, parent = page * page_size, self._parent(page_size, page)
        if not self.request.pictures:
            return page_hash(parent, self.tokens[begin:end])
        marks = (
            picture_mark(span.picture, span.grid, first - begin, first - span.start)
            for span in self.request.pictures
            if (first := max(begin, span.start)) < min(end, span.start + span.length)
        )
        return page_hash(parent, self.tokens[begin:end], b"".join(marks))

    def digest_at(self, page_size: int, count: int) -> PageHash:
        """The hash of its first `count` tokens, which are known, at least one."""
        page, rest = divmod(count, page_size)
        digest = self.page_hash(page_size, page - 1) if page else b""
        return self._hash(page_size, page, count) if rest else digest

    def _other_pictures(self, other: "Sequence") -> list[int]:
        """The start of the first picture that not both have; [] = both have the same."""
        for pair in zip_longest(self.request.pictures, other.request.pictures):
            if pair[0] != pair[1]:
                return [min(span.start for span in pair if span is not None)]
        return []

    def shared_with(self, other: "Sequence") -> int:
        """How many first tokens both have, as far as the same adapter acts on them and they stand
        for the same pictures."""
        limits = [min(len(self.tokens), len(other.tokens)), *self._other_pictures(other)]
        if (self.acting, self.adapter_from) != (other.acting, other.adapter_from):
            limits += [each.adapter_from for each in (self, other) if each.acting is not None]
        pairs = zip(self.tokens[: min(limits)], other.tokens, strict=False)
        return next((i for i, (mine, its) in enumerate(pairs) if mine != its), min(limits))


BY_PRECEDENCE = attrgetter("precedence")  # the key that lists of sequences are sorted by


def discard(sequences: list[Sequence], sequence: Sequence) -> None:
    """Remove `sequence` if it is there. sequences: in order of precedence."""
    at = bisect_left(sequences, sequence.precedence, key=BY_PRECEDENCE)
    if at < len(sequences) and sequences[at] is sequence:
        del sequences[at]


def adapters_before(precedence: Precedence, sequences: Iterable[Sequence]) -> set[str]:
    """Adapters of the sequences before `precedence`. sequences: in order of precedence."""
    earlier = takewhile(lambda s: s.precedence < precedence, sequences)
    return {s.adapter for s in earlier if s.adapter is not None}
