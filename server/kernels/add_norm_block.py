"""The arithmetic of the norm that expands on its way: one row or a few of one adapter, whole."""

from typing import Any

import triton
import triton.language as tl

from server.kernels.low_rank import load_b, load_v, low_rank_one, product, zeros


@triton.jit
def add_norm_rows(
    y_rows: tl.tensor,
    hidden_rows: tl.tensor,
    weight_ptr: tl.tensor,
    epsilon: tl.tensor,
    length: tl.tensor,
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    stride_plane: tl.tensor,
    splits: tl.tensor,
    b_ptr: tl.tensor,
    rank: tl.tensor,
    scale: tl.tensor,
    FEATURES: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """y_rows, hidden_rows: address of one row, or `[BLOCK_M]` of them."""
    # A step fetches as many weights at any rank; with one row, more: it is little beside them.
    WIDE: tl.constexpr = PIECE * 4 if BLOCK_M == 1 else PIECE
    NARROW: tl.constexpr = PIECE if BLOCK_M == 1 else PIECE // 2
    if rank % 8 != 0:
        squares = _add_any_rank(
            y_rows, hidden_rows, length, v_ptr, stride_v, stride_plane, splits, b_ptr, rank, scale,
            FEATURES, MAX_SPLIT, BLOCK_M, WIDE // 2, 16, PRECISION,
        )  # fmt: skip
    elif rank <= 16:
        squares = _add_pieces(
            y_rows, hidden_rows, length, v_ptr, stride_v, stride_plane, splits, b_ptr,
            rank // 8 * 8, scale, FEATURES, MAX_SPLIT, BLOCK_M, WIDE, 16, STAGES, PRECISION,
        )  # fmt: skip
    elif rank <= 32:
        squares = _add_pieces(
            y_rows, hidden_rows, length, v_ptr, stride_v, stride_plane, splits, b_ptr,
            rank // 8 * 8, scale, FEATURES, MAX_SPLIT, BLOCK_M, WIDE // 2, 32, STAGES, PRECISION,
        )  # fmt: skip
    elif rank <= 64:
        squares = _add_pieces(
            y_rows, hidden_rows, length, v_ptr, stride_v, stride_plane, splits, b_ptr,
            rank // 8 * 8, scale, FEATURES, MAX_SPLIT, BLOCK_M, NARROW, 64, STAGES, PRECISION,
        )  # fmt: skip
    else:
        squares = _add_pieces(
            y_rows, hidden_rows, length, v_ptr, stride_v, stride_plane, splits, b_ptr,
            rank // 8 * 8, scale,
            FEATURES, MAX_SPLIT, BLOCK_M, NARROW // 4, 256, STAGES, PRECISION,
        )  # fmt: skip
    factor = tl.rsqrt(squares / FEATURES + epsilon)
    tl.debug_barrier()  # other threads wrote what is read from here on
    WHOLE: tl.constexpr = PIECE * 16 // BLOCK_M
    _norm(y_rows, hidden_rows, weight_ptr, length, factor, FEATURES, BLOCK_M, WHOLE, STAGES)


@triton.jit
def _add_pieces(
    y_rows: tl.tensor,
    hidden_rows: tl.tensor,
    length: tl.tensor,
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    stride_plane: tl.tensor,
    splits: tl.tensor,
    b_ptr: tl.tensor,
    rank: tl.tensor,
    scale: tl.tensor,
    FEATURES: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> Any:
    """Where the whole rank fits one step: v is read once, pieces of all else are prefetched. The
    sum of hidden's squares, of one row or `[BLOCK_M]`."""
    r = tl.arange(0, BLOCK_R)
    v = load_v(v_ptr, stride_v, stride_plane, splits, r, length, rank, MAX_SPLIT, BLOCK_M)
    squares = zeros(BLOCK_M, PIECE)
    for begin in tl.range(0, FEATURES, PIECE, num_stages=STAGES):
        n = begin + tl.arange(0, PIECE)
        b = load_b(b_ptr, rank, n, r, FEATURES)
        delta = scale * product(v, b, BLOCK_M, PRECISION)
        squares += _add(y_rows, hidden_rows, length, n, delta, FEATURES, BLOCK_M)
    return tl.sum(squares, axis=-1)


@triton.jit
def _add_any_rank(
    y_rows: tl.tensor,
    hidden_rows: tl.tensor,
    length: tl.tensor,
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    stride_plane: tl.tensor,
    splits: tl.tensor,
    b_ptr: tl.tensor,
    rank: tl.tensor,
    scale: tl.tensor,
    FEATURES: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
) -> Any:
    """As `_add_pieces`, BLOCK_R ranks at a time: where rows of B begin anywhere."""
    squares = zeros(BLOCK_M, PIECE)
    for begin in tl.range(0, FEATURES, PIECE, num_stages=1):
        n = begin + tl.arange(0, PIECE)
        delta = scale * low_rank_one(
            v_ptr, stride_v, stride_plane, splits, length, b_ptr, rank, n, FEATURES,
            MAX_SPLIT, BLOCK_M, PIECE, BLOCK_R, PRECISION,
        )  # fmt: skip
        squares += _add(y_rows, hidden_rows, length, n, delta, FEATURES, BLOCK_M)
    return tl.sum(squares, axis=-1)


@triton.jit
def _add(
    y_rows: tl.tensor,
    hidden_rows: tl.tensor,
    length: tl.tensor,
    n: tl.tensor,
    delta: tl.tensor,
    FEATURES: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> Any:
    """`hidden += y + delta` at columns n; the squares of what is stored."""
    y_at, live = _places(y_rows, length, n, FEATURES, BLOCK_M)
    hidden_at, live = _places(hidden_rows, length, n, FEATURES, BLOCK_M)
    hidden = tl.load(hidden_at, mask=live, other=0.0).to(tl.float32)
    hidden += tl.load(y_at, mask=live, other=0.0).to(tl.float32) + delta
    stored = hidden.to(hidden_rows.dtype.element_ty)
    tl.store(hidden_at, stored, mask=live)
    return stored.to(tl.float32) * stored.to(tl.float32)


@triton.jit
def _norm(
    y_rows: tl.tensor,
    hidden_rows: tl.tensor,
    weight_ptr: tl.tensor,
    length: tl.tensor,
    factor: tl.tensor,
    FEATURES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """`y = hidden * factor * weight`; factor: of one row, or `[BLOCK_M]`."""
    if BLOCK_M > 1:
        factor = factor[:, None]
    for begin in tl.range(0, FEATURES, PIECE, num_stages=STAGES):
        n = begin + tl.arange(0, PIECE)
        y_at, live = _places(y_rows, length, n, FEATURES, BLOCK_M)
        hidden_at, live = _places(hidden_rows, length, n, FEATURES, BLOCK_M)
        hidden = tl.load(hidden_at, mask=live, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + n, mask=n < FEATURES, other=0.0).to(tl.float32)
        y = hidden * factor * weight
        tl.store(y_at, y.to(y_rows.dtype.element_ty), mask=live)


@triton.jit
def _places(
    rows: tl.tensor,
    length: tl.tensor,
    n: tl.tensor,
    FEATURES: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[Any, Any]:
    """Addresses of columns n, and which are real; of one row or many."""
    if BLOCK_M == 1:
        return rows + n, n < FEATURES
    else:
        live = (tl.arange(0, BLOCK_M) < length)[:, None] & (n < FEATURES)[None, :]
        return rows[:, None] + n[None, :], live
