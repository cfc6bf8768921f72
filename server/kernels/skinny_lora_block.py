"""LoRA of a product of few rows, in the product's own kernel.

Few rows have few adapters: each row looks up its own, and where several share one the first of them
has it shrunk. `records`: the table as words, ints and floats; site; number of sites. `low`: where
each row's `A x` lies, stride of its planes, and the count of programs that have shrunk.
"""

from typing import Any

import triton
import triton.language as tl

from server.kernels.launch import wait
from server.kernels.low_rank import in_eights
from server.kernels.record import a_at, b_at, ranks_at, record_of, scales_at, total_rank_at
from server.kernels.skinny_block import load_weights, weigh


@triton.constexpr_function
def first_ranks(block_m: int) -> int:
    """Ranks of B that are asked for while registers hold what the product needs."""
    return 64 if block_m == 1 else 16


@triton.constexpr_function
def ranks_at_once(block_m: int) -> int:
    """Of those that come after the product."""
    return 64 if block_m == 1 else 32


@triton.jit
def shrink_all(
    of_x: tl.tuple,
    slots: tl.tensor,
    records: tl.tuple,
    low: tl.tuple,
    programs: tl.tensor,
    span: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """`A x` of every row, by the first programs: an item is BLOCK_N ranks of an adapter and span
    input features, and rows that have another one are computed and dropped. slots: of the rows."""
    table, site, num_sites = records
    record = record_of(slots, site, num_sites)
    ranks = tl.load(total_rank_at(table[1], record), mask=slots >= 0, other=0)
    ranks = tl.where(_seen_before(slots, BLOCK_M), 0, ranks)
    addresses = tl.load(a_at(table[0], record))
    blocks = tl.cdiv(ranks, BLOCK_N)
    ends = tl.cumsum(blocks, axis=0)
    begins = ends - blocks
    for each in range(tl.program_id(0), tl.sum(blocks) * SPLITS, programs):
        item, split = each // SPLITS, each % SPLITS
        its = (begins <= item) & (item < ends)
        rank = tl.sum(tl.where(its, ranks, 0))
        r = (item - tl.sum(tl.where(its, begins, 0))) * BLOCK_N + tl.arange(0, BLOCK_N)
        address = tl.sum(tl.where(its, addresses, 0)).to(tl.pointer_type(of_x[0].dtype.element_ty))
        # Those beyond the last are the last once more: loads then need no mask.
        of_a = (tl.multiple_of(address, 16), tl.minimum(r, rank - 1), rank, of_x[2])
        begin = tl.multiple_of(split * span, BLOCK_K)
        first = load_weights(of_a, begin + tl.arange(0, BLOCK_K), EVEN)
        wait(PDL)
        acc = weigh(
            first, of_a, of_x, begin, tl.minimum(begin + span, of_x[2]),
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN, STAGES, PRECISION,
        )  # fmt: skip
        same = (slots == tl.sum(tl.where(its, slots, 0)))[None, :]
        at = (low[0] + split * low[1])[None, :] + r[:, None]
        tl.store(at, acc, mask=same & (r < rank)[:, None])
    wait(PDL)
    tl.debug_barrier()  # of all threads' stores, before one of them tells
    tl.atomic_add(low[2], 1, sem="release")


@triton.jit
def _seen_before(slots: tl.tensor, BLOCK_M: tl.constexpr) -> Any:
    """Whether an earlier row has the same."""
    m = tl.arange(0, BLOCK_M)
    same = (slots[:, None] == slots[None, :]) & (m[None, :] < m[:, None])
    return tl.max(same.to(tl.int32), axis=1) > 0


@triton.jit
def load_projections(
    slots: tl.tensor,
    records: tl.tuple,
    p: tl.tensor,
    weight_ptr: tl.tensor,
) -> tuple[Any, Any, Any, Any]:
    """Of each row's projection p: rank (0 without an adapter), first rank, scale, address of B, of
    the type of weight_ptr."""
    table, site, num_sites = records
    record = record_of(slots, site, num_sites)
    ranks_ptr = ranks_at(table[1], record)
    rank = tl.load(ranks_ptr + p, mask=slots >= 0, other=0)
    first = tl.where(p > 0, tl.load(ranks_ptr), 0) + tl.where(p > 1, tl.load(ranks_ptr + 1), 0)
    scale = tl.load(scales_at(table[2], record) + p)
    address = tl.load(b_at(table[0], record) + p)
    kind: tl.constexpr = tl.pointer_type(weight_ptr.dtype.element_ty)
    return rank, first, scale, tl.multiple_of(address.to(kind), 16)


@triton.jit
def load_first_b(b: tl.tuple, col: tl.tensor, width: tl.tensor) -> Any:
    """B's first ranks, which are of use where all ranks are multiples of 8: asked for before they
    are needed."""
    return _load_b((b[3], in_eights(b[0])), col, width, 0, first_ranks(b[0].shape[0]))


@triton.jit
def add_low_rank(
    acc: tl.tensor,
    b: tl.tuple,
    first_b: tl.tensor,
    low: tl.tuple,
    col: tl.tensor,
    width: tl.tensor,
    programs: tl.tensor,
    SPLITS: tl.constexpr,
) -> Any:
    """`acc + scale * B (A x)`, float32 `[BLOCK_N, BLOCK_M]`; acc itself, at once, where no row's
    adapter touches the projection."""
    rank, first, scale, b_ptr = b
    if tl.max(rank) > 0:
        while tl.atomic_add(low[2], 0, sem="acquire") < programs:
            pass
        its_low = (low[0] + first, low[1])
        if tl.max(rank % 8) == 0:
            even = in_eights(rank)
            FIRST: tl.constexpr = first_ranks(rank.shape[0])
            delta = _times(first_b, its_low, even, 0, SPLITS)
            delta += _low_rank((b_ptr, even), its_low, col, width, FIRST, SPLITS)
        else:
            delta = _low_rank((b_ptr, rank), its_low, col, width, 0, SPLITS)
        acc += tl.trans(scale[:, None] * delta)
    return acc


@triton.jit
def _low_rank(
    b: tl.tuple,
    low: tl.tuple,
    col: tl.tensor,
    width: tl.tensor,
    FIRST: tl.constexpr,
    SPLITS: tl.constexpr,
) -> Any:
    """Of ranks from FIRST on, `[BLOCK_M, BLOCK_N]`."""
    delta = tl.zeros((b[1].shape[0], col.shape[0]), tl.float32)
    RANKS: tl.constexpr = ranks_at_once(b[1].shape[0])
    for begin in tl.range(FIRST, tl.max(b[1]), RANKS):
        delta += _times(_load_b(b, col, width, begin, RANKS), low, b[1], begin, SPLITS)
    return delta


@triton.jit
def _load_b(
    b: tl.tuple, col: tl.tensor, width: tl.tensor, begin: tl.tensor, RANKS: tl.constexpr
) -> Any:
    """`[BLOCK_M, BLOCK_N, RANKS]`: of each row's adapter."""
    b_ptr, rank = b[0][:, None, None], b[1][:, None, None]
    r = (begin + tl.arange(0, RANKS))[None, None, :]
    n = col[None, :, None]
    return tl.load(b_ptr + n * rank + r, mask=(r < rank) & (n < width), other=0.0)


@triton.jit
def _times(
    weights: tl.tensor,
    low: tl.tuple,
    rank: tl.tensor,
    begin: tl.tensor,
    SPLITS: tl.constexpr,
) -> Any:
    """`[BLOCK_M, BLOCK_N]`. `A x` is new in this very launch: not from a cache of before."""
    r = (begin + tl.arange(0, weights.shape[2]))[None, :]
    at, live = low[0][:, None] + r, r < rank[:, None]
    total = tl.zeros(at.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(at + split * low[1], mask=live, other=0.0, cache_modifier=".cg")
    return tl.sum(weights.to(tl.float32) * total[:, None, :], axis=2)


@triton.jit
def projection_of(
    block: tl.tensor, w0: tl.tensor, w1: tl.tensor, w2: tl.tensor, BLOCK_N: tl.constexpr
) -> tuple[Any, Any, Any, Any]:
    """Of a block of columns: its projection, columns in that, its first column and its width."""
    n0, n1 = tl.cdiv(w0, BLOCK_N), tl.cdiv(w1, BLOCK_N)
    p = (block >= n0).to(tl.int32) + (block >= n0 + n1).to(tl.int32)
    before = tl.where(p == 0, 0, tl.where(p == 1, n0, n0 + n1))
    begin = tl.where(p == 0, 0, tl.where(p == 1, w0, w0 + w1))
    width = tl.where(p == 0, w0, tl.where(p == 1, w1, w2))
    return p, (block - before) * BLOCK_N + tl.arange(0, BLOCK_N), begin, width
