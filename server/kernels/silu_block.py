"""The arithmetic of the activation that expands: columns of one row or one tile of rows."""

from typing import Any

import triton
import triton.language as tl

from server.kernels.low_rank import load_b, load_v, low_rank, product
from server.kernels.silu import silu_times


@triton.jit
def silu_rows(
    y_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    stride_plane: tl.tensor,
    splits: tl.tensor,
    b0_ptr: tl.tensor,
    b1_ptr: tl.tensor,
    rank0: tl.tensor,
    rank1: tl.tensor,
    scale0: tl.tensor,
    scale1: tl.tensor,
    a_ptr: tl.tensor,
    rank_down: tl.tensor,
    down_ptr: tl.tensor,
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
    """Columns col .. end of one row, or of a tile's. DOWN: of down's v, 0 = is not wanted."""
    if DOWN > 0:
        _silu_pieces(
            y_ptr, out_ptr, rows, length, v_ptr, stride_v, stride_plane, splits, b0_ptr, b1_ptr,
            rank0 // 8 * 8, rank1 // 8 * 8, scale0, scale1, a_ptr, rank_down, down_ptr,
            col, end, INNER, MAX_SPLIT, BLOCK_M, PIECE * 16 // DOWN, DOWN, STAGES, PRECISION, DOWN,
        )  # fmt: skip
    else:
        _silu_ranks(
            y_ptr, out_ptr, rows, length, v_ptr, stride_v, stride_plane, splits, b0_ptr, b1_ptr,
            rank0, rank1, scale0, scale1, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE, STAGES, PRECISION,
        )  # fmt: skip


@triton.jit
def _silu_ranks(
    y_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    stride_plane: tl.tensor,
    splits: tl.tensor,
    b0_ptr: tl.tensor,
    b1_ptr: tl.tensor,
    rank0: tl.tensor,
    rank1: tl.tensor,
    scale0: tl.tensor,
    scale1: tl.tensor,
    col: tl.tensor,
    end: tl.tensor,
    INNER: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    widest = tl.maximum(rank0, rank1)
    if (rank0 | rank1) % 8 != 0:
        _silu_any_rank(
            y_ptr, out_ptr, rows, length, v_ptr, stride_v, stride_plane, splits, b0_ptr, b1_ptr,
            rank0, rank1, scale0, scale1, col, end, INNER, MAX_SPLIT,
            BLOCK_M, PIECE // 4, PRECISION,
        )  # fmt: skip
    elif widest <= 16:
        _silu_pieces(
            y_ptr, out_ptr, rows, length, v_ptr, stride_v, stride_plane, splits, b0_ptr, b1_ptr,
            rank0 // 8 * 8, rank1 // 8 * 8, scale0, scale1, y_ptr, 0, v_ptr,
            col, end, INNER, MAX_SPLIT, BLOCK_M, PIECE, 16, STAGES, PRECISION, 0,
        )  # fmt: skip
    elif widest <= 32:
        _silu_pieces(
            y_ptr, out_ptr, rows, length, v_ptr, stride_v, stride_plane, splits, b0_ptr, b1_ptr,
            rank0 // 8 * 8, rank1 // 8 * 8, scale0, scale1, y_ptr, 0, v_ptr,
            col, end, INNER, MAX_SPLIT, BLOCK_M, PIECE // 2, 32, STAGES, PRECISION, 0,
        )  # fmt: skip
    elif widest <= 64:
        _silu_pieces(
            y_ptr, out_ptr, rows, length, v_ptr, stride_v, stride_plane, splits, b0_ptr, b1_ptr,
            rank0 // 8 * 8, rank1 // 8 * 8, scale0, scale1, y_ptr, 0, v_ptr,
            col, end, INNER, MAX_SPLIT, BLOCK_M, PIECE // 4, 64, STAGES, PRECISION, 0,
        )  # fmt: skip
    else:
        _silu_any_rank(
            y_ptr, out_ptr, rows, length, v_ptr, stride_v, stride_plane, splits, b0_ptr, b1_ptr,
            rank0 // 8 * 8, rank1 // 8 * 8, scale0, scale1, col, end, INNER, MAX_SPLIT,
            BLOCK_M, PIECE // 4, PRECISION,
        )  # fmt: skip


@triton.jit
def _silu_pieces(
    y_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    stride_plane: tl.tensor,
    splits: tl.tensor,
    b0_ptr: tl.tensor,
    b1_ptr: tl.tensor,
    rank0: tl.tensor,
    rank1: tl.tensor,
    scale0: tl.tensor,
    scale1: tl.tensor,
    a_ptr: tl.tensor,
    rank_down: tl.tensor,
    down_ptr: tl.tensor,
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
    r = tl.arange(0, BLOCK_R)
    if DOWN > 0:
        acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    v0 = scale0 * load_v(
        v_ptr, stride_v, stride_plane, splits, r, length, rank0, MAX_SPLIT, BLOCK_M
    )
    v1 = scale1 * load_v(
        v_ptr + rank0, stride_v, stride_plane, splits, r, length, rank1, MAX_SPLIT, BLOCK_M
    )
    for begin in tl.range(col, end, PIECE, num_stages=STAGES):
        n = begin + tl.arange(0, PIECE)
        at, out_at, live = _places(rows, length, n, end, INNER, BLOCK_M)
        gate = tl.load(y_ptr + at, mask=live, other=0.0).to(tl.float32)
        up = tl.load(y_ptr + INNER + at, mask=live, other=0.0).to(tl.float32)
        gate += product(v0, load_b(b0_ptr, rank0, n, r, end), BLOCK_M, PRECISION)
        up += product(v1, load_b(b1_ptr, rank1, n, r, end), BLOCK_M, PRECISION)
        out = silu_times(gate, up).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_at, out, mask=live)
        if DOWN > 0:
            known = (r < rank_down)[:, None] & (n < end)[None, :]
            a = tl.load(a_ptr + r[:, None] * INNER + n[None, :], mask=known, other=0.0)
            acc = tl.dot(out, tl.trans(a), acc, input_precision=PRECISION)
    if DOWN > 0:
        m = tl.arange(0, BLOCK_M)
        known = (m < length)[:, None] & (r < rank_down)[None, :]
        tl.store(down_ptr + m[:, None] * DOWN + r[None, :], acc, mask=known)


@triton.jit
def _silu_any_rank(
    y_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    stride_plane: tl.tensor,
    splits: tl.tensor,
    b0_ptr: tl.tensor,
    b1_ptr: tl.tensor,
    rank0: tl.tensor,
    rank1: tl.tensor,
    scale0: tl.tensor,
    scale1: tl.tensor,
    col: tl.tensor,
    end: tl.tensor,
    INNER: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    for begin in range(col, end, PIECE):
        n = begin + tl.arange(0, PIECE)
        at, out_at, live = _places(rows, length, n, end, INNER, BLOCK_M)
        gate = tl.load(y_ptr + at, mask=live, other=0.0).to(tl.float32)
        up = tl.load(y_ptr + INNER + at, mask=live, other=0.0).to(tl.float32)
        delta0, delta1 = low_rank(
            v_ptr, stride_v, stride_plane, splits, length, b0_ptr, b1_ptr, rank0, rank1, n, end,
            MAX_SPLIT, BLOCK_M, PIECE, PRECISION,
        )  # fmt: skip
        out = silu_times(gate + scale0 * delta0, up + scale1 * delta1)
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _places(
    rows: tl.tensor,
    length: tl.tensor,
    n: tl.tensor,
    end: tl.tensor,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[Any, Any, Any]:
    """Of gate in the product, in the result, and which are real; of one row or many."""
    if BLOCK_M == 1:
        return rows * (2 * INNER) + n, rows * INNER + n, n < end
    else:
        live = (tl.arange(0, BLOCK_M) < length)[:, None] & (n < end)[None, :]
        row = rows[:, None]
        return row * (2 * INNER) + n[None, :], row * INNER + n[None, :], live
