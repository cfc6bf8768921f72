"""A step that is being planned, and then in flight: its plan and its sequences. Pure."""

import math
from collections import abc

from server.constraints.wishes import MaskWish
from server.engine.executor import ExecutorLimits
from server.engine.plan import PageGrant, RowStart, SeqSlice, StepPlan
from server.engine.scheduling.sequence import Sequence, State

_SEED_MASK = 2**63 - 1  # devices keep seeds as signed 64-bit


class Batch:
    """sequences: parallel to plan.slices. budget: tokens that the step still has room for."""

    def __init__(
        self, step: int, limits: ExecutorLimits, freed_rows: list[int], num_running: int
    ) -> None:
        """num_running: sequences for which the step keeps a token each before any draft, those that
        may be admitted included."""
        self.plan = StepPlan(step, [], [], [], freed_rows, [])
        self.sequences: list[Sequence] = []
        self.budget = limits.max_step_tokens
        self._page_size = limits.page_size
        self._short_context = limits.short_context
        self.drafts_left = max(0, min(self.budget, limits.max_decodes) - num_running)
        self._background = self.budget
        self._may_give_way = False
        self.gave_way = False

    def share_with_live(self, share: float, gave_way: bool, *queues: list[Sequence]) -> None:
        """While others run or wait, prompts of batches have so much of the budget, and nothing in
        a step with a prompt of others: a first token waits for no batch's. gave_way: they had
        nothing in the step before, so they have their share now. queues: in order of precedence."""
        if any(queue and not queue[0].is_background for queue in queues):
            self._background = math.ceil(share * self.budget)
            self._may_give_way = not gave_way

    def has_budget(self, sequence: Sequence) -> bool:
        """For some tokens of its prompt."""
        return self.budget > 0 and (not sequence.is_background or self._background > 0)

    def start(self, sequence: Sequence) -> None:
        """The sequence has just been given its row and pages."""
        request = sequence.request
        sequence.row_tokens = len(sequence.tokens)
        self.plan.new_rows.append(
            RowStart(
                seq_row=sequence.seq_row,
                token_ids=list(sequence.tokens),
                prompt_len=sequence.prompt_len,
                sampling=request.sampling,
                seed=request.seed & _SEED_MASK,
                choice=request.choice,
                eos_suppressed_until=request.sampling.min_tokens,
                vocab_size=request.vocab_size,
            )
        )
        for number, group in enumerate(sequence.pages):
            if group.pages:
                self._grant(sequence, number, group.first, list(group.pages))

    def grant(self, sequence: Sequence, pages: list[list[int]]) -> None:
        """pages: for each group, those that follow the ones it has; none = for no group."""
        for number, more in enumerate(pages):
            if more:
                group = sequence.pages[number]
                self._grant(sequence, number, group.end, more)
                group.pages += more

    def _grant(self, sequence: Sequence, group: int, first: int, pages: list[int]) -> None:
        self.plan.grants.append(PageGrant(sequence.seq_row, first, pages, group))

    def mask_wishes(self, slices: list[int]) -> list[MaskWish]:
        """Of the sequences at these places."""
        found = [(i, self.sequences[i], self.plan.slices[i].draft) for i in slices]
        return [
            MaskWish(i, s.constraint if s.state is State.RUNNING else None, draft)
            for i, s, draft in found
        ]

    def add(self, sequence: Sequence, draft: abc.Sequence[int] = ()) -> None:
        """Compute as many of the tokens that the sequence wants as the budget and its pages
        allow. draft: of a decode slice, as long as `room_for_draft` at most."""
        start = sequence.num_computed
        num_new = min(self.budget, sequence.num_wanted, sequence.room(self._page_size))
        if sequence.is_background and num_new > 1:
            num_new = max(1, min(num_new, self._background))
        if start < sequence.adapter_from:  # a slice has one adapter
            num_new = min(num_new, sequence.adapter_from - start)
        end = start + num_new
        sample = end == sequence.num_tokens and end < sequence.limit
        # A token that was sampled on this row is on the device, and may not be known here yet.
        is_decode = start >= sequence.row_tokens
        num_new += len(draft)
        self.drafts_left -= len(draft)
        self.plan.slices.append(
            SeqSlice(
                kind="decode" if is_decode else "prompt",
                seq_row=sequence.seq_row,
                start=start,
                num_new=num_new,
                token_ids=list(draft) if is_decode else sequence.tokens[start:end],
                adapter_slot=sequence.slot_at(start),
                sample=sample,
                prompt_logprobs=start < sequence.prompt_len - 1 and sequence.needs_prompt_logprobs,
                constrained=sample and sequence.constraint is not None,
                vector=sequence.vector_at(end),
            )
        )
        self.sequences.append(sequence)
        self.budget -= num_new
        if not is_decode:
            self._use_background(num_new, sequence.is_background)
        sequence.num_computed = start + num_new
        sequence.in_flight += 1
        sequence.pending += sample

    def _use_background(self, num_new: int, is_background: bool) -> None:
        """Of a prompt's tokens."""
        self._background = max(0, self._background - num_new)
        if self._may_give_way and not is_background:
            self._background, self.gave_way = 0, True

    def room_for_draft(self, sequence: Sequence) -> int:
        """Tokens of a draft for a decode slice. They fit in the pages that the sequence has, and
        cannot go beyond its last token, nor make it long."""
        is_decode = sequence.num_computed >= sequence.row_tokens
        if not (self.drafts_left and is_decode):
            return 0
        room = sequence.room(self._page_size) - 1
        if self._short_context is not None and not sequence.is_long:
            room = min(room, self._short_context - sequence.num_computed - 1)
        return max(0, min(self.drafts_left, room, sequence.remaining - 1))
