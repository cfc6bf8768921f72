"""A causal convolution by channel, whose earlier inputs lie in rows' states; and slices of a batch,
as the kernels of states take them."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.states.operands import Convolution

_CHANNELS = 512
_TOKENS = 8


class Singles(NamedTuple):
    """Slices of one token each: the batch's first ones. rows: int32 `[slices]`; positions: int64
    `[slices]`, of the tokens in their sequences."""

    rows: torch.Tensor
    positions: torch.Tensor

    @property
    def num_slices(self) -> int:
        return len(self.rows)


class Walks(NamedTuple):
    """Slices of one token each: the batch's first ones. Neighbours of one row are a walk: a token
    and, behind it, its draft, which leaves no trace in the state. rows, positions: as of `Singles`.
    lengths: int32 `[slices]`, tokens of the walk that a slice begins; 0 = it begins none. replays:
    int32 `[slices]`, tokens of the row's last draft that the state takes before. depth: tokens of
    a draft at most, and of replays.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor
    replays: torch.Tensor
    depth: int

    @property
    def num_slices(self) -> int:
        return len(self.rows)


class Runs(NamedTuple):
    """Slices of several tokens. table: int32 `[4, slices]`: row, first token in the batch, tokens,
    and position of the first. longest: the most tokens of one."""

    table: torch.Tensor
    longest: int

    @property
    def num_slices(self) -> int:
        return int(self.table.shape[1])


Slices = Singles | Walks | Runs


def walked(slices: Singles | Walks) -> tuple[tuple[torch.Tensor, ...], int]:
    """The tensors of `Walks` as kernels take them, and its depth. Singles are walks of depth 0,
    whose last two tensors nobody reads."""
    if isinstance(slices, Walks):
        return slices[:4], slices.depth
    return (*slices, slices.rows, slices.rows), 0


@triton.jit
def slice_of(table_ptr: tl.tensor, count: tl.tensor) -> Any:
    """Row, first token, number of tokens and position of the program's slice. table: of `Runs`."""
    place = table_ptr + tl.program_id(0)
    row, begin = tl.load(place).to(tl.int64), tl.load(place + count).to(tl.int64)
    return row, begin, tl.load(place + 2 * count), tl.load(place + 3 * count)


def causal_conv(
    x: torch.Tensor,
    conv: Convolution,
    state: torch.Tensor,
    slices: Slices,
    out: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> None:
    """Convolve tokens of slices, and leave their latest inputs in the state: `out = silu(bias + sum
    over j of weight[:, j] * input[token - kernel + 1 + j])`, in float32. With factors `out = factor
    * (bias + sum)`, and inputs are products of two features; each is rounded to x's dtype.

    x: `[tokens, features]`, contiguous. state: `[rows + 1, kernel - 1, channels]`, oldest input
    first; zeros are read for what comes before a sequence, nothing of its last row. out: `[tokens,
    channels]`, written where a slice has a token. Raises ValueError on a mismatch.

    Of walks a row's replays are convolved, too: `depth` lines of out for each slice, behind those
    of tokens. kept: their inputs, `[rows * depth, features]`.
    """
    channels, kernel = conv.weight.shape
    _check(x, conv, state, out)
    if not slices.num_slices:
        return
    count, blocks = slices.num_slices, triton.cdiv(channels, _CHANNELS)
    sizes = {
        "SCRATCH": len(state) - 1,
        "FEATURES": x.shape[1],
        "CHANNELS": channels,
        "KERNEL": kernel,
        "FACTORS": conv.factors is not None,
        "BLOCK": _CHANNELS,
    }
    factors = conv.columns if conv.factors is None else conv.factors
    bias = conv.weight if conv.bias is None else conv.bias
    past = x if kept is None else kept
    inputs, given = (x, conv.columns, factors), (conv.weight, bias, state, past)
    rule = {**sizes, "BIAS": conv.bias is not None, "num_warps": 4}
    if not isinstance(slices, Runs):
        of_slices, depth = walked(slices)
        context = (*inputs, *given, *of_slices, count, len(x), out)
        kind: dict[str, Any] = {"SINGLE": True, "TOKENS": 1, "DEPTH": depth}
        _conv_kernel[(count, 1, blocks)](*context, **rule, **kind)
        return
    table, tiles = slices.table, triton.cdiv(slices.longest, _TOKENS)
    grid = (count, tiles, blocks)
    context = (*inputs, *given, *[table] * 4, count, len(x), out)
    _conv_kernel[grid](*context, **rule, SINGLE=False, TOKENS=_TOKENS, DEPTH=0)
    _keep_kernel[(count, blocks)](*inputs, state, table, count, **sizes, num_warps=4)


def _check(x: torch.Tensor, conv: Convolution, state: torch.Tensor, out: torch.Tensor) -> None:
    channels, kernel = conv.weight.shape
    given = (each for each in (x, *conv, state, out) if each is not None)
    if not all(each.is_contiguous() for each in given):
        raise ValueError("inputs, weights, state and output must be contiguous")
    if conv.columns.dtype != torch.int32 or len(conv.columns) != channels:
        raise ValueError(f"columns must be int32 [{channels}]")
    if conv.factors is not None and (
        conv.factors.dtype != torch.int32 or conv.factors.shape != (2, channels)
    ):
        raise ValueError(f"factors must be int32 [2, {channels}]")
    if kernel < 2 or state.shape[1:] != (kernel - 1, channels):
        raise ValueError(f"the state must be [rows, {kernel - 1}, {channels}]")
    if len(out) < len(x) or out.shape[1] != channels:
        raise ValueError(f"the output must be [{len(x)}, {channels}]")


@triton.jit
def _input(
    x_ptr: tl.tensor, column: tl.tensor, factor: tl.tensor, inside: tl.tensor, FACTORS: tl.constexpr
) -> Any:
    """Inputs of the convolution at tokens, whose features begin at `x_ptr`."""
    found = tl.load(x_ptr + column, mask=inside, other=0.0)
    if FACTORS:
        other = tl.load(x_ptr + factor, mask=inside, other=0.0)
        found = (found.to(tl.float32) * other.to(tl.float32)).to(x_ptr.dtype.element_ty)
    return found


@triton.jit
def _finished(
    found: tl.tensor,
    bias_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    channel: tl.tensor,
    own_ptr: tl.tensor,
    is_new: tl.tensor,
    DTYPE: tl.constexpr,
    CHANNELS: tl.constexpr,
    FACTORS: tl.constexpr,
    BIAS: tl.constexpr,
) -> Any:
    """Sums of tokens, whose features begin at `own_ptr`, with bias, and through SiLU or with their
    factor."""
    if BIAS:
        bias = tl.load(bias_ptr + channel, mask=channel < CHANNELS, other=0.0)
        found += bias.to(tl.float32)[None, :]
    if FACTORS:
        place = factors_ptr + CHANNELS + channel
        behind = tl.load(place, mask=channel < CHANNELS, other=0)[None, :]
        out = tl.load(own_ptr + behind, mask=is_new, other=0.0).to(tl.float32)
        out *= found.to(DTYPE).to(tl.float32)
    else:
        out = found / (1.0 + tl.exp(-found))
    return out


@triton.jit(do_not_specialize=["count", "total"])
def _conv_kernel(
    x_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    past_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    replays_ptr: tl.tensor,
    count: tl.tensor,
    total: tl.tensor,
    out_ptr: tl.tensor,
    SCRATCH: tl.constexpr,
    FEATURES: tl.constexpr,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    FACTORS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    SINGLE: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """A single token's program also moves the state on. For others that would be too early: the
    programs of a slice's first tokens read the state. A walk's program comes last to the token
    behind which the state stays, since the others read what lay there before."""
    replays, steps = 0, 1
    if SINGLE:
        begin, tokens = tl.program_id(0).to(tl.int64), 1
        row = tl.load(rows_ptr + begin).to(tl.int64)
        position = tl.load(positions_ptr + begin).to(tl.int32)
        if DEPTH > 0:
            replays = tl.load(replays_ptr + begin)
            tokens = tl.load(lengths_ptr + begin)
            steps = tl.where(tokens > 0, tokens + replays, 0)
            position -= replays
    else:
        row, begin, tokens, position = slice_of(rows_ptr, count)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    has_channel = channel < CHANNELS
    column = tl.load(columns_ptr + channel, mask=has_channel, other=0)[None, :]
    factor = tl.load(factors_ptr + channel, mask=has_channel, other=0)[None, :]
    kept_ptr = state_ptr + row * ((KERNEL - 1) * CHANNELS) + channel[None, :]
    is_real = row != SCRATCH
    for step in range(steps):
        token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
        if DEPTH > 0:
            token += (step + replays + 1) % steps
        inside = (token < tokens + replays)[:, None] & has_channel[None, :]
        found = tl.zeros((TOKENS, BLOCK), dtype=tl.float32)
        for tap in tl.static_range(KERNEL):
            at = token - (KERNEL - 1 - tap)
            here = inside & (at >= replays)[:, None] & is_real
            before = inside & ((at < 0) & (position + at >= 0))[:, None] & is_real
            new_ptr = x_ptr + (begin + at - replays)[:, None] * FEATURES
            new = _input(new_ptr, column, factor, here, FACTORS)
            old_ptr = kept_ptr + (KERNEL - 1 + at)[:, None] * CHANNELS
            value = tl.where(here, new, tl.load(old_ptr, mask=before, other=0.0))
            if DEPTH > 0:
                again = inside & ((at >= 0) & (at < replays))[:, None]
                again_ptr = past_ptr + (row * DEPTH + at)[:, None] * FEATURES
                value = tl.where(again, _input(again_ptr, column, factor, again, FACTORS), value)
            if SINGLE and tap > 0:
                moves = inside & is_real & (step == steps - 1)
                tl.store(kept_ptr + (tap - 1) * CHANNELS, value, mask=moves)
            weight = tl.load(weight_ptr + channel * KERNEL + tap, mask=has_channel, other=0.0)
            found += weight.to(tl.float32)[None, :] * value.to(tl.float32)
        line = begin + token - replays
        is_new = inside & (token >= replays)[:, None] & is_real
        own_ptr = x_ptr + line[:, None] * FEATURES
        given = (bias_ptr, factors_ptr, channel, own_ptr, is_new)
        out = _finished(found, *given, out_ptr.dtype.element_ty, CHANNELS, FACTORS, BIAS)
        if DEPTH > 0:
            line = tl.where(token < replays, total + begin * DEPTH + token, line)
        place = out_ptr + line[:, None] * CHANNELS + channel[None, :]
        tl.store(place, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _keep_kernel(
    x_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    state_ptr: tl.tensor,
    table_ptr: tl.tensor,
    count: tl.tensor,
    SCRATCH: tl.constexpr,
    FEATURES: tl.constexpr,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    FACTORS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Leave a slice's latest inputs in its row's state. A place that is written is none that is
    still to be read: what moves comes from behind."""
    row, begin, tokens, position = slice_of(table_ptr, count)
    if row == SCRATCH:
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    column = tl.load(columns_ptr + channel, mask=inside, other=0)
    factor = tl.load(factors_ptr + channel, mask=inside, other=0)
    kept_ptr = state_ptr + row * ((KERNEL - 1) * CHANNELS) + channel
    for place in tl.static_range(KERNEL - 1):
        at = tokens - (KERNEL - 1) + place
        new_ptr = x_ptr + (begin + at) * FEATURES
        new = _input(new_ptr, column, factor, inside & (at >= 0), FACTORS)
        old_ptr = kept_ptr + (KERNEL - 1 + at) * CHANNELS
        old = tl.load(old_ptr, mask=inside & (at < 0) & (position + at >= 0), other=0.0)
        tl.store(kept_ptr + place * CHANNELS, tl.where(at >= 0, new, old), mask=inside)
