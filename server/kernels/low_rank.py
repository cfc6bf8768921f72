"""`v B^T`, as the kernels share it: v from the workspace's planes, B of one projection.

What goes together goes in tuples. `v`, of one tile: address, stride of a row, stride of a plane,
planes, rows. `b`: address, rank.
"""

from typing import Any

import triton
import triton.language as tl


@triton.jit
def in_eights(rank: tl.tensor) -> Any:
    """The same rank, a multiple of 8, as which the compiler then knows it: it starts every row of B
    at 16 bytes, and they are loaded at once."""
    return rank // 8 * 8


@triton.jit
def low_rank(
    v: tl.tuple,
    b0: tl.tuple,
    b1: tl.tuple,
    n: tl.tensor,
    end: tl.tensor,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[Any, Any]:
    """`v B^T` of two projections at columns n: float32 `[BLOCK_N]` for one row, else `[BLOCK_M,
    BLOCK_N]`."""
    acc0, acc1 = zeros(BLOCK_M, BLOCK_N), zeros(BLOCK_M, BLOCK_N)
    for first in range(0, tl.maximum(b0[1], b1[1]), 16):
        r = first + tl.arange(0, 16)
        # Both on their way before the sums that wait for v.
        weights0, weights1 = load_b(b0, n, r, end), load_b(b1, n, r, end)
        v0 = load_v(v, r, b0[1], MAX_SPLIT, BLOCK_M)
        v1 = load_v(columns_from(v, b0[1]), r, b1[1], MAX_SPLIT, BLOCK_M)
        acc0 += product(v0, weights0, BLOCK_M, PRECISION)
        acc1 += product(v1, weights1, BLOCK_M, PRECISION)
    return acc0, acc1


@triton.jit
def low_rank_one(
    v: tl.tuple,
    b: tl.tuple,
    n: tl.tensor,
    end: tl.tensor,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
) -> Any:
    """`v B^T` of one projection, BLOCK_R ranks at a time; as in `low_rank`."""
    acc = zeros(BLOCK_M, BLOCK_N)
    for first in tl.range(0, b[1], BLOCK_R, num_stages=1):
        r = first + tl.arange(0, BLOCK_R)
        weights = load_b(b, n, r, end)
        acc += product(load_v(v, r, b[1], MAX_SPLIT, BLOCK_M), weights, BLOCK_M, PRECISION)
    return acc


@triton.jit
def zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr) -> Any:
    """Of one row, or of many."""
    if BLOCK_M == 1:
        return tl.zeros((BLOCK_N,), tl.float32)
    else:
        return tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def load_b(b: tl.tuple, n: tl.tensor, r: tl.tensor, end: tl.tensor) -> Any:
    """Columns r of B's rows n, `[len(n), len(r)]`."""
    b_ptr, rank = b
    live = (n < end)[:, None] & (r < rank)[None, :]
    return tl.load(b_ptr + n[:, None] * rank + r[None, :], mask=live, other=0.0)


@triton.jit
def columns_from(v: tl.tuple, first: tl.tensor) -> Any:
    """Of v, from there on."""
    v_ptr, stride_v, stride_plane, splits, length = v
    return v_ptr + first, stride_v, stride_plane, splits, length


@triton.jit
def load_v(
    v: tl.tuple,
    r: tl.tensor,
    rank: tl.tensor,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> Any:
    """Columns r of v, `[BLOCK_M, BLOCK_R]`, or `[BLOCK_R]` for one row: planes in order."""
    v_ptr, stride_v, stride_plane, splits, length = v
    if BLOCK_M == 1:
        at = v_ptr + r
        live = r < rank
    else:
        m = tl.arange(0, BLOCK_M)
        at = v_ptr + m[:, None] * stride_v + r[None, :]
        live = (m < length)[:, None] & (r < rank)[None, :]
    total = tl.load(at, mask=live, other=0.0)
    if MAX_SPLIT > 1:
        planes = tl.where(live, splits, 0)
        for base in range(1, splits, 4):
            # Four loads in flight, few enough for the registers.
            for split in tl.static_range(4):
                part = at + (base + split) * stride_plane
                total += tl.load(part, mask=planes > base + split, other=0.0)
    return total


@triton.jit
def product(v: tl.tensor, b: tl.tensor, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr) -> Any:
    """`v b^T` in float32; one row is done in registers: a tensor core would idle on 15 of 16."""
    if BLOCK_M == 1:
        return tl.sum(b.to(tl.float32) * v[None, :], axis=1)
    else:
        return tl.dot(v.to(b.dtype), tl.trans(b), input_precision=PRECISION)
