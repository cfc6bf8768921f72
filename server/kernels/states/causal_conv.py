"""A causal convolution by channel, whose earlier inputs lie in rows' states."""

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.states.slices import Singles, Slices, slice_of

_CHANNELS = 512
_TOKENS = 8


def causal_conv(
    x: torch.Tensor,
    columns: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    slices: Slices,
    out: torch.Tensor,
) -> None:
    """Convolve tokens of slices, and leave their latest inputs in the state: `out = silu(sum over j
    of weight[:, j] * input[token - kernel + 1 + j])`, in float32.

    x: `[tokens, features]`, contiguous. columns: int32 `[channels]`, which features are convolved.
    weight: `[channels, kernel]`. state: `[rows + 1, kernel - 1, channels]`, oldest input first;
    zeros are read for what comes before a sequence, nothing of its last row. out: `[tokens,
    channels]`, written where a slice has a token. Raises ValueError on a mismatch.
    """
    channels, kernel = weight.shape
    _check(x, columns, weight, state, out)
    if not slices.num_slices:
        return
    count, blocks = slices.num_slices, triton.cdiv(channels, _CHANNELS)
    sizes = {
        "SCRATCH": len(state) - 1,
        "FEATURES": x.shape[1],
        "CHANNELS": channels,
        "KERNEL": kernel,
        "BLOCK": _CHANNELS,
    }
    given = (x, columns, weight, state)
    if isinstance(slices, Singles):
        rule = {"SINGLE": True, "TOKENS": 1}
        _conv_kernel[(count, 1, blocks)](*given, *slices, count, out, **sizes, **rule, num_warps=4)
        return
    table, tiles = slices.table, triton.cdiv(slices.longest, _TOKENS)
    rule = {"SINGLE": False, "TOKENS": _TOKENS}
    grid = (count, tiles, blocks)
    _conv_kernel[grid](*given, table, table, count, out, **sizes, **rule, num_warps=4)
    _keep_kernel[(count, blocks)](x, columns, state, table, count, **sizes, num_warps=4)


def _check(
    x: torch.Tensor,
    columns: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
) -> None:
    channels, kernel = weight.shape
    if not all(each.is_contiguous() for each in (x, columns, weight, state, out)):
        raise ValueError("inputs, weights, state and output must be contiguous")
    if columns.dtype != torch.int32 or len(columns) != channels:
        raise ValueError(f"columns must be int32 [{channels}]")
    if kernel < 2 or state.shape[1:] != (kernel - 1, channels):
        raise ValueError(f"the state must be [rows, {kernel - 1}, {channels}]")
    if out.shape != (len(x), channels):
        raise ValueError(f"the output must be [{len(x)}, {channels}]")


@triton.jit(do_not_specialize=["count"])
def _conv_kernel(
    x_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    state_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    count: tl.tensor,
    out_ptr: tl.tensor,
    SCRATCH: tl.constexpr,
    FEATURES: tl.constexpr,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """A single token's program also moves the state on. For others that would be too early: the
    programs of a slice's first tokens read the state."""
    if SINGLE:
        begin, tokens = tl.program_id(0).to(tl.int64), 1
        row = tl.load(rows_ptr + begin).to(tl.int64)
        position = tl.load(positions_ptr + begin).to(tl.int32)
    else:
        row, begin, tokens, position = slice_of(rows_ptr, count)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (channel < CHANNELS)[None, :]
    column = tl.load(columns_ptr + channel, mask=channel < CHANNELS, other=0)
    kept_ptr = state_ptr + row * ((KERNEL - 1) * CHANNELS) + channel[None, :]
    is_real = row != SCRATCH
    found = tl.zeros((TOKENS, BLOCK), dtype=tl.float32)
    for tap in tl.static_range(KERNEL):
        at = token - (KERNEL - 1 - tap)
        here = inside & (at >= 0)[:, None] & is_real
        before = inside & ((at < 0) & (position + at >= 0))[:, None] & is_real
        new_ptr = x_ptr + (begin + at)[:, None] * FEATURES + column[None, :]
        new = tl.load(new_ptr, mask=here, other=0.0)
        old_ptr = kept_ptr + (KERNEL - 1 + at)[:, None] * CHANNELS
        value = tl.where(here, new, tl.load(old_ptr, mask=before, other=0.0))
        if SINGLE and tap > 0:
            tl.store(kept_ptr + (tap - 1) * CHANNELS, value, mask=inside & is_real)
        factor = tl.load(weight_ptr + channel * KERNEL + tap, mask=channel < CHANNELS, other=0.0)
        found += factor.to(tl.float32)[None, :] * value.to(tl.float32)
    out = found / (1.0 + tl.exp(-found))
    place = out_ptr + (begin + token)[:, None] * CHANNELS + channel[None, :]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _keep_kernel(
    x_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    state_ptr: tl.tensor,
    table_ptr: tl.tensor,
    count: tl.tensor,
    SCRATCH: tl.constexpr,
    FEATURES: tl.constexpr,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
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
    kept_ptr = state_ptr + row * ((KERNEL - 1) * CHANNELS) + channel
    for place in tl.static_range(KERNEL - 1):
        at = tokens - (KERNEL - 1) + place
        new_ptr = x_ptr + (begin + at) * FEATURES + column
        new = tl.load(new_ptr, mask=inside & (at >= 0), other=0.0)
        old_ptr = kept_ptr + (KERNEL - 1 + at) * CHANNELS
        old = tl.load(old_ptr, mask=inside & (at < 0) & (position + at >= 0), other=0.0)
        tl.store(kept_ptr + place * CHANNELS, tl.where(at >= 0, new, old), mask=inside)
