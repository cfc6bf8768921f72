"""A step in the making, and then in flight: the plan, and whose slices it holds. Pure."""

from server.constraints.constraint import Constraint
from server.engine.plan import PageGrant, RowStart, SeqSlice, StepPlan
from server.engine.scheduling.sequence import Sequence, State

_SEED_MASK = 2**63 - 1  # devices keep seeds as signed 64-bit


class Batch:
    """sequences: parallel to plan.slices. budget: tokens that the step still has room for."""

    def __init__(self, step: int, budget: int, freed_rows: list[int]) -> None:
        self.plan = StepPlan(step, [], [], [], freed_rows)
        self.sequences: list[Sequence] = []
        self.budget = budget

    def start(self, sequence: Sequence) -> None:
        """It has just been given its row and pages."""
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
            )
        )
        self.plan.grants.append(PageGrant(sequence.seq_row, 0, list(sequence.pages)))

    def grant(self, sequence: Sequence, pages: list[int]) -> None:
        self.plan.grants.append(PageGrant(sequence.seq_row, len(sequence.pages), pages))
        sequence.pages += pages

    def constraints(self, slices: list[int]) -> list[Constraint | None]:
        """Of the sequences at these places; None = it has ended."""
        sequences = [self.sequences[i] for i in slices]
        return [s.constraint if s.state is State.RUNNING else None for s in sequences]

    def add(self, sequence: Sequence) -> None:
        """As many of the tokens it wants as the budget allows."""
        start = sequence.num_computed
        num_new = min(self.budget, sequence.num_wanted)
        end = start + num_new
        sample = end == sequence.num_tokens and end < sequence.limit
        # What was sampled on this row is on the device, and perhaps not known here yet.
        on_device = start >= sequence.row_tokens
        self.plan.slices.append(
            SeqSlice(
                seq_row=sequence.seq_row,
                start=start,
                num_new=num_new,
                token_ids=[] if on_device else sequence.tokens[start:end],
                adapter_slot=sequence.adapter_slot,
                sample=sample,
                prompt_logprobs=sequence.needs_prompt_logprobs and start < sequence.prompt_len - 1,
                constrained=sample and sequence.constraint is not None,
            )
        )
        self.sequences.append(sequence)
        self.budget -= num_new
        sequence.num_computed = end
        sequence.in_flight += 1
        sequence.pending += sample
