"""The arithmetic of the activation that expands: columns of one tile of rows.

What goes together goes in tuples; `v` and `b` as in low_rank. `target`: addresses of the product
and of the result, and the rows. `down`: of the next site, A's address, rank, and where its v goes.
"""

from typing import Any

import triton
import triton.language as tl

from server.kernels.lora.low_rank import columns_from, in_eights, load_b, load_v, low_rank, product
from server.kernels.pointwise.silu import silu_times


@triton.jit
def silu_rows(
    target: tl.tuple,
    v: tl.tuple,
    b0: tl.tuple,
    b1: tl.tuple,
    scales: tl.tuple,
    down: tl.tuple,
    col: tl.tensor,
    end: tl.tensor,
    INNER: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    DOWN: tl.constexpr,
) -> None:
    """Columns col .. end of a tile's rows. DOWN: of down's v, 0 = is not wanted; where it
    is, all ranks fit it."""
    widest = tl.maximum(b0[1], b1[1])
    even0, even1 = (b0[0], in_eights(b0[1])), (b1[0], in_eights(b1[1]))
    if DOWN > 0:
        _silu_pieces(
            target, v, even0, even1, scales, down, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE * 16 // DOWN, DOWN, STAGES, PRECISION, DOWN,
        )  # fmt: skip
    elif (b0[1] | b1[1]) % 8 != 0:
        _silu_any_rank(
            target, v, b0, b1, scales, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE // 4, PRECISION,
        )  # fmt: skip
    elif widest <= 16:
        _silu_pieces(
            target, v, even0, even1, scales, down, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE, 16, STAGES, PRECISION, 0,
        )  # fmt: skip
    elif widest <= 32:
        _silu_pieces(
            target, v, even0, even1, scales, down, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE // 2, 32, STAGES, PRECISION, 0,
        )  # fmt: skip
    elif widest <= 64:
        _silu_pieces(
            target, v, even0, even1, scales, down, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE // 4, 64, STAGES, PRECISION, 0,
        )  # fmt: skip
    else:
        _silu_any_rank(
            target, v, even0, even1, scales, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE // 4, PRECISION,
        )  # fmt: skip


@triton.jit
def _silu_pieces(
    target: tl.tuple,
    v: tl.tuple,
    b0: tl.tuple,
    b1: tl.tuple,
    scales: tl.tuple,
    down: tl.tuple,
    col: tl.tensor,
    end: tl.tensor,
    INNER: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    DOWN: tl.constexpr,
) -> None:
    """Where all ranks fit one step: v is read once, pieces of B and of the product ahead."""
    y_ptr, out_ptr, rows = target
    a_ptr, rank_down, down_ptr = down
    length = v[4]
    r = tl.arange(0, BLOCK_R)
    if DOWN > 0:
        acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    v0 = load_v(v, r, b0[1], MAX_SPLIT, BLOCK_M)
    v1 = load_v(columns_from(v, b0[1]), r, b1[1], MAX_SPLIT, BLOCK_M)
    # Of few columns that is less work, but float16 may not hold what the product would bring back.
    EARLY: tl.constexpr = y_ptr.dtype.element_ty != tl.float16
    if EARLY:
        v0, v1 = scales[0] * v0, scales[1] * v1
    WHOLE: tl.constexpr = INNER % PIECE == 0
    for begin in tl.range(col, end, PIECE, num_stages=STAGES):
        n = begin + tl.arange(0, PIECE)
        at, out_at, live = _places(rows, length, n, end, INNER, BLOCK_M, WHOLE)
        gate = tl.load(y_ptr + at, mask=live, other=0.0).to(tl.float32)
        up = tl.load(y_ptr + INNER + at, mask=live, other=0.0).to(tl.float32)
        if EARLY:
            gate += product(v0, load_b(b0, n, r, end, WHOLE), BLOCK_M, PRECISION)
            up += product(v1, load_b(b1, n, r, end, WHOLE), BLOCK_M, PRECISION)
        else:
            gate += scales[0] * product(v0, load_b(b0, n, r, end, WHOLE), BLOCK_M, PRECISION)
            up += scales[1] * product(v1, load_b(b1, n, r, end, WHOLE), BLOCK_M, PRECISION)
        out = silu_times(gate, up).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_at, out, mask=live)
        if DOWN > 0:
            known = (r < rank_down)[:, None]
            if not WHOLE:
                known &= (n < end)[None, :]
            a = tl.load(a_ptr + r[:, None] * INNER + n[None, :], mask=known, other=0.0)
            acc = tl.dot(out, tl.trans(a), acc, input_precision=PRECISION)
    if DOWN > 0:
        m = tl.arange(0, BLOCK_M)
        known = (m < length)[:, None] & (r < rank_down)[None, :]
        tl.store(down_ptr + m[:, None] * DOWN + r[None, :], acc, mask=known)


@triton.jit
def _silu_any_rank(
    target: tl.tuple,
    v: tl.tuple,
    b0: tl.tuple,
    b1: tl.tuple,
    scales: tl.tuple,
    col: tl.tensor,
    end: tl.tensor,
    INNER: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    y_ptr, out_ptr, rows = target
    for begin in range(col, end, PIECE):
        n = begin + tl.arange(0, PIECE)
        at, out_at, live = _places(rows, v[4], n, end, INNER, BLOCK_M, False)
        gate = tl.load(y_ptr + at, mask=live, other=0.0).to(tl.float32)
        up = tl.load(y_ptr + INNER + at, mask=live, other=0.0).to(tl.float32)
        delta0, delta1 = low_rank(v, b0, b1, n, end, MAX_SPLIT, BLOCK_M, PIECE, PRECISION)
        out = silu_times(gate + scales[0] * delta0, up + scales[1] * delta1)
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _places(
    rows: tl.tensor,
    length: tl.tensor,
    n: tl.tensor,
    end: tl.tensor,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tuple[Any, Any, Any]:
    """Of gate in the product, in the result, and which are real."""
    live = (tl.arange(0, BLOCK_M) < length)[:, None]
    if not WHOLE:
        live &= (n < end)[None, :]
    row = rows[:, None]
    return row * (2 * INNER) + n[None, :], row * INNER + n[None, :], live
