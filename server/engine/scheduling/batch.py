"""Plans a step: gives its sequences slices, rows and pages within a budget. The batch is kept while
the step is in flight. Pure.
"""

from collections import abc

from loraplex.server.constraints.wishes import MaskWish
from loraplex.server.engine.executor import ExecutorLimits
from loraplex.server.engine.plan import PageGrant, RowStart, SeqSlice, StateCopy, StepPlan
from loraplex.server.engine.scheduling.picture_loads import PictureLoads
from loraplex.server.engine.scheduling.prompt_shares import PromptShares, StepLoad
from loraplex.server.engine.scheduling.sequence import Sequence, State
from loraplex.server.engine.scheduling.states import SequenceStates

_SEED_MASK = 2**63 - 1  # devices keep seeds as signed 64-bit


class Batch:
    """Step that is being planned, slice by slice. sequences: parallel to plan.slices. budget:
    tokens that the step still has room for. load: known once it is planned.
    """

    load: StepLoad

    def __init__(
        self,
        step: int,
        limits: ExecutorLimits,
        freed_rows: list[int],
        num_running: int,
        prompts: PromptShares,
        states: SequenceStates,
        pictures: PictureLoads,
    ) -> None:
        """Begin an empty step. num_running: sequences for which the step keeps a token each before
        any draft, those that may be admitted included.
        """
        self.plan = StepPlan(step, [], [], [], freed_rows, [])
        self.sequences: list[Sequence] = []
        self.budget = self._max_tokens = limits.max_step_tokens
        self._page_size = limits.page_size
        self._short_context = limits.short_context
        self.drafts_left = max(0, min(self.budget, limits.max_decodes) - num_running)
        self._prompts, self._states, self._pictures = prompts, states, pictures
        self._is_causal, self._has_states = limits.is_causal, limits.has_states

    def room(self, sequence: Sequence) -> int:
        """Tokens of its prompt for which the step has room; 0 or less = none."""
        most = min(self.budget, self._prompts.most(sequence, self._max_tokens - self.budget))
        if most <= 0:
            return most
        if self._is_causal:
            return sequence.whole(most, self.budget)
        return sequence.num_wanted if sequence.num_wanted <= self.budget else 0

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
                pictures=self._pictures.placed(sequence),
                key=sequence.key,
            )
        )
        for number, group in enumerate(sequence.pages):
            if group.pages:
                self._grant(sequence, number, group.first, list(group.pages))
        if sequence.snapshot >= 0:
            self.plan.restores.append(StateCopy(sequence.seq_row, sequence.snapshot))
            sequence.snapshot = -1

    def grant(self, sequence: Sequence, pages: list[list[int]]) -> None:
        """Give the sequence further pages, and tell the step. pages: for each group, those that
        follow the ones it has; none = for no group.
        """
        for number, more in enumerate(pages):
            if more:
                group = sequence.pages[number]
                self._grant(sequence, number, group.end, more)
                group.pages += more

    def _grant(self, sequence: Sequence, group: int, first: int, pages: list[int]) -> None:
        self.plan.grants.append(PageGrant(sequence.seq_row, first, pages, group))

    def mask_wishes(self, slices: list[int]) -> list[MaskWish]:
        """Wishes for masks of the sequences at these places."""
        found = [(i, self.sequences[i], self.plan.slices[i].draft) for i in slices]
        return [
            MaskWish(i, s.constraint if s.state is State.RUNNING else None, draft)
            for i, s, draft in found
        ]

    def closed(self) -> list[Sequence]:
        """Sequences whose next token no mask allows."""
        return [
            sequence
            for piece, sequence in zip(self.plan.slices, self.sequences, strict=True)
            if piece.constrained and _is_closed(sequence)
        ]

    def add(self, sequence: Sequence, draft: abc.Sequence[int] = ()) -> None:
        """Compute as many of the tokens that the sequence wants as the budget and its pages
        allow. draft: of a decode slice, as long as `room_for_draft` at most."""
        start = sequence.num_computed
        num_new = most = min(self.budget, sequence.num_wanted, sequence.room(self._page_size))
        if most > 1:
            num_new = sequence.whole(max(1, min(most, self.room(sequence))), most)
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
                saves=[] if is_decode else self._states.saves_of(sequence, start, end),
                replays=start - sequence.num_in_state if self._has_states else 0,
                routed=sequence.request.routed_experts,
            )
        )
        self.sequences.append(sequence)
        self.budget -= num_new
        if not is_decode and num_new > 1:
            self._prompts.take(sequence, start, num_new)
        sequence.num_computed = start + num_new
        sequence.num_in_state = end  # a draft may be wrong
        sequence.in_flight += 1
        sequence.pending += sample

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


def _is_closed(sequence: Sequence) -> bool:
    constraint = sequence.constraint
    is_open = constraint is None or constraint.state == "open"
    return sequence.state is State.RUNNING and not (is_open or sequence.is_late)
