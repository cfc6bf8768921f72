"""What a product of few rows adds from the stack of its adapters (`stack.Stack` says what).

What goes together goes in tuples. `stack`, of one projection: addresses of starts, ranks and left;
of each row where its ranks begin and end, the first in its low, less that, and its scale; both
counts. `of_b`: weight_ptr, of whose type B is, columns within the projection, its width. `low`: as
in `skinny_lora_block`.
"""

from typing import Any

import triton
import triton.language as tl

from server.kernels.launch.launch import still_to_come
from server.kernels.linear.stack import EIGHTS_OF_ROW
from server.kernels.lora.low_rank import in_eights


@triton.constexpr_function
def ranks_ahead(block_m: int) -> int:
    """Ranks of the stack that are asked for before the product, twice: as many as there are
    registers for beside what it needs. Twice as many at once come after it."""
    return 64 if block_m == 1 else 128


@triton.jit
def stack_of(
    stack: tl.tuple, its: tl.tensor, most_rows: tl.tensor, rows: tl.tensor, BLOCK_M: tl.constexpr
) -> Any:
    """stack: all of it. its: 3 * site + projection. most_rows: those that it has room for."""
    _, starts_ptr, ranks_ptr, left_ptr, spans_ptr, scales_ptr, counts_ptr = stack
    eights = its * most_rows * EIGHTS_OF_ROW
    m = tl.arange(0, BLOCK_M)
    span_ptr = spans_ptr + its * 3 * most_rows + m
    return (
        starts_ptr + eights,
        ranks_ptr + eights,
        left_ptr + eights,
        tl.load(span_ptr, mask=m < rows, other=0),
        tl.load(span_ptr + most_rows, mask=m < rows, other=0),
        tl.load(span_ptr + 2 * most_rows, mask=m < rows, other=0),
        tl.load(scales_ptr + its * most_rows + m, mask=m < rows, other=0.0),
        tl.load(counts_ptr + its * 2),
        tl.load(counts_ptr + its * 2 + 1),
    )


@triton.jit
def load_ahead(stack: tl.tuple, of_b: tl.tuple, EVEN: tl.constexpr) -> tuple[Any, Any]:
    """B of the stack's first ranks, and of the next, where all are multiples of 8: asked for before
    they are needed."""
    RANKS: tl.constexpr = ranks_ahead(stack[3].shape[0])
    first = _load_b(stack, of_b, stack[7], 0, RANKS, EVEN, True)
    return first, _load_b(stack, of_b, stack[7], RANKS, RANKS, EVEN, True)


@triton.jit
def add_low_rank(
    acc: tl.tensor,
    ahead: tl.tuple,
    stack: tl.tuple,
    of_b: tl.tuple,
    low: tl.tuple,
    programs: tl.tensor,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> Any:
    """`acc + scale * B (A x)`, float32 `[BLOCK_N, BLOCK_M]`; acc itself, at once, where no row's
    adapter touches the projection. EVEN: all columns are real."""
    eights, odd = stack[7], stack[8]
    if eights + odd > 0:
        while tl.atomic_add(low[2], 0, sem="acquire") < programs:
            pass
        AHEAD: tl.constexpr = ranks_ahead(stack[3].shape[0])
        LATER: tl.constexpr = 2 * AHEAD
        if eights > 0:
            its_low = _load_low(low, stack, 0, AHEAD, SPLITS, True)
            acc = _add(acc, still_to_come(ahead[0], PDL), its_low, PRECISION)
        if eights * 8 > AHEAD:
            its_low = _load_low(low, stack, AHEAD, AHEAD, SPLITS, True)
            acc = _add(acc, still_to_come(ahead[1], PDL), its_low, PRECISION)
        for begin in tl.range(LATER, eights * 8, LATER, num_stages=1):
            b = _load_b(stack, of_b, eights, begin, LATER, EVEN, True)
            acc = _add(acc, b, _load_low(low, stack, begin, LATER, SPLITS, True), PRECISION)
        for begin in tl.range(0, odd * 8, 16, num_stages=1):
            b = _load_b(stack, of_b, odd, begin, 16, EVEN, False)
            acc = _add(acc, b, _load_low(low, stack, begin, 16, SPLITS, False), PRECISION)
    return acc


@triton.jit
def _add(acc: tl.tensor, b: tl.tensor, low: tl.tensor, PRECISION: tl.constexpr) -> Any:
    """`acc + B low^T`."""
    if low.shape[0] == 1:
        return acc + tl.sum(b.to(tl.float32) * low, axis=1)[:, None]
    else:
        return tl.dot(b, tl.trans(low.to(b.dtype)), acc, input_precision=PRECISION)


@triton.jit
def _load_b(
    stack: tl.tuple,
    of_b: tl.tuple,
    count: tl.tensor,
    begin: tl.tensor,
    RANKS: tl.constexpr,
    EVEN: tl.constexpr,
    ALL_EIGHTS: tl.constexpr,
) -> Any:
    """`[BLOCK_N, RANKS]` from rank `begin` of the stack on, which has `count` eights. ALL_EIGHTS:
    all ranks are multiples of 8."""
    weight_ptr, col, width = of_b
    eight = begin // 8 + tl.arange(0, RANKS // 8)
    start = _of_each(tl.load(stack[0] + eight)).to(weight_ptr.dtype)
    stride = _of_each(tl.load(stack[1] + eight))
    within = tl.arange(0, RANKS) % 8
    live = _of_each(eight) < count
    if not ALL_EIGHTS:
        live = live & (within < _of_each(tl.load(stack[2] + eight)))
    at = start[None, :] + (col[:, None] * stride[None, :] + within[None, :])
    live = tl.broadcast_to(live[None, :], at.shape)
    if ALL_EIGHTS:
        at = tl.max_contiguous(tl.multiple_of(at, (1, 16)), (1, 8))
        live = tl.max_constancy(live, (1, 8))
    if not EVEN:
        live = live & (col < width)[:, None]
    return tl.load(at, mask=live, other=0.0)


@triton.jit
def _of_each(of_eight: tl.tensor) -> Any:
    """Of each rank, what is of eight."""
    eights: tl.constexpr = of_eight.shape[0]
    return tl.reshape(tl.broadcast_to(of_eight[:, None], (eights, 8)), (eights * 8,))


@triton.jit
def _load_low(
    low: tl.tuple,
    stack: tl.tuple,
    begin: tl.tensor,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    ALL_EIGHTS: tl.constexpr,
) -> Any:
    """`scale * A x` where a row's adapter has its ranks in the stack, else 0: `[BLOCK_M, RANKS]`.
    It is new in this very launch: not from a cache of before."""
    first, end, shift = stack[3], stack[4], stack[5]
    if ALL_EIGHTS:
        first, end, shift = in_eights(first), in_eights(end), in_eights(shift)
    r = (begin + tl.arange(0, RANKS))[None, :]
    live = (r >= first[:, None]) & (r < end[:, None])
    at = low[0][:, None] + (r + shift[:, None])
    total = tl.zeros(at.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(at + split * low[1], mask=live, other=0.0, cache_modifier=".cg")
    return total * stack[6][:, None]
