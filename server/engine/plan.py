"""One step as plain ints: the scheduler decides, every rank carries out. Pure."""

from typing import Literal

import msgspec

from loraplex.server.protocol import Grid, SamplingParams, TokenLogprob, VectorParams

SliceKind = Literal["prompt", "decode"]


class PlacedPicture(msgspec.Struct, frozen=True, array_like=True):
    """A picture of a row. start: its first placeholder. grid: as of `PictureSpan`. blocks: of the
    cache of results (`PictureLimits`), which hold its own in order. They hold them until the last
    step that computes one of its placeholders is launched.
    """

    start: int
    grid: Grid
    blocks: tuple[int, ...]


class RowStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes a static row of the executor (again, after a preemption).

    token_ids: all tokens known so far, prompt first. prompt_len: how many of them are the prompt.
    The next sample has index `len(token_ids) - prompt_len` in the output. vocab_size: as in
    `GenerateRequest`. pictures: in the order of their tokens. key: the worker's number of the
    sequence.
    """

    seq_row: int
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    seed: int
    choice: int
    eos_suppressed_until: int  # output index below which end-of-sequence and stop ids are masked
    vocab_size: int | None = None
    pictures: tuple[PlacedPicture, ...] = ()
    key: int = -1


class PageGrant(msgspec.Struct, frozen=True, array_like=True):
    """Pages of one group of layers (`ExecutorLimits.page_windows`), appended to a row's page table
    from position `first` on."""

    seq_row: int
    first: int
    pages: list[int]
    group: int = 0


class ScaledSlot(msgspec.Struct, frozen=True, array_like=True):
    """Order to make a scaled copy of an adapter. From this step on a slot of the device table has
    the weights of another one, of an adapter of LoRA alone, with all scales multiplied by
    `scale`.
    """

    adapter_slot: int
    source_slot: int
    scale: float


class StateCopy(msgspec.Struct, frozen=True, array_like=True):
    """A copy of a row's states into a snapshot, or of a snapshot into a row's states."""

    seq_row: int
    snapshot: int


class StateSave(msgspec.Struct, frozen=True, array_like=True):
    """A copy into a snapshot of a slice's states as they are after the sequence's first `position`
    tokens, the last of which is one of the slice."""

    position: int
    snapshot: int


class SeqSlice(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `start .. start + num_new` of one sequence, computed in this step.

    kind: a `prompt` slice computes tokens that the scheduler knows; it can be one token long. A
    `decode` slice computes the row's last sample, which is on the device, and behind it its draft.
    token_ids: the tokens of a prompt slice; of a decode slice its draft, which may be empty.
    adapter_slot: -1 = the base alone. sample: draw a token after the last known token. A decode
    slice also draws a token after each token of its draft that is right: that was drawn.
    prompt_logprobs: return logprobs of the prompt tokens that these positions predict.
    constrained: draws wait for masks (`Executor.constrain`). Only a slice with `sample` can be
    constrained.
    vector: what the slice is computed for: the last slice of such a prompt, and every slice of one
    whose mean is wanted. Such a slice draws nothing.
    saves: of a prompt slice, in the order of their positions. replays: tokens before `start` that
    the row's state has not taken: those of its last draft that were right. It takes them first.
    routed: return the experts that its tokens go to.
    """

    kind: SliceKind
    seq_row: int
    start: int
    num_new: int
    token_ids: list[int]
    adapter_slot: int
    sample: bool
    prompt_logprobs: bool = False
    constrained: bool = False
    vector: VectorParams | None = None
    saves: list[StateSave] = []
    replays: int = 0
    routed: bool = False

    @property
    def draft(self) -> list[int]:
        return self.token_ids if self.kind == "decode" else []

    @property
    def is_single(self) -> bool:
        """Whether the slice is one token. The end of a prompt can be, as decode slices are."""
        return self.num_new == 1


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag="st"):
    """Order of effects: saves of rows that leave, one by one; freed_rows, scaled_slots, new_rows,
    grants, restores, then the slices together."""

    step: int
    slices: list[SeqSlice]
    new_rows: list[RowStart]
    grants: list[PageGrant]
    freed_rows: list[int]
    scaled_slots: list[ScaledSlot] = []
    saves: list[StateCopy] = []
    restores: list[StateCopy] = []

    @property
    def num_tokens(self) -> int:
        return sum(s.num_new for s in self.slices)

    @property
    def num_adapters(self) -> int:
        """Number of distinct adapters in the step."""
        return len({s.adapter_slot for s in self.slices if s.adapter_slot >= 0})

    @property
    def num_adapter_tokens(self) -> int:
        return sum(s.num_new for s in self.slices if s.adapter_slot >= 0)


class SliceResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of the slice at the same place in the plan.

    token_ids: what was drawn, in order; empty where no sample was asked for. A prompt slice gives
    one token. A decode slice gives one token and one more for each leading token of its draft that
    was right: at most `num_new`. Keys and values of the draft's other tokens are invalid.
    logprobs: parallel to token_ids, or empty where the request asks for none.
    prompt_logprobs: for prompt positions start+1 .. (position 0 has none and is not returned).
    vector: of the slice that ends a prompt whose vector is wanted: little-endian float32.
    failed: numbers that are not finite; the sequence ends in an error and its neighbours are
    untouched.
    routed: experts of the slice's tokens, but of a draft only those that were right, as of
    `RoutingForm`; None = they were not asked for.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: list[TokenLogprob] | None = None
    failed: bool = False
    vector: bytes | None = None
    routed: bytes | None = None
