"""`v B^T`, as the kernels share it: v from the workspace's planes, B of one projection."""

from typing import Any

import triton
import triton.language as tl


@triton.jit
def low_rank(
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    stride_plane: tl.tensor,
    splits: tl.tensor,
    length: tl.tensor,
    b0_ptr: tl.tensor,
    b1_ptr: tl.tensor,
    rank0: tl.tensor,
    rank1: tl.tensor,
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
    for first in range(0, tl.maximum(rank0, rank1), 16):
        r = first + tl.arange(0, 16)
        # Both on their way before the sums that wait for v.
        b0 = load_b(b0_ptr, rank0, n, r, end)
        b1 = load_b(b1_ptr, rank1, n, r, end)
        v0 = load_v(v_ptr, stride_v, stride_plane, splits, r, length, rank0, MAX_SPLIT, BLOCK_M)
        v1 = load_v(
            v_ptr + rank0, stride_v, stride_plane, splits, r, length, rank1, MAX_SPLIT, BLOCK_M
        )
        acc0 += product(v0, b0, BLOCK_M, PRECISION)
        acc1 += product(v1, b1, BLOCK_M, PRECISION)
    return acc0, acc1


@triton.jit
def low_rank_one(
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    stride_plane: tl.tensor,
    splits: tl.tensor,
    length: tl.tensor,
    b_ptr: tl.tensor,
    rank: tl.tensor,
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
    for first in tl.range(0, rank, BLOCK_R, num_stages=1):
        r = first + tl.arange(0, BLOCK_R)
        b = load_b(b_ptr, rank, n, r, end)
        v = load_v(v_ptr, stride_v, stride_plane, splits, r, length, rank, MAX_SPLIT, BLOCK_M)
        acc += product(v, b, BLOCK_M, PRECISION)
    return acc


@triton.jit
def zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr) -> Any:
    """Of one row, or of many."""
    if BLOCK_M == 1:
        return tl.zeros((BLOCK_N,), tl.float32)
    else:
        return tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def load_b(b_ptr: tl.tensor, rank: tl.tensor, n: tl.tensor, r: tl.tensor, end: tl.tensor) -> Any:
    """Columns r of B's rows n, `[len(n), len(r)]`."""
    live = (n < end)[:, None] & (r < rank)[None, :]
    return tl.load(b_ptr + n[:, None] * rank + r[None, :], mask=live, other=0.0)


@triton.jit
def load_v(
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    stride_plane: tl.tensor,
    splits: tl.tensor,
    r: tl.tensor,
    length: tl.tensor,
    rank: tl.tensor,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> Any:
    """Columns r of v, `[BLOCK_M, BLOCK_R]`, or `[BLOCK_R]` for one row: planes in order."""
    if BLOCK_M == 1:
        at = v_ptr + r
        live = r < rank
    else:
        m = tl.arange(0, BLOCK_M)
        at = v_ptr + m[:, None] * stride_v + r[None, :]
        live = (m < length)[:, None] & (r < rank)[None, :]
    v = tl.load(at, mask=live, other=0.0)
    if MAX_SPLIT > 1:
        planes = tl.where(live, splits, 0)
        for base in range(1, splits, 4):
            # Four loads in flight, few enough for the registers.
            for split in tl.static_range(4):
                part = at + (base + split) * stride_plane
                v += tl.load(part, mask=planes > base + split, other=0.0)
    return v


@triton.jit
def product(v: tl.tensor, b: tl.tensor, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr) -> Any:
    """`v b^T` in float32; one row is done in registers: a tensor core would idle on 15 of 16."""
    if BLOCK_M == 1:
        return tl.sum(b.to(tl.float32) * v[None, :], axis=1)
    else:
        return tl.dot(v.to(b.dtype), tl.trans(b), input_precision=PRECISION)
