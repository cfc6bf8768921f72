"""B of all rows' adapters as more input features of a linear: the device finds each adapter's.

The ranks of a projection's adapters are stacked, each adapter's from a multiple of 8 on, and its
product multiplies B's rows with `A x` as it does W's with x. Where several rows share an adapter,
the first of them has its ranks stacked. A captured graph so stays valid for any adapters.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import still_to_come
from loraplex.server.kernels.linear.skinny import rows_at_once
from loraplex.server.kernels.lora.table import MAX_PROJECTIONS, MAX_RANK, LoraTable
from loraplex.server.kernels.lora.tiles import b_at, in_eights, ranks_at, record_of, scales_at

EIGHTS_OF_ROW: tl.constexpr = tl.constexpr(MAX_RANK // 8)
_PROJECTIONS = tl.constexpr(MAX_PROJECTIONS)


@dataclass(frozen=True, slots=True)
class Stack:
    """Stacks of B for batches of up to `rows` rows, for each projection of each site: `[num_sites,
    3, ...]`.

    Some parts go by eights of ranks, of which there are 32 * rows at most, and 0 beyond them up to
    a multiple of 32. starts int64 `[eights]`: address of the first output feature's weights; ranks
    int32 `[eights]`: of the adapter, from one output feature's weights to the next; left int32
    `[eights]`: ranks from there on.

    Other parts go by rows. spans int32 `[3, rows]`: where the row's ranks begin in the stack and
    where they end, and its first rank among the site's less where they begin; scales float32
    `[rows]`. counts int32 `[2]`: eights where all ranks are multiples of 8, eights where not; one
    is 0.

    arrivals int32 `[num_sites]`: programs that have shrunk; 0 before the step's products. dtype: of
    the weights.
    """

    rows: int
    dtype: torch.dtype
    starts: torch.Tensor
    ranks: torch.Tensor
    left: torch.Tensor
    spans: torch.Tensor
    scales: torch.Tensor
    counts: torch.Tensor
    arrivals: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors of the stack, in the order in which kernels take them."""
        of_eights, of_rows = (self.starts, self.ranks, self.left), (self.spans, self.scales)
        return (self.arrivals, *of_eights, *of_rows, self.counts)

    def check_fits(self, rows: int, num_sites: int) -> None:
        """Check that the stack is for such a batch and table. Raises ValueError where it is not."""
        if not 0 < rows <= self.rows or len(self.arrivals) != num_sites:
            of = f"{self.rows} rows and {len(self.arrivals)} sites"
            raise ValueError(f"a stack of {of}, {rows} rows and {num_sites} sites")


def allocate_stack(
    rows: int, num_sites: int, dtype: torch.dtype, device: torch.device | str
) -> Stack:
    """Allocate a stack for batches of up to `rows` rows; its content is undefined. Raises
    ValueError without rows or sites.
    """
    if rows < 1 or num_sites < 1:
        raise ValueError(f"expected at least one row and site, got {rows}, {num_sites}")
    eights = rows * EIGHTS_OF_ROW

    def of_each(*shape: int, of: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(num_sites, MAX_PROJECTIONS, *shape, dtype=of, device=device)

    return Stack(
        rows,
        dtype,
        of_each(eights, of=torch.int64),
        of_each(eights),
        of_each(eights),
        of_each(3, rows),
        of_each(rows, of=torch.float32),
        of_each(2),
        torch.empty(num_sites, dtype=torch.int32, device=device),
    )


def stack_rows(slots: torch.Tensor, stack: Stack, table: LoraTable) -> None:
    """Fill `stack` from `slots` `[rows]` int32 (-1 = no adapter): one kernel, no sync. It must have
    ended when the kernel before the first product begins, since products read it early. Raises
    ValueError on a mismatch.
    """
    rows = len(slots)
    if slots.dtype != torch.int32 or slots.dim() != 1 or not slots.is_contiguous():
        raise ValueError(f"slots must be contiguous int32, got {slots.dtype} {list(slots.shape)}")
    stack.check_fits(rows, table.num_sites)
    _stack_kernel[(table.num_sites,)](
        slots,
        rows,
        table.tensors,
        stack.tensors,
        table.num_sites,
        stack.rows,
        BLOCK_M=rows_at_once(rows),
        ITEMSIZE=stack.dtype.itemsize,
        num_warps=1,
    )


@triton.jit(
    do_not_specialize=["rows", "num_sites", "most_rows"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _stack_kernel(
    slots_ptr: tl.tensor,
    rows: tl.tensor,
    table: tl.tuple,
    stack: tl.tuple,
    num_sites: tl.tensor,
    most_rows: tl.tensor,
    BLOCK_M: tl.constexpr,
    ITEMSIZE: tl.constexpr,
) -> None:
    """A program has a site."""
    site = tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    slots = tl.load(slots_ptr + m, mask=m < rows, other=-1)
    record = record_of(slots, site, num_sites)
    arrivals_ptr, starts_ptr, ranks_ptr, left_ptr, spans_ptr, scales_ptr, counts_ptr = stack
    tl.store(arrivals_ptr + site, 0)
    same, seen = slots[:, None] == slots[None, :], seen_before(slots)
    first = tl.zeros((BLOCK_M,), tl.int32)
    for p in tl.static_range(_PROJECTIONS):
        its = site * _PROJECTIONS + p
        rank = tl.load(ranks_at(table[1], record) + p, mask=slots >= 0, other=0)
        address = tl.load(b_at(table[0], record) + p, mask=slots >= 0, other=0)
        scale = tl.load(scales_at(table[2], record) + p, mask=slots >= 0, other=0.0)
        of_each = tl.where(seen, 0, tl.cdiv(rank, 8))
        ends = tl.cumsum(of_each, axis=0)
        begins = ends - of_each
        count = tl.sum(of_each)
        odd = tl.max(tl.where(rank > 0, rank | first, 0) % 8) > 0
        tl.store(counts_ptr + its * 2, tl.where(odd, 0, count))
        tl.store(counts_ptr + its * 2 + 1, tl.where(odd, count, 0))
        begin = tl.min(tl.where(same, begins[None, :], 1 << 30), axis=1) * 8
        span_ptr = spans_ptr + its * 3 * most_rows + m
        tl.store(span_ptr, begin, mask=m < rows)
        tl.store(span_ptr + most_rows, begin + rank, mask=m < rows)
        tl.store(span_ptr + 2 * most_rows, first - begin, mask=m < rows)
        tl.store(scales_ptr + its * most_rows + m, scale, mask=m < rows)
        # Whole blocks, and one at least: who reads ahead finds no address where there is no rank.
        for start in range(0, tl.maximum(count, 1), 32):
            eight = start + tl.arange(0, 32)
            of = (begins[:, None] <= eight[None, :]) & (eight[None, :] < ends[:, None])
            its_rank = tl.sum(tl.where(of, rank[:, None], 0), axis=0)
            r = (eight - tl.sum(tl.where(of, begins[:, None], 0), axis=0)) * 8
            r = tl.where(eight < count, r, 0)
            its_start = tl.sum(tl.where(of, address[:, None], 0), axis=0) + r * ITEMSIZE
            at = its * most_rows * EIGHTS_OF_ROW + eight
            tl.store(starts_ptr + at, its_start)
            tl.store(ranks_ptr + at, its_rank)
            tl.store(left_ptr + at, its_rank - r)
        first += rank


@triton.jit
def seen_before(slots: tl.tensor) -> tl.tensor:
    """Whether an earlier row has the same adapter, for each row."""
    m = tl.arange(0, slots.shape[0])
    same = (slots[:, None] == slots[None, :]) & (m[None, :] < m[:, None])
    return tl.max(same.to(tl.int32), axis=1) > 0


# What a product of few rows adds from the stack of its adapters. `stack`, of one projection:
# addresses of starts, ranks and left; of each row where its ranks begin and end, the first in its
# low, less that, and its scale; both counts. `of_b`: weight_ptr, of whose type B is, columns within
# the projection, its width. `low`: where each row's `A x` lies, stride of its planes, and the count
# of programs that have shrunk.


@triton.constexpr_function
def _ranks_ahead(block_m: int) -> int:
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
    """B of the stack's first ranks, and of as many after them, each `[BLOCK_N, ranks]`: asked for
    before they are needed. Zeros where not all ranks are multiples of 8. EVEN: all columns are
    real."""
    RANKS: tl.constexpr = _ranks_ahead(stack[3].shape[0])
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
        AHEAD: tl.constexpr = _ranks_ahead(stack[3].shape[0])
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
    """The value of each rank, from the values of eights."""
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
    It is new in this very launch: no older cached value may be read."""
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
