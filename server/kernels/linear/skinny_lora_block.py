"""LoRA of a product of few rows, in the product's own kernel.

Few rows have few adapters: each row looks up its own, and where several share one the first of them
has it shrunk. `records`: the table as words, ints and floats; site; number of sites. `low`: where
each row's `A x` lies, stride of its planes, and the count of programs that have shrunk.
"""

from typing import Any

import triton
import triton.language as tl

from server.kernels.launch.launch import wait
from server.kernels.linear.skinny_block import load_weights, weigh
from server.kernels.linear.stack import seen_before
from server.kernels.lora.record import a_at, record_of, total_rank_at


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
    ranks = tl.where(seen_before(slots), 0, ranks)
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
