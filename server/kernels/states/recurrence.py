"""The gated delta rule (arXiv 2412.06464) and Mamba-2 (arXiv 2405.21060), where each row has a
state, and the gated norm behind them.

A slice of one token takes one step. A slice of several is computed in chunks, and the state goes
from chunk to chunk. Within one the delta rule is a triangular system, which is solved beside the
state (the WY form, arXiv 2406.06484). Each state is read once and written once.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import dot_precision
from loraplex.server.kernels.states.causal_conv import Runs, Slices, slice_of, walked
from loraplex.server.kernels.states.operands import GatedNorm, StateGates, StateHeads

# Tokens of a chunk. A row of its system's inverse is as wide.
CHUNK = 32
# Features of values that a program has: their part of the state lies in registers.
_VALUES = 32
# Of tensor cores.
_LEAST = 16
_MOST = float(torch.finfo(torch.float32).max)

# Features for which a warp is enough.
_OF_A_WARP = 512
_MOST_WARPS = 16


def delta_rule(
    qkv: torch.Tensor,
    heads: StateHeads,
    product: torch.Tensor,
    gates: StateGates,
    state: torch.Tensor,
    slices: Slices,
    out: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> None:
    """Move the states S of slices on by their tokens, and read them, in float32:

    `S = S * exp(decay * dt)`, `S = S + k (beta * (v - S^T k))^T`, `out = S^T q`, where k and q have
    length 1, and q is divided by the root of its size. Gates give dt and beta.

    qkv: `[tokens, channels]`, contiguous: q and k of each key head, v of each head. product:
    `[tokens, features]`, contiguous, which has the inputs of gates. state: float32 `[rows + 1,
    values, key_dim, value_dim]`; taken as zeros where a slice begins a sequence; the last row is
    left alone. out: `[tokens, values * value_dim]`, zeros for the last row. Products of chunks
    round to TF32 where qkv is of 16 bits. Raises ValueError on a mismatch.

    A walk's state is that behind its replays and its first token. Its replays lie in qkv behind the
    tokens, as `causal_conv` leaves them. kept: what `product` was of them, `[rows * depth,
    features]`.
    """
    keys = heads.keys * heads.key_dim
    products = product, product if kept is None else kept
    _recur(qkv, (0, keys, 2 * keys), heads, products, gates, state, slices, out)


def state_space(
    xbc: torch.Tensor,
    heads: StateHeads,
    product: torch.Tensor,
    gates: StateGates,
    state: torch.Tensor,
    slices: Slices,
    out: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> None:
    """As `delta_rule`, for `S = S * exp(decay * dt) + B (dt * x)^T`, `out = S^T C + skip * x`.

    xbc: `[tokens, channels]`, contiguous: x of each head, B and C of each key head.
    """
    inner, keys = heads.values * heads.value_dim, heads.keys * heads.key_dim
    products = product, product if kept is None else kept
    _recur(xbc, (inner + keys, inner, 0), heads, products, gates, state, slices, out)


def _recur(
    qkv: torch.Tensor,
    places: tuple[int, int, int],
    heads: StateHeads,
    products: tuple[torch.Tensor, torch.Tensor],
    gates: StateGates,
    state: torch.Tensor,
    slices: Slices,
    out: torch.Tensor,
) -> None:
    """Compute either rule. places: of q, k and v in `qkv`. products: of tokens and of replays."""
    product, past = products
    _check(qkv, heads, product, gates, state, out)
    if not slices.num_slices:
        return
    low, high = gates.limits
    sizes = {
        "SCRATCH": len(state) - 1,
        "KEYS": heads.keys,
        "VALUES": heads.values,
        "KEY_DIM": heads.key_dim,
        "VALUE_DIM": heads.value_dim,
        "KEY_BLOCK": max(_LEAST, triton.next_power_of_2(heads.key_dim)),
        "CHANNELS": qkv.shape[1],
        **dict(zip(("Q", "K", "V"), places, strict=True)),
        "GATES": product.shape[1],
        "FACTOR": gates.factor,
        "LOW": low,
        "HIGH": min(high, _MOST),
        "DELTA": 0 if gates.skip is not None else gates.beta,
    }
    skip = gates.decay if gates.skip is None else gates.skip
    of_gates = (product, gates.columns, gates.decay, gates.bias)
    block = max(_LEAST, min(_VALUES, triton.next_power_of_2(heads.value_dim)))
    grid = (slices.num_slices, heads.values * triton.cdiv(heads.value_dim, block))
    if not isinstance(slices, Runs):
        of_slices, depth = walked(slices)
        inputs = (qkv, *of_gates, skip, past, state, *of_slices, len(out), out)
        _step_kernel[grid](*inputs, **sizes, BLOCK=block, DEPTH=depth, num_warps=4)
        return
    inverse = gates.decay
    rule = {**sizes, "CHUNK": CHUNK, "PRECISION": dot_precision(qkv.dtype)}
    if gates.skip is None:
        inverse = _inverse(qkv, of_gates, slices, rule)
    context = (qkv, *of_gates, skip, inverse, state, slices.table, slices.num_slices, out)
    _chunks_kernel[grid](*context, **rule, BLOCK=block, num_warps=4)


def _inverse(
    qkv: torch.Tensor, of_gates: tuple[torch.Tensor, ...], slices: Runs, rule: dict[str, Any]
) -> torch.Tensor:
    """The inverse of the system of each chunk and head: float32 `[tokens, values, CHUNK]`."""
    shape = len(of_gates[0]), rule["VALUES"], CHUNK
    inverse = torch.empty(shape, dtype=torch.float32, device=qkv.device)
    grid = (slices.num_slices, triton.cdiv(slices.longest, CHUNK), rule["VALUES"])
    context = (qkv, *of_gates, inverse, slices.table, slices.num_slices)
    _inverse_kernel[grid](*context, **rule, num_warps=1)
    return inverse


def _check(
    qkv: torch.Tensor,
    heads: StateHeads,
    product: torch.Tensor,
    gates: StateGates,
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
    tokens, inputs = len(product), values * (2 if gates.skip is None else 1)
    if tokens > len(qkv) or gates.columns.dtype != torch.int32:
        raise ValueError(f"gates must be of {len(qkv)} tokens, their columns int32")
    if out.shape != (tokens, values * value_dim):
        raise ValueError(f"the output must be [{tokens}, {values * value_dim}]")
    if len(gates.columns) != inputs or not len(gates.decay) == len(gates.bias) == values:
        raise ValueError(f"gates must have {inputs} columns, and numbers of {values} heads")
    given = [qkv, product, gates.columns, gates.decay, gates.bias, state, out]
    if not all(each.is_contiguous() for each in given):
        raise ValueError("inputs, gates, state and output must be contiguous")


@triton.jit
def _gates_of(
    product_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    inside: tl.tensor,
    VALUES: tl.constexpr,
    GATES: tl.constexpr,
    FACTOR: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    DELTA: tl.constexpr,
) -> Any:
    """The logarithm of what stays of a head's state at tokens, and how much is written; zeros where
    not inside. DELTA: the delta rule's most; 0 = the rule is Mamba-2's."""
    place = product_ptr + token * GATES
    column = tl.load(columns_ptr + (VALUES if DELTA > 0 else 0) + head)
    a = tl.load(place + column, mask=inside, other=0.0).to(tl.float32)
    a = a * FACTOR + tl.load(bias_ptr + head)
    # log(1 + u) to the last bit, where 1 + u is rounded (Kahan)
    u = tl.exp(-tl.abs(a))
    rounded = 1.0 + u
    near = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    soft = tl.maximum(a, 0.0) + tl.where(rounded == 1.0, u, tl.log(rounded) * (u / near))
    dt = tl.minimum(tl.maximum(soft, LOW), HIGH)
    decay = tl.where(inside, tl.load(decay_ptr + head) * dt, 0.0)
    if DELTA > 0:
        b = tl.load(place + tl.load(columns_ptr + head), mask=inside, other=0.0).to(tl.float32)
        dt = DELTA / (1.0 + tl.exp(-b))
    return decay, tl.where(inside, dt, 0.0)


@triton.jit
def _unit(x: tl.tensor) -> Any:
    """Rows of length 1."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit(do_not_specialize=["total"])
def _step_kernel(
    qkv_ptr: tl.tensor,
    product_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    skip_ptr: tl.tensor,
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
    CHANNELS: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    GATES: tl.constexpr,
    FACTOR: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """A walk of a row, or its one token, for some features of one head's values."""
    TILES: tl.constexpr = (VALUE_DIM + BLOCK - 1) // BLOCK
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
        line, of_token = token, product_ptr + token * GATES
        if DEPTH > 0:
            line = tl.where(step < replays, total + first * DEPTH + step, token)
            past = past_ptr + (row * DEPTH + step) * GATES
            of_token = tl.where(step < replays, past, of_token)
        key_ptr = qkv_ptr + line * CHANNELS + head // (VALUES // KEYS) * KEY_DIM + of_key
        q = tl.load(key_ptr + Q, mask=has_key, other=0.0).to(tl.float32)
        k = tl.load(key_ptr + K, mask=has_key, other=0.0).to(tl.float32)
        v_ptr = qkv_ptr + line * CHANNELS + V + head * VALUE_DIM + of_value
        v = tl.load(v_ptr, mask=has_value, other=0.0).to(tl.float32)
        gates = (of_token, columns_ptr, decay_ptr, bias_ptr)
        decay, taken = _gates_of(
            *gates, step * 0, head, step >= 0, VALUES, GATES, FACTOR, LOW, HIGH, DELTA
        )
        state *= tl.exp(decay)
        news = v * taken
        if DELTA > 0:
            k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
            q *= tl.rsqrt(tl.sum(q * q) + 1e-6) * KEY_DIM**-0.5
            news -= tl.sum(state * k[:, None], 0) * taken
        state += k[:, None] * news[None, :]
        found = tl.sum(state * q[:, None], 0)
        if DELTA == 0:
            found += tl.load(skip_ptr + head) * v
        found = found.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * (VALUES * VALUE_DIM), found, mask=has_value & (step >= replays))
        tl.store(place, state, mask=has & (step == replays))


@triton.jit(do_not_specialize=["count"])
def _inverse_kernel(
    qkv_ptr: tl.tensor,
    product_ptr: tl.tensor,
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
    CHANNELS: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    GATES: tl.constexpr,
    FACTOR: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    DELTA: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Invert I + A for one chunk and head, row by row. `A[i, j]` is `beta_i (k_i . k_j) exp(D_i -
    D_j)` for j < i and else 0; D is the sum of the decays' logarithms up to a token."""
    row, begin, tokens, _ = slice_of(table_ptr, count)
    first, head = tl.program_id(1) * CHUNK, tl.program_id(2)
    if (row == SCRATCH) | (first >= tokens):
        return
    place, of_key = tl.arange(0, CHUNK), tl.arange(0, KEY_BLOCK)
    inside = first + place < tokens
    token = begin + first + place
    k_ptr = qkv_ptr + K + head // (VALUES // KEYS) * KEY_DIM
    at = token[:, None] * CHANNELS + of_key[None, :]
    has = inside[:, None] & (of_key < KEY_DIM)[None, :]
    k = _unit(tl.load(k_ptr + at, mask=has, other=0.0).to(tl.float32))
    gates = (product_ptr, columns_ptr, decay_ptr, bias_ptr)
    decay, beta = _gates_of(*gates, token, head, inside, VALUES, GATES, FACTOR, LOW, HIGH, DELTA)
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
    product_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    skip_ptr: tl.tensor,
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
    CHANNELS: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    GATES: tl.constexpr,
    FACTOR: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    DELTA: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """All chunks of a slice, one after the other, for some features of one head's values."""
    TILES: tl.constexpr = (VALUE_DIM + BLOCK - 1) // BLOCK
    row, begin, tokens, position = slice_of(table_ptr, count)
    head = tl.program_id(1) // TILES
    place, of_key = tl.arange(0, CHUNK), tl.arange(0, KEY_BLOCK)
    of_value = tl.program_id(1) % TILES * BLOCK + tl.arange(0, BLOCK)
    has_key, has_value = (of_key < KEY_DIM)[None, :], (of_value < VALUE_DIM)[None, :]
    of_state = of_key[:, None] * VALUE_DIM + of_value[None, :]
    kept_ptr = state_ptr + (row * VALUES + head) * (KEY_DIM * VALUE_DIM) + of_state
    has = (of_key < KEY_DIM)[:, None] & has_value & (row != SCRATCH)
    state = tl.load(kept_ptr, mask=has & (position > 0), other=0.0)
    gates = (product_ptr, columns_ptr, decay_ptr, bias_ptr)
    for first in range(0, tokens, CHUNK):
        inside = (first + place < tokens) & (row != SCRATCH)
        token = begin + first + place
        key_ptr = qkv_ptr + head // (VALUES // KEYS) * KEY_DIM + token[:, None] * CHANNELS
        key_ptr += of_key[None, :]
        taken = inside[:, None] & has_key
        q = tl.load(key_ptr + Q, mask=taken, other=0.0).to(tl.float32)
        k = tl.load(key_ptr + K, mask=taken, other=0.0).to(tl.float32)
        v_ptr = qkv_ptr + V + head * VALUE_DIM + token[:, None] * CHANNELS
        given = inside[:, None] & has_value
        v = tl.load(v_ptr + of_value[None, :], mask=given, other=0.0).to(tl.float32)
        decay, written = _gates_of(
            *gates, token, head, inside, VALUES, GATES, FACTOR, LOW, HIGH, DELTA
        )
        decayed, whole = tl.cumsum(decay, 0), tl.sum(decay, 0)
        faded = tl.exp(decayed)[:, None]
        news = v * written[:, None]
        if DELTA > 0:
            q, k = _unit(q) * KEY_DIM**-0.5, _unit(k)
            where = (token[:, None] * VALUES + head) * CHUNK + place[None, :]
            inverse = tl.load(inverse_ptr + where, mask=inside[:, None], other=0.0)
            known = tl.dot(k, state, input_precision=PRECISION) * faded
            news -= known * written[:, None]
            news = tl.dot(inverse, news, input_precision=PRECISION)
        seen = place[:, None] >= place[None, :]
        since = tl.exp(tl.where(seen, decayed[:, None] - decayed[None, :], -float("inf")))
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * since
        found = tl.dot(q, state, input_precision=PRECISION) * faded
        found += tl.dot(scores, news, input_precision=PRECISION)
        if DELTA == 0:
            found += tl.load(skip_ptr + head) * v
        at = token[:, None] * (VALUES * VALUE_DIM) + head * VALUE_DIM + of_value[None, :]
        stored = (first + place < tokens)[:, None] & has_value
        tl.store(out_ptr + at, found.to(out_ptr.dtype.element_ty), mask=stored)
        left = k * tl.exp(whole - decayed)[:, None]
        state = state * tl.exp(whole) + tl.dot(tl.trans(left), news, input_precision=PRECISION)
    tl.store(kept_ptr, state, mask=has)


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    columns: torch.Tensor,
    norm: GatedNorm,
    out: torch.Tensor,
) -> None:
    """Norm x group by group, and multiply with `silu(factor * gate)`, in float32: what is normed is
    rounded to out's dtype, and so is its product with the weight.

    x: `[tokens, features]`, contiguous; out: as x, of any dtype. gate: `[tokens, more]`,
    contiguous. columns: int32 `[features]`, where each number's gate lies. Raises ValueError on a
    mismatch.
    """
    features, size = x.shape[1], norm.size
    if features % size or len(columns) != features or columns.dtype != torch.int32:
        raise ValueError(f"{features} numbers in groups of {size}, with {len(columns)} gates")
    given = [x, gate, columns, out] + ([] if norm.weight is None else [norm.weight])
    if not all(each.is_contiguous() for each in given) or out.shape != x.shape:
        raise ValueError("inputs, gates and weights must be contiguous, the output as the inputs")
    if not len(x):
        return
    block = triton.next_power_of_2(size)
    _gated_norm_kernel[(len(x), features // size)](
        x,
        gate,
        columns,
        columns if norm.weight is None else norm.weight,
        norm.epsilon,
        norm.factor,
        out,
        GATES=gate.shape[1],
        FEATURES=features,
        SIZE=size,
        BLOCK=block,
        NORM=norm.weight is not None,
        FIRST=norm.gate_first,
        num_warps=min(_MOST_WARPS, max(1, block // _OF_A_WARP)),
    )


@triton.jit(do_not_specialize=["epsilon", "factor"])
def _gated_norm_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    epsilon: tl.tensor,
    factor: tl.tensor,
    out_ptr: tl.tensor,
    GATES: tl.constexpr,
    FEATURES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    FIRST: tl.constexpr,
) -> None:
    token, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    feature, inside = tl.program_id(1) * SIZE + place, place < SIZE
    x = tl.load(x_ptr + token * FEATURES + feature, mask=inside, other=0.0).to(tl.float32)
    column = tl.load(columns_ptr + feature, mask=inside, other=0)
    gate = tl.load(gate_ptr + token * GATES + column, mask=inside, other=0.0).to(tl.float32)
    gate *= factor
    gate = gate / (1.0 + tl.exp(-gate))
    dtype = out_ptr.dtype.element_ty
    if FIRST:
        x *= gate
    if NORM:
        x = (x * tl.rsqrt(tl.sum(x * x) / SIZE + epsilon)).to(dtype)
        weight = tl.load(weight_ptr + feature, mask=inside, other=0.0)
        x = (weight * x).to(dtype).to(tl.float32)
    if not FIRST:
        x *= gate
    tl.store(out_ptr + token * FEATURES + feature, x.to(dtype), mask=inside)
