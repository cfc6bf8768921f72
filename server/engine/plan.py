"""What one step computes, as plain ints: the scheduler decides, every rank carries out. Pure."""

import msgspec

from server.protocol import SamplingParams, TokenLogprob


class RowStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes a static row of the executor (again, after a preemption).

    token_ids: all tokens known so far, prompt first. prompt_len: how many of them are the prompt.
    The next sample has index `len(token_ids) - prompt_len` in the output.
    """

    seq_row: int
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    seed: int
    choice: int
    eos_suppressed_until: int  # output index below which end-of-sequence and stop ids are masked


class PageGrant(msgspec.Struct, frozen=True, array_like=True):
    """Pages appended to a row's page table from position `first` on."""

    seq_row: int
    first: int
    pages: list[int]


class SeqSlice(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `start .. start + num_new` of one sequence, computed in this step.

    token_ids: the inputs; empty when the one input is the row's last sample, already on the device.
    adapter_slot: -1 = the base alone. sample: draw a token after the last of them.
    prompt_logprobs: return logprobs of the prompt tokens that these positions predict.
    constrained: the draw waits for a mask (`Executor.constrain`); only where `sample` is true.
    """

    seq_row: int
    start: int
    num_new: int
    token_ids: list[int]
    adapter_slot: int
    sample: bool
    prompt_logprobs: bool = False
    constrained: bool = False


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """Order of effects: freed_rows, new_rows, grants, then the slices as one batch."""

    step: int
    slices: list[SeqSlice]
    new_rows: list[RowStart]
    grants: list[PageGrant]
    freed_rows: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(s.num_new for s in self.slices)

    @property
    def num_adapters(self) -> int:
        """Distinct ones."""
        return len({s.adapter_slot for s in self.slices if s.adapter_slot >= 0})

    @property
    def num_adapter_tokens(self) -> int:
        return sum(s.num_new for s in self.slices if s.adapter_slot >= 0)


class SliceResult(msgspec.Struct, frozen=True, array_like=True):
    """For the slice at the same place in the plan.

    token_id: the sample, or None where none was asked for. failed: non-finite logits; the sequence
    ends in an error and its neighbours are untouched.
    prompt_logprobs: for prompt positions start+1 .. (position 0 has none and is not returned).
    """

    token_id: int | None
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    failed: bool = False
