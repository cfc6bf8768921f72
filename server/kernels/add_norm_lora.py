"""Residual and RMS norm of a product whose LoRA they expand on the way.

To change the product in place first would cost as much again as a half of what they do.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from server.kernels.add_norm_block import add_norm_rows
from server.kernels.checks import check_context, check_rows
from server.kernels.configs import NormConfig
from server.kernels.pending import PendingLora
from server.kernels.tiles import load_tile, tile_rows

_MOST_ROWS = 16  # of a part of a tile: the fewest that tensor cores take


def add_norm_lora(
    y: torch.Tensor,
    pending: PendingLora,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    config: NormConfig,
) -> None:
    """`hidden += y + scale * v B^T`, then `y = rms_norm(hidden) * weight`; v of the site's shrink.

    y, hidden: `[rows, features]`, in the adapters' dtype, contiguous, changed in place; weight
    `[features]`; the site has one projection; rows without an adapter are added and normed alone.
    Sums in float32; the norm is that of hidden as it is stored, rounded to its dtype (`add_norm`
    takes the sum's own). One kernel, no allocation. Raises ValueError on a mismatch.
    """
    table, site = pending.table, pending.site
    segments, workspace = pending.segments, pending.workspace
    for name, matrix in (("y", y), ("hidden", hidden)):
        check_rows(name, matrix, segments, workspace)
        if matrix.shape != y.shape or not matrix.is_contiguous():
            raise ValueError(f"{name} is {list(matrix.shape)}, must be contiguous {list(y.shape)}")
    rows, features = y.shape
    if weight.shape != (features,) or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous [{features}], got {list(weight.shape)}")
    check_context(table, site, segments, workspace)
    if rows == 0:
        return
    part_rows = _part_rows(rows, config.num_programs)
    parts = segments.tile_rows // part_rows
    _add_norm_lora_kernel[(min(segments.max_tiles * parts, config.num_programs),)](
        y,
        hidden,
        weight,
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
        parts,
        part_rows,
        epsilon,
        FEATURES=features,
        MAX_SPLIT=workspace.max_split,
        BLOCK_M=_MOST_ROWS,
        PIECE=config.piece,
        STAGES=config.num_stages,
        PRECISION="ieee" if y.dtype == torch.float32 else "tf32",
        PDL=config.programmatic_launch,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
        launch_pdl=config.programmatic_launch,
    )


def _part_rows(rows: int, num_programs: int) -> int:
    """Rows of a part of a tile, a power of two. Whole rows are normed, so with few of them only
    small parts leave work for every program; each part reads all of B."""
    even: int = triton.next_power_of_2(triton.cdiv(rows, num_programs))
    return min(_MOST_ROWS, even)


@triton.jit(do_not_specialize=["site", "num_sites", "parts", "part_rows", "epsilon"])
def _add_norm_lora_kernel(
    y_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    weight_ptr: tl.tensor,
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
    parts: tl.tensor,
    part_rows: tl.tensor,
    epsilon: tl.tensor,
    FEATURES: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """An item is a part of a tile of rows; programs take items round robin, all tiles' first parts
    before the second ones: the empty ones of short tiles then burden all alike."""
    # A chain of loads leads to an item's weights: its head is fetched an item or two ahead.
    tiles = tl.load(num_tiles_ptr + 1)
    items = tiles * parts
    step = tl.num_programs(0)
    item = tl.program_id(0)
    slot, start, length = _load_part(tiles_ptr, item, tiles, items, part_rows)
    rank, scale, address, row = _load_record(
        words_ptr, ints_ptr, floats_ptr, order_ptr, slot, start, length, site, num_sites
    )
    slot, next_start, next_length = _load_part(tiles_ptr, item + step, tiles, items, part_rows)
    if PDL:
        tl.extra.cuda.gdc_wait()
    splits = tl.load(splits_ptr)
    for item in range(tl.program_id(0), items, step):
        next_rank, next_scale, next_address, next_row = _load_record(
            words_ptr, ints_ptr, floats_ptr, order_ptr, slot, next_start, next_length, site,
            num_sites,
        )  # fmt: skip
        slot, later_start, later_length = _load_part(
            tiles_ptr, item + 2 * step, tiles, items, part_rows
        )
        _add_norm_part(
            y_ptr, hidden_ptr, weight_ptr, epsilon, order_ptr + start, row, length,
            planes_ptr + start * stride_v, stride_v, stride_plane, splits, address, rank, scale,
            FEATURES, MAX_SPLIT, BLOCK_M, PIECE, STAGES, PRECISION,
        )  # fmt: skip
        rank, scale, address, row = next_rank, next_scale, next_address, next_row
        start, length, next_start, next_length = next_start, next_length, later_start, later_length


@triton.jit
def _load_part(
    tiles_ptr: tl.tensor,
    item: tl.tensor,
    tiles: tl.tensor,
    items: tl.tensor,
    part_rows: tl.tensor,
) -> tuple[Any, Any, Any]:
    """Slot, first sorted position and rows of a part; no more than 0 rows where there is none."""
    slot, start, length = load_tile(tiles_ptr, item % tiles, item < items)
    first = item // tiles * part_rows
    return slot, start + first, tl.minimum(part_rows, length - first)


@triton.jit
def _load_record(
    words_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    floats_ptr: tl.tensor,
    order_ptr: tl.tensor,
    slot: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
) -> tuple[Any, Any, Any, Any]:
    """Rank (0 without an adapter), scale, address of B, and the row at `start`."""
    record = tl.maximum(slot, 0).to(tl.int64) * num_sites + site
    rank = tl.load(ints_ptr + record * 16 + 8, mask=slot >= 0, other=0)
    scale = tl.load(floats_ptr + record * 16 + 12)
    row = tl.load(order_ptr + start, mask=length > 0, other=0)
    return rank, scale, tl.load(words_ptr + record * 8 + 1), row


@triton.jit
def _add_norm_part(
    y_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    epsilon: tl.tensor,
    order_ptr: tl.tensor,
    row: tl.tensor,
    length: tl.tensor,
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    stride_plane: tl.tensor,
    splits: tl.tensor,
    address: tl.tensor,
    rank: tl.tensor,
    scale: tl.tensor,
    FEATURES: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One row, many, or none."""
    b_ptr = tl.multiple_of(address.to(tl.pointer_type(y_ptr.dtype.element_ty)), 16)
    if length == 1:
        one = row.to(tl.int64) * FEATURES
        add_norm_rows(
            y_ptr + one, hidden_ptr + one, weight_ptr, epsilon, length, v_ptr, stride_v,
            stride_plane, splits, b_ptr, rank, scale,
            FEATURES, MAX_SPLIT, 1, PIECE, STAGES, PRECISION,
        )  # fmt: skip
    elif length > 1:
        many = tile_rows(order_ptr, row, length, BLOCK_M).to(tl.int64) * FEATURES
        add_norm_rows(
            y_ptr + many, hidden_ptr + many, weight_ptr, epsilon, length, v_ptr, stride_v,
            stride_plane, splits, b_ptr, rank, scale,
            FEATURES, MAX_SPLIT, BLOCK_M, PIECE, STAGES, PRECISION,
        )  # fmt: skip
