"""The gated delta rule (arXiv 2412.06464) with a state for each row.

A slice of one token takes one step. A slice of several is computed in chunks: within one the rule
is a triangular system, which is solved beside the state (the WY form, arXiv 2406.06484), and the
state goes from chunk to chunk. Each state is read once and written once.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import dot_precision
from loraplex.server.kernels.states.slices import Runs, Slices, slice_of, walked

# Tokens of a chunk. A row of its system's inverse is as wide.
CHUNK = 32
# Features of values that a program has: their part of the state lies in registers.
_VALUES = 32
# Of tensor cores.
_LEAST = 16


class DeltaHeads(NamedTuple):
    """Sizes of a layer. values: heads, a multiple of `keys`."""

    keys: int
    values: int
    key_dim: int
    value_dim: int


class DeltaGates(NamedTuple):
    """Where betas and decays come from. product: `[tokens, 2 values]`, contiguous. columns: int32
    `[2 values]`, which of them are b of each head, then a. decay, bias: float32 `[values]`."""

    product: torch.Tensor
    columns: torch.Tensor
    decay: torch.Tensor
    bias: torch.Tensor


def delta_rule(
    qkv: torch.Tensor,
    heads: DeltaHeads,
    gates: DeltaGates,
    state: torch.Tensor,
    slices: Slices,
    out: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> None:
    """Move the states S of slices on by their tokens, and read them, in float32:

    `S = S * exp(decay * softplus(a + bias))`, `S = S + k (beta * (v - S^T k))^T`, `out = S^T q`,
    where beta is `sigmoid(b)`, k and q have length 1, and q is divided by the root of its size.

    qkv: `[tokens, channels]`, contiguous: q and k of each key head, v of each head. state: float32
    `[rows + 1, values, key_dim, value_dim]`; taken as zeros where a slice begins a sequence; the
    last row is left alone. out: `[tokens, values * value_dim]`, zeros for the last row. Products of
    chunks round to TF32 where qkv is of 16 bits. Raises ValueError on a mismatch.

    A walk's state is that behind its replays and its first token. Its replays lie in qkv behind the
    tokens, as `causal_conv` leaves them. kept: what `gates.product` was of them, `[rows * depth, 2
    values]`.
    """
    _check(qkv, heads, gates, state, out)
    if not slices.num_slices:
        return
    sizes = {
        "SCRATCH": len(state) - 1,
        "KEYS": heads.keys,
        "VALUES": heads.values,
        "KEY_DIM": heads.key_dim,
        "VALUE_DIM": heads.value_dim,
        "KEY_BLOCK": max(_LEAST, triton.next_power_of_2(heads.key_dim)),
    }
    block = max(_LEAST, min(_VALUES, triton.next_power_of_2(heads.value_dim)))
    grid = (slices.num_slices, heads.values * triton.cdiv(heads.value_dim, block))
    if not isinstance(slices, Runs):
        of_slices, depth = walked(slices)
        given = (qkv, *gates, gates.product if kept is None else kept, state, *of_slices, len(out))
        rule = {"BLOCK": block, "DEPTH": depth}
        _step_kernel[grid](*given, out, **sizes, **rule, num_warps=4)
        return
    table, count = slices.table, slices.num_slices
    inverse = torch.empty(len(out), heads.values, CHUNK, dtype=torch.float32, device=qkv.device)
    rule = {**sizes, "CHUNK": CHUNK, "PRECISION": dot_precision(qkv.dtype)}
    _invert(qkv, gates, slices, inverse, rule)
    context = (qkv, *gates, inverse, state, table, count, out)
    _chunks_kernel[grid](*context, **rule, BLOCK=block, num_warps=4)


def _invert(
    qkv: torch.Tensor,
    gates: DeltaGates,
    slices: Runs,
    inverse: torch.Tensor,
    rule: dict[str, Any],
) -> None:
    """Invert the system of each chunk and head. inverse: float32 `[tokens, values, CHUNK]`."""
    grid = (slices.num_slices, triton.cdiv(slices.longest, CHUNK), rule["VALUES"])
    context = (qkv, *gates, inverse, slices.table, slices.num_slices)
    _inverse_kernel[grid](*context, **rule, num_warps=1)


def _check(
    qkv: torch.Tensor,
    heads: DeltaHeads,
    gates: DeltaGates,
    state: torch.Tensor,
    out: torch.Tensor,
) -> None:
    keys, values, key_dim, value_dim = heads
    if values % keys:
        raise ValueError(f"{values} heads of values do not share {keys} of keys evenly")
    if state.dtype != torch.float32 or state.shape[1:] != (values, key_dim, value_dim):
        raise ValueError(f"the state must be float32 [rows, {values}, {key_dim}, {value_dim}]")
    if qkv.shape[1] != 2 * keys * key_dim + values * value_dim:
        raise ValueError(f"q, k and v have {qkv.shape[1]} features in all")
    tokens, features = gates.product.shape
    if tokens > len(qkv) or features != 2 * values or gates.columns.dtype != torch.int32:
        raise ValueError(f"gates must be [{len(qkv)}, {2 * values}], their columns int32")
    if out.shape != (tokens, values * value_dim):
        raise ValueError(f"the output must be [{tokens}, {values * value_dim}]")
    if not all(each.is_contiguous() for each in (qkv, *gates, state, out)):
        raise ValueError("inputs, gates, state and output must be contiguous")


@triton.jit
def _gates_of(
    gates_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    inside: tl.tensor,
    VALUES: tl.constexpr,
) -> Any:
    """The logarithm of the decay, and beta, of a head at tokens; zeros where not inside."""
    place = gates_ptr + token * (2 * VALUES)
    b = tl.load(place + tl.load(columns_ptr + head), mask=inside, other=0.0).to(tl.float32)
    a = tl.load(place + tl.load(columns_ptr + VALUES + head), mask=inside, other=0.0)
    a = a.to(tl.float32) + tl.load(bias_ptr + head)
    # softplus, which is its argument where that is large
    soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    decay = tl.where(inside, tl.load(decay_ptr + head) * soft, 0.0)
    return decay, tl.where(inside, 1.0 / (1.0 + tl.exp(-b)), 0.0)


@triton.jit
def _unit(x: tl.tensor) -> Any:
    """Rows of length 1."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit(do_not_specialize=["total"])
def _step_kernel(
    qkv_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    past_ptr: tl.tensor,
    state_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    replays_ptr: tl.tensor,
    total: tl.tensor,
    out_ptr: tl.tensor,
    SCRATCH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """A walk of a row, or its one token, for some features of one head's values."""
    TILES: tl.constexpr = (VALUE_DIM + BLOCK - 1) // BLOCK
    CHANNELS: tl.constexpr = 2 * KEYS * KEY_DIM + VALUES * VALUE_DIM
    first = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + first).to(tl.int64)
    head = tl.program_id(1) // TILES
    of_key = tl.arange(0, KEY_BLOCK)
    of_value = tl.program_id(1) % TILES * BLOCK + tl.arange(0, BLOCK)
    has_key, has_value = of_key < KEY_DIM, of_value < VALUE_DIM
    out_ptr += head * VALUE_DIM + of_value
    if row == SCRATCH:
        nothing = tl.zeros((BLOCK,), dtype=out_ptr.dtype.element_ty)
        tl.store(out_ptr + first * (VALUES * VALUE_DIM), nothing, mask=has_value)
        return
    replays, steps = 0, 1
    begins = tl.load(positions_ptr + first)
    if DEPTH > 0:
        replays = tl.load(replays_ptr + first)
        tokens = tl.load(lengths_ptr + first)
        if tokens == 0:  # another program walks here
            return
        steps = replays + tokens
        begins -= replays
    of_state = of_key[:, None] * VALUE_DIM + of_value[None, :]
    place = state_ptr + (row * VALUES + head) * (KEY_DIM * VALUE_DIM) + of_state
    has = has_key[:, None] & has_value[None, :]
    state = tl.load(place, mask=has & (begins != 0), other=0.0)
    for step in range(steps):
        token = first + step - replays
        line, product_ptr = token, gates_ptr + token * (2 * VALUES)
        if DEPTH > 0:
            line = tl.where(step < replays, total + first * DEPTH + step, token)
            past = past_ptr + (row * DEPTH + step) * (2 * VALUES)
            product_ptr = tl.where(step < replays, past, product_ptr)
        q_ptr = qkv_ptr + line * CHANNELS + head // (VALUES // KEYS) * KEY_DIM + of_key
        q = tl.load(q_ptr, mask=has_key, other=0.0).to(tl.float32)
        k = tl.load(q_ptr + KEYS * KEY_DIM, mask=has_key, other=0.0).to(tl.float32)
        v_ptr = qkv_ptr + line * CHANNELS + 2 * KEYS * KEY_DIM + head * VALUE_DIM + of_value
        v = tl.load(v_ptr, mask=has_value, other=0.0).to(tl.float32)
        k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
        q *= tl.rsqrt(tl.sum(q * q) + 1e-6) * KEY_DIM**-0.5
        gates = (product_ptr, columns_ptr, decay_ptr, bias_ptr)
        decay, beta = _gates_of(*gates, step * 0, head, step >= 0, VALUES)
        state *= tl.exp(decay)
        news = (v - tl.sum(state * k[:, None], 0)) * beta
        state += k[:, None] * news[None, :]
        found = tl.sum(state * q[:, None], 0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * (VALUES * VALUE_DIM), found, mask=has_value & (step >= replays))
        tl.store(place, state, mask=has & (step == replays))


@triton.jit(do_not_specialize=["count"])
def _inverse_kernel(
    qkv_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    table_ptr: tl.tensor,
    count: tl.tensor,
    SCRATCH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Invert I + A for one chunk and head, row by row. `A[i, j]` is `beta_i (k_i . k_j) exp(D_i -
    D_j)` for j < i and else 0; D is the sum of the decays' logarithms up to a token."""
    CHANNELS: tl.constexpr = 2 * KEYS * KEY_DIM + VALUES * VALUE_DIM
    row, begin, tokens, _ = slice_of(table_ptr, count)
    first, head = tl.program_id(1) * CHUNK, tl.program_id(2)
    if (row == SCRATCH) | (first >= tokens):
        return
    place, of_key = tl.arange(0, CHUNK), tl.arange(0, KEY_BLOCK)
    inside = first + place < tokens
    token = begin + first + place
    k_ptr = qkv_ptr + KEYS * KEY_DIM + head // (VALUES // KEYS) * KEY_DIM
    at = token[:, None] * CHANNELS + of_key[None, :]
    has = inside[:, None] & (of_key < KEY_DIM)[None, :]
    k = _unit(tl.load(k_ptr + at, mask=has, other=0.0).to(tl.float32))
    gates = (gates_ptr, columns_ptr, decay_ptr, bias_ptr)
    decay, beta = _gates_of(*gates, token, head, inside, VALUES)
    decayed = tl.cumsum(decay, 0)
    before = place[:, None] > place[None, :]
    faded = tl.exp(tl.where(before, decayed[:, None] - decayed[None, :], -float("inf")))
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * faded * beta[:, None]
    found = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    for number in range(1, CHUNK):
        is_row = (place == number)[:, None]
        factors = tl.sum(tl.where(is_row, system, 0.0), 0)
        found -= tl.where(is_row, tl.sum(factors[:, None] * found, 0)[None, :], 0.0)
    where = (token[:, None] * VALUES + head) * CHUNK + place[None, :]
    tl.store(inverse_ptr + where, found, mask=inside[:, None])


@triton.jit(do_not_specialize=["count"])
def _chunks_kernel(
    qkv_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    state_ptr: tl.tensor,
    table_ptr: tl.tensor,
    count: tl.tensor,
    out_ptr: tl.tensor,
    SCRATCH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """All chunks of a slice, one after the other, for some features of one head's values."""
    TILES: tl.constexpr = (VALUE_DIM + BLOCK - 1) // BLOCK
    CHANNELS: tl.constexpr = 2 * KEYS * KEY_DIM + VALUES * VALUE_DIM
    row, begin, tokens, position = slice_of(table_ptr, count)
    head = tl.program_id(1) // TILES
    place, of_key = tl.arange(0, CHUNK), tl.arange(0, KEY_BLOCK)
    of_value = tl.program_id(1) % TILES * BLOCK + tl.arange(0, BLOCK)
    has_key, has_value = (of_key < KEY_DIM)[None, :], (of_value < VALUE_DIM)[None, :]
    of_state = of_key[:, None] * VALUE_DIM + of_value[None, :]
    kept_ptr = state_ptr + (row * VALUES + head) * (KEY_DIM * VALUE_DIM) + of_state
    has = (of_key < KEY_DIM)[:, None] & has_value & (row != SCRATCH)
    state = tl.load(kept_ptr, mask=has & (position > 0), other=0.0)
    gates = (gates_ptr, columns_ptr, decay_ptr, bias_ptr)
    for first in range(0, tokens, CHUNK):
        inside = (first + place < tokens) & (row != SCRATCH)
        token = begin + first + place
        q_ptr = qkv_ptr + head // (VALUES // KEYS) * KEY_DIM + token[:, None] * CHANNELS
        q_ptr += of_key[None, :]
        taken = inside[:, None] & has_key
        q = _unit(tl.load(q_ptr, mask=taken, other=0.0).to(tl.float32)) * KEY_DIM**-0.5
        k = tl.load(q_ptr + KEYS * KEY_DIM, mask=taken, other=0.0)
        k = _unit(k.to(tl.float32))
        v_ptr = qkv_ptr + 2 * KEYS * KEY_DIM + head * VALUE_DIM + token[:, None] * CHANNELS
        given = inside[:, None] & has_value
        v = tl.load(v_ptr + of_value[None, :], mask=given, other=0.0).to(tl.float32)
        decay, beta = _gates_of(*gates, token, head, inside, VALUES)
        decayed, whole = tl.cumsum(decay, 0), tl.sum(decay, 0)
        where = (token[:, None] * VALUES + head) * CHUNK + place[None, :]
        inverse = tl.load(inverse_ptr + where, mask=inside[:, None], other=0.0)
        faded = tl.exp(decayed)[:, None]
        known = tl.dot(k, state, input_precision=PRECISION) * faded
        news = tl.dot(inverse, (v - known) * beta[:, None], input_precision=PRECISION)
        seen = place[:, None] >= place[None, :]
        since = tl.exp(tl.where(seen, decayed[:, None] - decayed[None, :], -float("inf")))
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * since
        found = tl.dot(q, state, input_precision=PRECISION) * faded
        found += tl.dot(scores, news, input_precision=PRECISION)
        at = token[:, None] * (VALUES * VALUE_DIM) + head * VALUE_DIM + of_value[None, :]
        written = (first + place < tokens)[:, None] & has_value
        tl.store(out_ptr + at, found.to(out_ptr.dtype.element_ty), mask=written)
        left = k * tl.exp(whole - decayed)[:, None]
        state = state * tl.exp(whole) + tl.dot(tl.trans(left), news, input_precision=PRECISION)
    tl.store(kept_ptr, state, mask=has)
