"""`v B^T`, as the kernels share it: v from the workspace's planes, B of one projection."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Shrunk(NamedTuple):
    """Result of shrink for one tile. v: what shrink left for one tile. ptr: its first row and rank;
    splits: how many planes there are; rows: how many the tile has.
    """

    ptr: Any
    row_stride: Any
    plane_stride: Any
    splits: Any
    rows: Any


class LoraB(NamedTuple):
    """B of one projection: `[out_features, rank]`."""

    ptr: Any
    rank: Any


class LowRank(NamedTuple):
    """`scale * v B^T` of one projection."""

    v: Shrunk
    b: LoraB
    scale: Any


@triton.jit
def even_rank(low: LowRank) -> Any:
    """The same, whose rank is a multiple of 8; see `in_eights`."""
    return LowRank(low.v, even(low.b), low.scale)


@triton.jit
def even(b: LoraB) -> Any:
    """The same B, whose rank is a multiple of 8; see `in_eights`."""
    return LoraB(b.ptr, in_eights(b.rank))


@triton.jit
def in_eights(rank: tl.tensor) -> Any:
    """The same rank, a multiple of 8, as which the compiler then knows it: it starts every row of B
    at 16 bytes, and they are loaded at once."""
    return rank // 8 * 8


@triton.jit
def low_rank(
    v: Shrunk,
    b0: LoraB,
    b1: LoraB,
    n: tl.tensor,
    end: tl.tensor,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[Any, Any]:
    """`v B^T` of two projections at columns n, float32 `[BLOCK_M, BLOCK_N]`."""
    acc0 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc1 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in tl.range(0, tl.maximum(b0.rank, b1.rank), 16, num_stages=1):
        r = first + tl.arange(0, 16)
        # Both on their way before the sums that wait for v.
        weights0, weights1 = load_b(b0, n, r, end), load_b(b1, n, r, end)
        v0 = load_v(v, r, b0.rank, MAX_SPLIT, BLOCK_M)
        v1 = load_v(columns_from(v, b0.rank), r, b1.rank, MAX_SPLIT, BLOCK_M)
        acc0 += product(v0, weights0, BLOCK_M, PRECISION)
        acc1 += product(v1, weights1, BLOCK_M, PRECISION)
    return acc0, acc1


@triton.jit
def low_rank_one(
    v: Shrunk,
    b: LoraB,
    n: tl.tensor,
    end: tl.tensor,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
) -> Any:
    """`v B^T` of one projection, BLOCK_R ranks at a time; as in `low_rank`."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in tl.range(0, b.rank, BLOCK_R, num_stages=1):
        r = first + tl.arange(0, BLOCK_R)
        weights = load_b(b, n, r, end)
        acc += product(load_v(v, r, b.rank, MAX_SPLIT, BLOCK_M), weights, BLOCK_M, PRECISION)
    return acc


@triton.jit
def load_b(
    b: LoraB, n: tl.tensor, r: tl.tensor, end: tl.tensor, WHOLE: tl.constexpr = False
) -> Any:
    """Columns r of B's rows n, `[len(n), len(r)]`. WHOLE: all n are before the end."""
    live = (r < b.rank)[None, :]
    if not WHOLE:
        live &= (n < end)[:, None]
    return tl.load(b.ptr + n[:, None] * b.rank + r[None, :], mask=live, other=0.0)


@triton.jit
def columns_from(v: Shrunk, first: tl.tensor) -> Any:
    """v from rank `first` on."""
    return Shrunk(v.ptr + first, v.row_stride, v.plane_stride, v.splits, v.rows)


@triton.jit
def load_v(
    v: Shrunk,
    r: tl.tensor,
    rank: tl.tensor,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> Any:
    """Columns r of v, `[BLOCK_M, BLOCK_R]`: planes in order."""
    m = tl.arange(0, BLOCK_M)
    at = v.ptr + m[:, None] * v.row_stride + r[None, :]
    live = (m < v.rows)[:, None] & (r < rank)[None, :]
    AT_ONCE: tl.constexpr = planes_at_once(MAX_SPLIT, BLOCK_M * r.shape[0])
    total = tl.zeros((BLOCK_M, r.shape[0]), tl.float32)
    if AT_ONCE == MAX_SPLIT:
        # The number of planes is loaded at the same time.
        for split in tl.static_range(MAX_SPLIT):
            part = tl.load(at + split * v.plane_stride, mask=live, other=0.0)
            total += tl.where(split < v.splits, part, 0.0)
    else:
        planes = tl.where(live, v.splits, 0)
        for base in range(0, v.splits, AT_ONCE):
            for split in tl.static_range(AT_ONCE):
                part = at + (base + split) * v.plane_stride
                total += tl.load(part, mask=planes > base + split, other=0.0)
    return total


@triton.constexpr_function
def planes_at_once(max_split: int, elements: int) -> int:
    """Loads in flight, few enough for the registers."""
    return min(max_split, 8 if elements <= 128 else 4)


@triton.jit
def product(v: tl.tensor, b: tl.tensor, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr) -> Any:
    """`v b^T`, float32 `[BLOCK_M, len(b)]`. Few rows are the tensor cores' 8 columns, not their 16
    rows, of which all warps would have the same."""
    low = v.to(b.dtype)
    if BLOCK_M <= 16:
        return tl.trans(tl.dot(b, tl.trans(low), input_precision=PRECISION))
    else:
        return tl.dot(low, tl.trans(b), input_precision=PRECISION)
