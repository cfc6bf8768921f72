"""A causal convolution by channel, whose earlier inputs lie in rows' states."""

from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.states.operands import Convolution
from loraplex.server.kernels.states.slices import Singles, Slices, slice_of

_CHANNELS = 512
_TOKENS = 8


def causal_conv(
    x: torch.Tensor, conv: Convolution, state: torch.Tensor, slices: Slices, out: torch.Tensor
) -> None:
    """Convolve tokens of slices, and leave their latest inputs in the state: `out = silu(bias + sum
    over j of weight[:, j] * input[token - kernel + 1 + j])`, in float32. With factors `out = factor
    * (bias + sum)`, and inputs are products of two features; each is rounded to x's dtype.

    x: `[tokens, features]`, contiguous. state: `[rows + 1, kernel - 1, channels]`, oldest input
    first; zeros are read for what comes before a sequence, nothing of its last row. out: `[tokens,
    channels]`, written where a slice has a token. Raises ValueError on a mismatch.
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
    inputs, given = (x, conv.columns, factors), (conv.weight, bias, state)
    rule = {**sizes, "BIAS": conv.bias is not None, "num_warps": 4}
    if isinstance(slices, Singles):
        grid = (count, 1, blocks)
        _conv_kernel[grid](*inputs, *given, *slices, count, out, **rule, SINGLE=True, TOKENS=1)
        return
    table, tiles = slices.table, triton.cdiv(slices.longest, _TOKENS)
    grid = (count, tiles, blocks)
    context = (*inputs, *given, table, table, count, out)
    _conv_kernel[grid](*context, **rule, SINGLE=False, TOKENS=_TOKENS)
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
    if out.shape != (len(x), channels):
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


@triton.jit(do_not_specialize=["count"])
def _conv_kernel(
    x_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    count: tl.tensor,
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
    has_channel = channel < CHANNELS
    inside = (token < tokens)[:, None] & has_channel[None, :]
    column = tl.load(columns_ptr + channel, mask=has_channel, other=0)[None, :]
    factor = tl.load(factors_ptr + channel, mask=has_channel, other=0)[None, :]
    kept_ptr = state_ptr + row * ((KERNEL - 1) * CHANNELS) + channel[None, :]
    is_real = row != SCRATCH
    found = tl.zeros((TOKENS, BLOCK), dtype=tl.float32)
    for tap in tl.static_range(KERNEL):
        at = token - (KERNEL - 1 - tap)
        here = inside & (at >= 0)[:, None] & is_real
        before = inside & ((at < 0) & (position + at >= 0))[:, None] & is_real
        new_ptr = x_ptr + (begin + at)[:, None] * FEATURES
        new = _input(new_ptr, column, factor, here, FACTORS)
        old_ptr = kept_ptr + (KERNEL - 1 + at)[:, None] * CHANNELS
        value = tl.where(here, new, tl.load(old_ptr, mask=before, other=0.0))
        if SINGLE and tap > 0:
            tl.store(kept_ptr + (tap - 1) * CHANNELS, value, mask=inside & is_real)
        weight = tl.load(weight_ptr + channel * KERNEL + tap, mask=has_channel, other=0.0)
        found += weight.to(tl.float32)[None, :] * value.to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + channel, mask=has_channel, other=0.0)
        found += bias.to(tl.float32)[None, :]
    if FACTORS:
        behind = tl.load(factors_ptr + CHANNELS + channel, mask=has_channel, other=0)[None, :]
        own = (begin + token)[:, None] * FEATURES
        out = tl.load(x_ptr + own + behind, mask=inside & is_real, other=0.0).to(tl.float32)
        out *= found.to(out_ptr.dtype.element_ty).to(tl.float32)
    else:
        out = found / (1.0 + tl.exp(-found))
    place = out_ptr + (begin + token)[:, None] * CHANNELS + channel[None, :]
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
