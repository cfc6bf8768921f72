"""LoRA on experts: `y += scale * B (A x)` of each row's adapter and expert, in two kernels.

Rows of a tile share an expert. A program takes 16 of them, and goes through their adapters: beside
prompts these are few, and beside decodes the rows are. So no rows are sorted by adapter.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import follow
from loraplex.server.kernels.lora.table import MAX_RANK, LoraTable
from loraplex.server.kernels.lora.tiles import (
    a_at,
    b_at,
    ranks_at,
    record_of,
    scales_at,
    total_rank_at,
)
from loraplex.server.kernels.moe.grouped import ExpertTiles

_ROWS = tl.constexpr(16)
_RANKS = tl.constexpr(16)
# Programs that share the ranks of A, and by a tile's rows those that share its adapters: of few
# rows each may have one of its own.
_RANK_SPLITS = 2
_ADAPTER_SPLITS = {16: 8, 32: 4, 64: 2}
_BLOCK_N, _BLOCK_K = 128, 128


@dataclass(frozen=True, slots=True)
class ExpertLora:
    """LoRA at one site of experts, for a batch. site: of experts, a number of the table. widths:
    output features of its projections. slots: int32 `[tokens]`, -1 = no adapter.
    """

    table: LoraTable
    site: int
    widths: tuple[int, ...]
    slots: torch.Tensor


def add_expert_lora(
    x: torch.Tensor,
    y: torch.Tensor,
    tiles: ExpertTiles,
    lora: ExpertLora,
    *,
    programmatic_launch: bool,
) -> None:
    """Add LoRA to the outputs of a batch's experts. x: `[tokens, in]`, or `[rows, in]`; y: `[rows,
    sum(widths)]`, one or two projections side by side; both contiguous, of the adapters' dtype.
    Adapters whose ranks are 0 at the site change nothing. Raises ValueError on a mismatch.
    """
    check_expert_lora(y, tiles, lora)
    rows, top_k, widths = len(tiles.order), tiles.top_k, lora.widths
    stride = len(widths) * MAX_RANK
    bridge = torch.empty(rows, stride, dtype=x.dtype, device=x.device)
    parts = len(tiles.tiles) * (tiles.tile_rows // _ROWS.value)
    table = (lora.table.words, lora.table.ints, lora.table.floats)
    context = (table, lora.site, lora.table.num_sites, lora.slots, tiles.order, tiles.tiles)
    sizes: dict[str, int] = {"TILE_ROWS": tiles.tile_rows, "TOP_K": top_k, "STRIDE": stride}
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    splits = _ADAPTER_SPLITS.get(tiles.tile_rows, 1)
    _shrink_experts_kernel[(parts, _RANK_SPLITS, splits)](
        x,
        bridge,
        *context,
        **sizes,
        SHARE=rows // len(x),
        IN=x.shape[1],
        BLOCK_K=_BLOCK_K,
        PRECISION=precision,
        PDL=programmatic_launch,
        num_warps=4,
        launch_pdl=programmatic_launch,
    )
    blocks = [triton.cdiv(width, _BLOCK_N) for width in widths]
    _expand_experts_kernel[(parts, sum(blocks), splits)](
        bridge,
        y,
        *context,
        **sizes,
        FIRST=widths[0],
        SECOND=sum(widths[1:]),
        BLOCK_N=_BLOCK_N,
        PRECISION=precision,
        PDL=programmatic_launch,
        num_warps=4,
        launch_pdl=programmatic_launch,
    )


def check_expert_lora(y: torch.Tensor, tiles: ExpertTiles, lora: ExpertLora) -> None:
    """Check that outputs, tiles and LoRA fit each other. Raises ValueError where they do not."""
    rows, widths = len(tiles.order), lora.widths
    if (
        not 1 <= len(widths) <= 2
        or y.shape != (rows, sum(widths))
        or len(lora.slots) * tiles.top_k != rows
    ):
        raise ValueError(f"y {list(y.shape)} is not of {rows} rows and features {widths}")
    lora.table.check_site(lora.site)


@triton.jit(do_not_specialize=["site", "num_sites"], do_not_specialize_on_alignment=["slots_ptr"])
def _shrink_experts_kernel(
    x_ptr: tl.tensor,
    bridge_ptr: tl.tensor,
    table: tl.tuple,
    site: tl.tensor,
    num_sites: tl.tensor,
    slots_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    TILE_ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    STRIDE: tl.constexpr,
    SHARE: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """bridge: `[rows, STRIDE]`, a row's `A x` first."""
    follow(PDL)
    words_ptr, ints_ptr, _ = table
    expert, row, slot = _part(slots_ptr, order_ptr, tiles_ptr, TILE_ROWS, TOP_K)
    now = _next_of_mine(slot, 1 << 30, tl.program_id(2))
    while now >= 0:
        record = record_of(now, site, num_sites)
        total = tl.load(total_rank_at(ints_ptr, record))
        address = tl.load(a_at(words_ptr, record)).to(tl.pointer_type(x_ptr.dtype.element_ty))
        a_ptr = tl.multiple_of(address, 16) + expert * total * IN
        for first in range(tl.program_id(1) * _RANKS, total, tl.num_programs(1) * _RANKS):
            r = first + tl.arange(0, _RANKS)
            acc = tl.zeros((_ROWS, _RANKS), tl.float32)
            for step in range(0, IN, BLOCK_K):
                k = (step + tl.arange(0, BLOCK_K))[None, :]
                of_x = x_ptr + (row // SHARE)[:, None] * IN + k
                x = tl.load(of_x, mask=(slot == now)[:, None] & (k < IN), other=0.0)
                of_a = a_ptr + r.to(tl.int64)[:, None] * IN + k
                a = tl.load(of_a, mask=(r < total)[:, None] & (k < IN), other=0.0)
                acc = tl.dot(x, tl.trans(a), acc, input_precision=PRECISION)
            at = bridge_ptr + row[:, None] * STRIDE + r[None, :]
            live = (slot == now)[:, None] & (r < total)[None, :]
            tl.store(at, acc.to(bridge_ptr.dtype.element_ty), mask=live)
        now = _next_of_mine(slot, now, tl.num_programs(2) - 1)


@triton.jit(do_not_specialize=["site", "num_sites"], do_not_specialize_on_alignment=["slots_ptr"])
def _expand_experts_kernel(
    bridge_ptr: tl.tensor,
    y_ptr: tl.tensor,
    table: tl.tuple,
    site: tl.tensor,
    num_sites: tl.tensor,
    slots_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    TILE_ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """FIRST, SECOND: features of the projections. Blocks of the second follow those of the
    first."""
    follow(PDL)
    words_ptr, ints_ptr, floats_ptr = table
    BLOCKS: tl.constexpr = (FIRST + BLOCK_N - 1) // BLOCK_N
    expert, row, slot = _part(slots_ptr, order_ptr, tiles_ptr, TILE_ROWS, TOP_K)
    second = tl.program_id(1) >= BLOCKS
    which = second.to(tl.int32)
    width = tl.where(second, SECOND, FIRST)
    n = (tl.program_id(1) - which * BLOCKS) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((_ROWS, BLOCK_N), tl.float32)
    now = _next_of_mine(slot, 1 << 30, tl.program_id(2))
    touched = slot * 0
    while now >= 0:
        record = record_of(now, site, num_sites)
        ranks_ptr = ranks_at(ints_ptr, record)
        rank = tl.load(ranks_ptr + which)
        # Where both read the same rows of A there are fewer than ranks.
        apart = tl.load(total_rank_at(ints_ptr, record)) >= tl.load(ranks_ptr) + rank
        begin = tl.where(second & apart, tl.load(ranks_ptr), 0)
        address = tl.load(b_at(words_ptr, record) + which)
        b_ptr = address.to(tl.pointer_type(y_ptr.dtype.element_ty)) + expert * width * rank
        part = tl.zeros((_ROWS, BLOCK_N), tl.float32)
        for first in range(0, rank, _RANKS):
            r = (first + tl.arange(0, _RANKS))[None, :]
            of_v = bridge_ptr + row[:, None] * STRIDE + (begin + r)
            v = tl.load(of_v, mask=(slot == now)[:, None] & (r < rank), other=0.0)
            of_b = b_ptr + n.to(tl.int64)[:, None] * rank + r
            b = tl.load(of_b, mask=(n < width)[:, None] & (r < rank), other=0.0)
            part = tl.dot(v, tl.trans(b), part, input_precision=PRECISION)
        acc += part * tl.load(scales_at(floats_ptr, record) + which)
        touched = tl.maximum(touched, tl.where(slot == now, rank, 0))
        now = _next_of_mine(slot, now, tl.num_programs(2) - 1)
    if tl.max(touched, axis=0) > 0:
        at = y_ptr + row[:, None] * (FIRST + SECOND) + which * FIRST + n[None, :]
        live = (touched > 0)[:, None] & (n < width)[None, :]
        y = tl.load(at, mask=live, other=0.0).to(tl.float32) + acc
        tl.store(at, y.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _next_of_mine(slot: tl.tensor, below: tl.tensor, left_out: tl.tensor) -> Any:
    """The largest slot below that one, less so many others; negative: there is none."""
    found = tl.max(tl.where(slot < below, slot, -1), axis=0)
    for _ in range(left_out):
        found = tl.max(tl.where(slot < found, slot, -1), axis=0)
    return found


@triton.jit
def _part(
    slots_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    TILE_ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
) -> tuple[Any, Any, Any]:
    """Finds this program's part of a tile: its expert int64, rows int64 `[16]`, slots of their
    adapters int32 `[16]`.

    A slot is -1 where there is no row, or the row has no adapter.
    """
    PARTS: tl.constexpr = TILE_ROWS // _ROWS
    tile_ptr = tiles_ptr + tl.program_id(0) // PARTS * 3
    begin = tl.program_id(0) % PARTS * _ROWS
    m = begin + tl.arange(0, _ROWS)
    count = tl.load(tile_ptr + 2)
    live = m < count
    # What a tile without rows holds besides is not known.
    first = tl.where(count > 0, tl.load(tile_ptr + 1), 0)
    row = tl.load(order_ptr + first + m, mask=live, other=0).to(tl.int64)
    slot = tl.load(slots_ptr + row // TOP_K, mask=live, other=-1)
    return tl.load(tile_ptr).to(tl.int64), row, slot
