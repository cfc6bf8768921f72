"""`silu(gate) * up` of a product whose LoRA it expands on the way.

The product is the widest of a layer: to change it in place would cost more than to activate it.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from server.kernels.checks import check_context
from server.kernels.configs import ExpandConfig
from server.kernels.low_rank import load_b, load_v, low_rank, product
from server.kernels.pending import PendingLora
from server.kernels.silu import silu_times
from server.kernels.tiles import load_tile, small_tile, tile_rows


def silu_mul_lora(
    gate_up: torch.Tensor, pending: PendingLora, config: ExpandConfig
) -> torch.Tensor:
    """`silu(g) * u` of `g, u = gate_up + scale * v B^T`, v of the site's `shrink`: `[rows, n]`.

    gate_up: `[rows, 2 n]`, contiguous, gate first, in the adapters' dtype; rows without an adapter
    are activated alone. Sums in float32; one kernel. Raises ValueError on a mismatch.
    """
    table, site = pending.table, pending.site
    segments, workspace = pending.segments, pending.workspace
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if not gate_up.is_contiguous() or gate_up.dtype != workspace.dtype or rows != segments.rows:
        raise ValueError(f"gate_up is {gate_up.dtype} {list(gate_up.shape)}")
    check_context(table, site, segments, workspace)
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    if rows == 0:
        return out
    items = segments.max_tiles * triton.cdiv(inner, config.piece)
    _silu_kernel[(min(items, config.num_programs),)](
        gate_up,
        out,
        workspace.planes,
        workspace.splits,
        segments.order,
        segments.tiles,
        segments.num_tiles,
        table.words,
        table.ints,
        table.floats,
        site,
        table.num_sites,
        workspace.planes.stride(1),
        workspace.planes.stride(0),
        config.num_programs,
        INNER=inner,
        MAX_SPLIT=workspace.max_split,
        BLOCK_M=segments.tile_rows,
        PIECE=config.piece,
        MAX_PIECES=config.max_pieces,
        STAGES=config.num_stages,
        PRECISION="ieee" if gate_up.dtype == torch.float32 else "tf32",
        PDL=config.programmatic_launch,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
        launch_pdl=config.programmatic_launch,
    )
    return out


@triton.jit(do_not_specialize=["site", "num_sites", "target_items"])
def _silu_kernel(
    y_ptr: tl.tensor,
    out_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    splits_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    num_tiles_ptr: tl.tensor,
    words_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    floats_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    stride_v: tl.tensor,
    stride_plane: tl.tensor,
    target_items: tl.tensor,
    INNER: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """An item is (tile of rows, some pieces of columns); programs take items round robin."""
    # A chain of loads leads to an item's weights: its head is fetched an item or two ahead.
    PIECES: tl.constexpr = (INNER + PIECE - 1) // PIECE
    tiles = tl.load(num_tiles_ptr + 1)
    pieces = tl.minimum(MAX_PIECES, tl.maximum(1, tl.cdiv(PIECES * tiles, target_items)))
    blocks = tl.cdiv(PIECES, pieces)
    items = tiles * blocks
    step = tl.num_programs(0)
    item = tl.program_id(0)
    slot, start, length = load_tile(tiles_ptr, item // blocks, item < items)
    ranks, b_gate, b_up, row, scales = _load_pair(
        words_ptr, floats_ptr, order_ptr, slot, start, site, num_sites
    )
    ahead = item + step
    slot, next_start, next_length = load_tile(tiles_ptr, ahead // blocks, ahead < items)
    if PDL:
        tl.extra.cuda.gdc_wait()
    splits = tl.load(splits_ptr)
    for item in range(tl.program_id(0), items, step):
        next_ranks, next_gate, next_up, next_row, next_scales = _load_pair(
            words_ptr, floats_ptr, order_ptr, slot, next_start, site, num_sites
        )
        ahead = item + 2 * step
        slot, later_start, later_length = load_tile(tiles_ptr, ahead // blocks, ahead < items)
        col = item % blocks * pieces * PIECE
        end = tl.minimum(INNER, col + pieces * PIECE)
        _silu_tile(
            y_ptr, out_ptr, order_ptr + start, row, length, planes_ptr + start * stride_v, stride_v,
            stride_plane, splits, b_gate, b_up, scales, ranks, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE, STAGES, PRECISION,
        )  # fmt: skip
        ranks, b_gate, b_up, row, scales = next_ranks, next_gate, next_up, next_row, next_scales
        start, length, next_start, next_length = next_start, next_length, later_start, later_length


@triton.jit
def _load_pair(
    words_ptr: tl.tensor,
    floats_ptr: tl.tensor,
    order_ptr: tl.tensor,
    slot: tl.tensor,
    start: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
) -> tuple[Any, Any, Any, Any, Any]:
    """Both ranks as one word (0 without an adapter), addresses of both B, the row at `start`, and
    the address of the scales."""
    record = tl.maximum(slot, 0).to(tl.int64) * num_sites + site
    ranks = tl.load(words_ptr + record * 8 + 4, mask=slot >= 0, other=0)
    gate, up = tl.load(words_ptr + record * 8 + 1), tl.load(words_ptr + record * 8 + 2)
    return ranks, gate, up, tl.load(order_ptr + start), floats_ptr + record * 16 + 12


@triton.jit
def _silu_tile(
    y_ptr: tl.tensor,
    out_ptr: tl.tensor,
    order_ptr: tl.tensor,
    row: tl.tensor,
    length: tl.tensor,
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    stride_plane: tl.tensor,
    splits: tl.tensor,
    b_gate: tl.tensor,
    b_up: tl.tensor,
    scales_ptr: tl.tensor,
    ranks: tl.tensor,
    col: tl.tensor,
    end: tl.tensor,
    INNER: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Few rows or many."""
    SMALL: tl.constexpr = small_tile(BLOCK_M)
    if length <= SMALL:
        few = tile_rows(order_ptr, row, length, SMALL).to(tl.int64)
        _silu_rows(
            y_ptr, out_ptr, few, length, v_ptr, stride_v, stride_plane, splits,
            b_gate, b_up, scales_ptr, ranks, col, end,
            INNER, MAX_SPLIT, SMALL, PIECE, STAGES, PRECISION,
        )  # fmt: skip
    else:
        many = tile_rows(order_ptr, row, length, BLOCK_M).to(tl.int64)
        _silu_rows(
            y_ptr, out_ptr, many, length, v_ptr, stride_v, stride_plane, splits,
            b_gate, b_up, scales_ptr, ranks, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE, STAGES, PRECISION,
        )  # fmt: skip


@triton.jit
def _silu_rows(
    y_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    stride_plane: tl.tensor,
    splits: tl.tensor,
    b_gate: tl.tensor,
    b_up: tl.tensor,
    scales_ptr: tl.tensor,
    ranks: tl.tensor,
    col: tl.tensor,
    end: tl.tensor,
    INNER: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Columns col .. end of one row, or of a tile's."""
    kind: tl.constexpr = tl.pointer_type(y_ptr.dtype.element_ty)
    b0_ptr, b1_ptr = tl.multiple_of(b_gate.to(kind), 16), tl.multiple_of(b_up.to(kind), 16)
    rank0, rank1 = (ranks & 0xFFFFFFFF).to(tl.int32), (ranks >> 32).to(tl.int32)
    scale0, scale1 = tl.load(scales_ptr), tl.load(scales_ptr + 1)
    widest = tl.maximum(rank0, rank1)
    if (rank0 | rank1) % 8 != 0:
        _silu_any_rank(
            y_ptr, out_ptr, rows, length, v_ptr, stride_v, stride_plane, splits, b0_ptr, b1_ptr,
            rank0, rank1, scale0, scale1, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE // 4, PRECISION,
        )  # fmt: skip
    elif widest <= 16:
        _silu_pieces(
            y_ptr, out_ptr, rows, length, v_ptr, stride_v, stride_plane, splits, b0_ptr, b1_ptr,
            rank0 // 8 * 8, rank1 // 8 * 8, scale0, scale1, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE, 16, STAGES, PRECISION,
        )  # fmt: skip
    elif widest <= 32:
        _silu_pieces(
            y_ptr, out_ptr, rows, length, v_ptr, stride_v, stride_plane, splits, b0_ptr, b1_ptr,
            rank0 // 8 * 8, rank1 // 8 * 8, scale0, scale1, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE // 2, 32, STAGES, PRECISION,
        )  # fmt: skip
    elif widest <= 64:
        _silu_pieces(
            y_ptr, out_ptr, rows, length, v_ptr, stride_v, stride_plane, splits, b0_ptr, b1_ptr,
            rank0 // 8 * 8, rank1 // 8 * 8, scale0, scale1, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE // 4, 64, STAGES, PRECISION,
        )  # fmt: skip
    else:
        _silu_any_rank(
            y_ptr, out_ptr, rows, length, v_ptr, stride_v, stride_plane, splits, b0_ptr, b1_ptr,
            rank0 // 8 * 8, rank1 // 8 * 8, scale0, scale1, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE // 4, PRECISION,
        )  # fmt: skip


@triton.jit
def _silu_pieces(
    y_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    stride_plane: tl.tensor,
    splits: tl.tensor,
    b0_ptr: tl.tensor,
    b1_ptr: tl.tensor,
    rank0: tl.tensor,
    rank1: tl.tensor,
    scale0: tl.tensor,
    scale1: tl.tensor,
    col: tl.tensor,
    end: tl.tensor,
    INNER: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Where both ranks fit one step: v is read once, pieces of B and of the product ahead."""
    r = tl.arange(0, BLOCK_R)
    v0 = scale0 * load_v(
        v_ptr, stride_v, stride_plane, splits, r, length, rank0, MAX_SPLIT, BLOCK_M
    )
    v1 = scale1 * load_v(
        v_ptr + rank0, stride_v, stride_plane, splits, r, length, rank1, MAX_SPLIT, BLOCK_M
    )
    for begin in tl.range(col, end, PIECE, num_stages=STAGES):
        n = begin + tl.arange(0, PIECE)
        at, out_at, live = _places(rows, length, n, end, INNER, BLOCK_M)
        gate = tl.load(y_ptr + at, mask=live, other=0.0).to(tl.float32)
        up = tl.load(y_ptr + INNER + at, mask=live, other=0.0).to(tl.float32)
        gate += product(v0, load_b(b0_ptr, rank0, n, r, end), BLOCK_M, PRECISION)
        up += product(v1, load_b(b1_ptr, rank1, n, r, end), BLOCK_M, PRECISION)
        tl.store(out_ptr + out_at, silu_times(gate, up).to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _silu_any_rank(
    y_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    stride_plane: tl.tensor,
    splits: tl.tensor,
    b0_ptr: tl.tensor,
    b1_ptr: tl.tensor,
    rank0: tl.tensor,
    rank1: tl.tensor,
    scale0: tl.tensor,
    scale1: tl.tensor,
    col: tl.tensor,
    end: tl.tensor,
    INNER: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    for begin in range(col, end, PIECE):
        n = begin + tl.arange(0, PIECE)
        at, out_at, live = _places(rows, length, n, end, INNER, BLOCK_M)
        gate = tl.load(y_ptr + at, mask=live, other=0.0).to(tl.float32)
        up = tl.load(y_ptr + INNER + at, mask=live, other=0.0).to(tl.float32)
        delta0, delta1 = low_rank(
            v_ptr, stride_v, stride_plane, splits, length, b0_ptr, b1_ptr, rank0, rank1, n, end,
            MAX_SPLIT, BLOCK_M, PIECE, PRECISION,
        )  # fmt: skip
        out = silu_times(gate + scale0 * delta0, up + scale1 * delta1)
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _places(
    rows: tl.tensor,
    length: tl.tensor,
    n: tl.tensor,
    end: tl.tensor,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[Any, Any, Any]:
    """Of gate in the product, in the result, and which are real; of one row or many."""
    if BLOCK_M == 1:
        return rows * (2 * INNER) + n, rows * INNER + n, n < end
    else:
        live = (tl.arange(0, BLOCK_M) < length)[:, None] & (n < end)[None, :]
        row = rows[:, None]
        return row * (2 * INNER) + n[None, :], row * INNER + n[None, :], live
