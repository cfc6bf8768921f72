"""The linear of few rows with their LoRA fused into it.

Beside a product by these kernels those of LoRA find no room, and in line with it each costs a
launch. So some of the product's own programs shrink, A's rows being weights like W's; each of the
others, when it has its columns, waits for those and expands.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.configs import SkinnyLoraConfig
from loraplex.server.kernels.launch.launch import dot_precision, let_next_start, wait
from loraplex.server.kernels.linear.skinny import (
    MAX_ROWS,
    Blocks,
    check_operands,
    load_weights,
    multiply,
    operands,
    rows_at_once,
    shared_out,
    store_product,
)
from loraplex.server.kernels.linear.stack import (
    Stack,
    add_low_rank,
    load_ahead,
    seen_before,
    stack_of,
)
from loraplex.server.kernels.lora.segments import padded_widths
from loraplex.server.kernels.lora.table import LoraTable
from loraplex.server.kernels.lora.tiles import a_at, record_of, total_rank_at
from loraplex.server.kernels.lora.workspace import Workspace

# Of any value: one compiled kernel serves all.
_NUMBERS = ["rows", "most_rows", "site", "num_sites", "w0", "w1", "w2", "programs", "span"]


@dataclass(frozen=True, slots=True)
class SkinnyLora:
    """The addition of a product to each row: `scale B (A x)` of the row's adapter at a site.

    slots: int32 `[rows]`, -1 = no adapter. widths: output features of the site's projections.
    workspace: its planes take `A x`, by batch row. stack: of these slots; a site's product can run
    once after `stack_rows`.
    """

    table: LoraTable
    site: int
    slots: torch.Tensor
    widths: tuple[int, ...]
    workspace: Workspace
    stack: Stack


def skinny_product_lora(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: SkinnyLoraConfig,
    lora: SkinnyLora,
) -> None:
    """Compute a product of few rows with LoRA in one kernel: `skinny_product`, and `out += scale *
    B (A x)`; a row without an adapter, and a projection that its adapter leaves alone, as if
    LoRA were not there.

    Table, slots and stack were complete when the kernel before this one began. Raises ValueError on
    a mismatch.
    """
    check_operands(x, weight, bias, out, MAX_ROWS)
    (rows, features), n = x.shape, len(weight)
    shrinking = _shrinking(features, config)
    widths = _check_lora(x, lora, n, shrinking)
    even = features % config.block_k == 0
    blocks = sum(triton.cdiv(width, config.block_n) for width in widths)
    table, planes, stack = lora.table, lora.workspace.planes, lora.stack
    _skinny_lora_kernel[(shrinking.programs + blocks,)](
        operands(x, weight, bias, out),
        rows,
        features,
        lora.slots,
        planes,
        stack.tensors,
        stack.rows,
        table.tensors,
        lora.site,
        table.num_sites,
        planes.stride(1),
        planes.stride(0),
        *widths,
        shrinking.programs,
        shrinking.span,
        BLOCK_M=rows_at_once(rows),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        EVEN=even and all(width % config.block_n == 0 for width in widths),
        EVEN_K=even,
        BIAS=bias is not None,
        SPLITS=shrinking.splits,
        STAGES=config.num_stages,
        PRECISION=dot_precision(x.dtype),
        PDL=config.programmatic_launch,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
        launch_pdl=config.programmatic_launch,
    )


@dataclass(frozen=True, slots=True)
class _Shrinking:
    """How `A x` is shared out: among so many programs, its input features in so many parts, which
    but for the last have `span` each."""

    programs: int
    splits: int
    span: int


def _shrinking(features: int, config: SkinnyLoraConfig) -> _Shrinking:
    """A part is of whole steps. Parts, since `A x` is wanted before a program of the product has
    gone through all input features."""
    if min(config.lora_programs, config.lora_splits) < 1:
        raise ValueError("launch parameters without programs that shrink")
    parts = shared_out(features, config.block_k, config.lora_splits)
    return _Shrinking(config.lora_programs, *parts)


def _check_lora(
    x: torch.Tensor, lora: SkinnyLora, features: int, shrinking: _Shrinking
) -> tuple[int, int, int]:
    """Widths of three projections."""
    workspace = lora.workspace
    lora.table.check_site(lora.site)
    if lora.slots.shape != x.shape[:1] or lora.slots.dtype != torch.int32:
        raise ValueError(f"slots are {lora.slots.dtype} {list(lora.slots.shape)}, {len(x)} rows")
    if workspace.dtype != x.dtype or workspace.rows < len(x):
        of = f"{workspace.rows} rows of {workspace.dtype}"
        raise ValueError(f"a workspace of {of}, x is {x.dtype} {list(x.shape)}")
    if workspace.max_split < shrinking.splits:
        raise ValueError(f"{shrinking.splits} splits, a workspace of {workspace.max_split}")
    lora.stack.check_fits(len(x), lora.table.num_sites)
    return padded_widths(lora.widths, features)


@triton.jit(
    do_not_specialize=_NUMBERS,
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _skinny_lora_kernel(
    product: tl.tuple,
    rows: tl.tensor,
    in_features: tl.tensor,
    slots_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    stack: tl.tuple,
    most_rows: tl.tensor,
    table: tl.tuple,
    site: tl.tensor,
    num_sites: tl.tensor,
    stride_low: tl.tensor,
    stride_plane: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    programs: tl.tensor,
    span: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The first `programs` shrink: they are started first, so that who waits for them does not wait
    for ever. product: as of `operands`."""
    let_next_start(PDL)
    x_ptr, weight_ptr, bias_ptr, out_ptr, stride_x, stride_out = product
    m = tl.arange(0, BLOCK_M)
    of_x = (x_ptr + m * stride_x, m < rows, in_features)
    low = (planes_ptr + m * stride_low, stride_plane, stack[0] + site)
    if tl.program_id(0) < programs:
        slots = tl.load(slots_ptr + m, mask=m < rows, other=-1)
        _shrink_all(
            of_x, slots, (table, site, num_sites), low, programs, span,
            Blocks(BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, STAGES, PRECISION), SPLITS, PDL,
        )  # fmt: skip
    else:
        p, col, begin, width = _projection_of(tl.program_id(0) - programs, w0, w1, w2, BLOCK_N)
        of_out = (weight_ptr, begin + col, begin + width, in_features)
        its = stack_of(stack, 3 * site + p, most_rows, rows, BLOCK_M)
        of_b = (weight_ptr, col, width)
        first = load_weights(of_out, tl.arange(0, BLOCK_K), EVEN)
        ahead = load_ahead(its, of_b, EVEN)
        wait(PDL)
        acc = multiply(
            first, of_out, of_x, 0, in_features,
            Blocks(BLOCK_M, BLOCK_N, BLOCK_K, EVEN, STAGES, PRECISION),
        )  # fmt: skip
        acc = add_low_rank(acc, ahead, its, of_b, low, programs, EVEN, SPLITS, PRECISION, PDL)
        store_product((out_ptr + m * stride_out, m < rows, bias_ptr), acc, *of_out[1:3], BIAS)


# Few rows have few adapters: each row looks up its own. Where several rows share one, the first of
# them has it shrunk. `records`: the table as words, ints and floats; site; number of sites. `low`
# is that of `stack.add_low_rank`.


@triton.jit
def _shrink_all(
    of_x: tl.tuple,
    slots: tl.tensor,
    records: tl.tuple,
    low: tl.tuple,
    programs: tl.tensor,
    span: tl.tensor,
    blocks: Blocks,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """`A x` of every row, by the first programs: an item is a block's ranks of an adapter and span
    input features, and rows that have another one are computed and dropped. slots: of the rows."""
    table, site, num_sites = records
    record = record_of(slots, site, num_sites)
    ranks = tl.load(total_rank_at(table[1], record), mask=slots >= 0, other=0)
    ranks = tl.where(seen_before(slots), 0, ranks)
    addresses = tl.load(a_at(table[0], record))
    items = tl.cdiv(ranks, blocks.outputs)
    ends = tl.cumsum(items, axis=0)
    begins = ends - items
    for each in range(tl.program_id(0), tl.sum(items) * SPLITS, programs):
        item, split = each // SPLITS, each % SPLITS
        its = (begins <= item) & (item < ends)
        rank = tl.sum(tl.where(its, ranks, 0))
        before = tl.sum(tl.where(its, begins, 0))
        r = (item - before) * blocks.outputs + tl.arange(0, blocks.outputs)
        address = tl.sum(tl.where(its, addresses, 0)).to(tl.pointer_type(of_x[0].dtype.element_ty))
        # Those beyond the last are the last once more: loads then need no mask.
        of_a = (tl.multiple_of(address, 16), tl.minimum(r, rank - 1), rank, of_x[2])
        begin = tl.multiple_of(split * span, blocks.inputs)
        first = load_weights(of_a, begin + tl.arange(0, blocks.inputs), blocks.even)
        wait(PDL)
        acc = multiply(first, of_a, of_x, begin, tl.minimum(begin + span, of_x[2]), blocks)
        same = (slots == tl.sum(tl.where(its, slots, 0)))[None, :]
        at = (low[0] + split * low[1])[None, :] + r[:, None]
        tl.store(at, acc, mask=same & (r < rank)[:, None])
    wait(PDL)
    tl.debug_barrier()  # of all threads' stores, before one of them tells
    tl.atomic_add(low[2], 1, sem="release")


@triton.jit
def _projection_of(
    block: tl.tensor, w0: tl.tensor, w1: tl.tensor, w2: tl.tensor, BLOCK_N: tl.constexpr
) -> tuple[Any, Any, Any, Any]:
    """A block's projection, its columns in that, the projection's first column and width."""
    n0, n1 = tl.cdiv(w0, BLOCK_N), tl.cdiv(w1, BLOCK_N)
    p = (block >= n0).to(tl.int32) + (block >= n0 + n1).to(tl.int32)
    before = tl.where(p == 0, 0, tl.where(p == 1, n0, n0 + n1))
    begin = tl.where(p == 0, 0, tl.where(p == 1, w0, w0 + w1))
    width = tl.where(p == 0, w0, tl.where(p == 1, w1, w2))
    return p, (block - before) * BLOCK_N + tl.arange(0, BLOCK_N), begin, width
