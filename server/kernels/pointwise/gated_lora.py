"""`activation(gate) * up` with `expand` before it fused in, and `shrink` after it.

The input is the widest output of a layer's linears: a change in place would cost more than the
activation. The result is the widest input of a linear: shrink would read it once more.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from server.kernels.launch.configs import FusedConfig
from server.kernels.launch.launch import load_first
from server.kernels.lora.checks import check_context, check_whole_tiles
from server.kernels.lora.low_rank import (
    LoraB,
    Shrunk,
    columns_from,
    even,
    load_b,
    load_v,
    low_rank,
    product,
)
from server.kernels.lora.pending import PendingLora
from server.kernels.lora.record import a_at, b_at, rank_pair_at, ranks_at, record_of, scales_at
from server.kernels.lora.table import RANK_BLOCKS
from server.kernels.lora.tiles import Records, load_tile, small_tile, tile_rows
from server.kernels.lora.workspace import Workspace
from server.kernels.pointwise.gated import Activation, activated


def gated_lora(
    gate_up: torch.Tensor,
    pending: PendingLora,
    config: FusedConfig,
    activation: Activation,
    shrunk: Workspace | None = None,
) -> torch.Tensor:
    """`[rows, n]`: `activation(g) * u`, `g, u = gate_up + scale * v B^T`, v of the site's `shrink`.

    gate_up: `[rows, 2 n]`, contiguous, gate first, in the adapters' dtype; rows without an adapter
    are activated alone. Sums in float32; one kernel. Raises ValueError on a mismatch.

    shrunk: where to leave what `shrink` of the result would for the next site, down, of one
    projection. For tiles of more than 16 rows, and where every adapter of the batch has ranks, at
    both sites, that are multiples of 8 up to its width, one of RANK_BLOCKS.
    """
    table, site = pending.table, pending.site
    segments, workspace = pending.segments, pending.workspace
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    _check(gate_up, pending, shrunk)
    down = workspace if shrunk is None else shrunk
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    if rows == 0:
        return out
    items = segments.max_tiles * triton.cdiv(inner, config.piece)
    _gated_lora_kernel[(min(items, config.num_programs),)](
        gate_up,
        out,
        workspace.planes,
        workspace.splits,
        down.planes,
        down.splits,
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
        down.planes.stride(0),
        config.num_programs,
        INNER=inner,
        MAX_SPLIT=workspace.max_split,
        DOWN=0 if shrunk is None else shrunk.width,
        DOWN_SPLIT=0 if shrunk is None else shrunk.max_split,
        BLOCK_M=segments.tile_rows,
        PIECE=config.piece,
        MAX_PIECES=config.max_pieces,
        STAGES=config.num_stages,
        ACTIVATION=activation,
        PRECISION="ieee" if gate_up.dtype == torch.float32 else "tf32",
        PDL=config.programmatic_launch,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
        launch_pdl=config.programmatic_launch,
    )
    return out


def _check(gate_up: torch.Tensor, pending: PendingLora, shrunk: Workspace | None) -> None:
    segments, workspace = pending.segments, pending.workspace
    same_rows = gate_up.shape[0] == segments.rows
    if not gate_up.is_contiguous() or gate_up.dtype != workspace.dtype or not same_rows:
        raise ValueError(f"gate_up is {gate_up.dtype} {list(gate_up.shape)}")
    check_context(pending.table, pending.site, segments, workspace)
    check_whole_tiles(segments)
    if shrunk is not None:
        check_context(pending.table, pending.site + 1, segments, shrunk)
        if shrunk.width not in RANK_BLOCKS:
            raise ValueError(f"planes of down have {shrunk.width} columns, not {RANK_BLOCKS}")
        if segments.tile_rows <= 16:
            raise ValueError(f"tiles of {segments.tile_rows} rows are shrunk beside the product")


@triton.jit(do_not_specialize=["site", "num_sites", "target_items"])
def _gated_lora_kernel(
    y_ptr: tl.tensor,
    out_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    splits_ptr: tl.tensor,
    down_ptr: tl.tensor,
    down_splits_ptr: tl.tensor,
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
    stride_down: tl.tensor,
    target_items: tl.tensor,
    INNER: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    DOWN: tl.constexpr,
    DOWN_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """An item is (tile of rows, some pieces of columns); programs take items round robin."""
    pieces, blocks, items = _cut_columns(
        num_tiles_ptr, target_items, INNER, PIECE, MAX_PIECES, DOWN_SPLIT
    )
    item, step = tl.program_id(0), tl.num_programs(0)
    slot, tile = load_tile(tiles_ptr, item // blocks, item < items)
    records = Records(words_ptr, ints_ptr, floats_ptr, site, num_sites)
    record, down = _load_record(records, slot, DOWN)
    ahead = item + step
    slot, next_tile = load_tile(tiles_ptr, ahead // blocks, ahead < items)
    splits = load_first(splits_ptr, PDL)
    tl.store(down_splits_ptr, blocks, mask=(item == 0) & (DOWN > 0))
    for item in range(tl.program_id(0), items, step):
        next_record, next_down = _load_record(records, slot, DOWN)
        ahead = item + 2 * step
        slot, later_tile = load_tile(tiles_ptr, ahead // blocks, ahead < items)
        col = item % blocks * pieces * PIECE
        v_ptr = planes_ptr + tile.start * stride_v
        _gated_tile(
            y_ptr, out_ptr, order_ptr + tile.start,
            Shrunk(v_ptr, stride_v, stride_plane, splits, tile.length),
            record, down, down_ptr + item % blocks * stride_down + tile.start * DOWN,
            col, tl.minimum(INNER, col + pieces * PIECE),
            INNER, MAX_SPLIT, BLOCK_M, PIECE, STAGES, ACTIVATION, PRECISION, DOWN,
        )  # fmt: skip
        record, down = next_record, next_down
        tile, next_tile = next_tile, later_tile


@triton.jit
def _cut_columns(
    num_tiles_ptr: tl.tensor,
    target_items: tl.tensor,
    INNER: tl.constexpr,
    PIECE: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    DOWN_SPLIT: tl.constexpr,
) -> tuple[Any, Any, Any]:
    """Pieces of an item, items of a tile (no more than there are planes for down's v), and of all
    tiles, those without an adapter included."""
    tiles = tl.load(num_tiles_ptr + 1)
    PIECES: tl.constexpr = (INNER + PIECE - 1) // PIECE
    pieces = tl.minimum(MAX_PIECES, tl.maximum(1, tl.cdiv(PIECES * tiles, target_items)))
    if DOWN_SPLIT > 0:
        pieces = tl.maximum(pieces, (PIECES + DOWN_SPLIT - 1) // DOWN_SPLIT)
    blocks = tl.cdiv(PIECES, pieces)
    return pieces, blocks, tiles * blocks


class _Record(NamedTuple):
    """Both ranks as one word (0 without an adapter), addresses of both B and of the scales."""

    ranks: Any
    gate: Any
    up: Any
    scales_ptr: Any


class _DownRecord(NamedTuple):
    """Of the next site: address of A, and rank."""

    address: Any
    rank: Any


class _Down(NamedTuple):
    """A of the next site, its rank, and where its v goes."""

    a_ptr: Any
    rank: Any
    v_ptr: Any


class _Matrices(NamedTuple):
    """The product, the result, and which of their rows the tile has."""

    y_ptr: Any
    out_ptr: Any
    rows: Any


@triton.jit
def _load_record(records: Records, slot: tl.tensor, DOWN: tl.constexpr) -> tuple[Any, Any]:
    """A chain of loads leads to an item's weights: this is fetched one item ahead, and its tile
    two."""
    words_ptr = records.words_ptr
    record = record_of(slot, records.site, records.num_sites)
    live = slot >= 0
    ranks = tl.load(rank_pair_at(words_ptr, record), mask=live, other=0)
    b_ptr, scales_ptr = b_at(words_ptr, record), scales_at(records.floats_ptr, record)
    gate, up = tl.load(b_ptr), tl.load(b_ptr + 1)
    this = _Record(ranks, gate, up, scales_ptr)
    if DOWN > 0:
        rank_down = tl.load(ranks_at(records.ints_ptr, record + 1), mask=live, other=0)
        return this, _DownRecord(tl.load(a_at(words_ptr, record + 1)), rank_down)
    else:
        return this, _DownRecord(0 * gate, 0 * slot)


@triton.jit
def _gated_tile(
    y_ptr: tl.tensor,
    out_ptr: tl.tensor,
    order_ptr: tl.tensor,
    v: Shrunk,
    record: _Record,
    down: _DownRecord,
    down_ptr: tl.tensor,
    col: tl.tensor,
    end: tl.tensor,
    INNER: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    DOWN: tl.constexpr,
) -> None:
    """Few rows or many."""
    kind: tl.constexpr = tl.pointer_type(y_ptr.dtype.element_ty)
    ranks = record.ranks
    b0 = LoraB(tl.multiple_of(record.gate.to(kind), 16), (ranks & 0xFFFFFFFF).to(tl.int32))
    b1 = LoraB(tl.multiple_of(record.up.to(kind), 16), (ranks >> 32).to(tl.int32))
    next_site = _Down(tl.multiple_of(down.address.to(kind), 16), down.rank, down_ptr)
    scales = (tl.load(record.scales_ptr), tl.load(record.scales_ptr + 1))
    SMALL: tl.constexpr = small_tile(BLOCK_M)
    if v.rows <= SMALL:
        few = tile_rows(order_ptr, v.rows, SMALL)
        _gated_rows(
            _Matrices(y_ptr, out_ptr, few), v, b0, b1, scales, next_site, col, end,
            INNER, MAX_SPLIT, SMALL, PIECE, STAGES, ACTIVATION, PRECISION, DOWN,
        )  # fmt: skip
    else:
        many = tile_rows(order_ptr, v.rows, BLOCK_M)
        _gated_rows(
            _Matrices(y_ptr, out_ptr, many), v, b0, b1, scales, next_site, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE, STAGES, ACTIVATION, PRECISION, DOWN,
        )  # fmt: skip


@triton.jit
def _gated_rows(
    target: _Matrices,
    v: Shrunk,
    b0: LoraB,
    b1: LoraB,
    scales: tl.tuple,
    down: _Down,
    col: tl.tensor,
    end: tl.tensor,
    INNER: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    DOWN: tl.constexpr,
) -> None:
    """Columns col .. end of a tile's rows. DOWN: of down's v, 0 = is not wanted; where it
    is, all ranks fit it."""
    widest = tl.maximum(b0.rank, b1.rank)
    even0, even1 = even(b0), even(b1)
    if DOWN > 0:
        _gated_pieces(
            target, v, even0, even1, scales, down, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE * 16 // DOWN, DOWN, STAGES, ACTIVATION,
            PRECISION, DOWN,
        )  # fmt: skip
    elif (b0.rank | b1.rank) % 8 != 0:
        _gated_any_rank(
            target, v, b0, b1, scales, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE // 4, ACTIVATION, PRECISION,
        )  # fmt: skip
    elif widest <= 16:
        _gated_pieces(
            target, v, even0, even1, scales, down, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE, 16, STAGES, ACTIVATION, PRECISION, 0,
        )  # fmt: skip
    elif widest <= 32:
        _gated_pieces(
            target, v, even0, even1, scales, down, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE // 2, 32, STAGES, ACTIVATION, PRECISION, 0,
        )  # fmt: skip
    elif widest <= 64:
        _gated_pieces(
            target, v, even0, even1, scales, down, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE // 4, 64, STAGES, ACTIVATION, PRECISION, 0,
        )  # fmt: skip
    else:
        _gated_any_rank(
            target, v, even0, even1, scales, col, end,
            INNER, MAX_SPLIT, BLOCK_M, PIECE // 4, ACTIVATION, PRECISION,
        )  # fmt: skip


@triton.jit
def _gated_pieces(
    target: _Matrices,
    v: Shrunk,
    b0: LoraB,
    b1: LoraB,
    scales: tl.tuple,
    down: _Down,
    col: tl.tensor,
    end: tl.tensor,
    INNER: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    DOWN: tl.constexpr,
) -> None:
    """Where all ranks fit one step: v is read once, pieces of B and of the product ahead."""
    r = tl.arange(0, BLOCK_R)
    if DOWN > 0:
        acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    v0 = load_v(v, r, b0.rank, MAX_SPLIT, BLOCK_M)
    v1 = load_v(columns_from(v, b0.rank), r, b1.rank, MAX_SPLIT, BLOCK_M)
    # Of few columns that is less work, but float16 may not hold what the product would bring back.
    EARLY: tl.constexpr = target.y_ptr.dtype.element_ty != tl.float16
    if EARLY:
        v0, v1 = scales[0] * v0, scales[1] * v1
    WHOLE: tl.constexpr = INNER % PIECE == 0
    for begin in tl.range(col, end, PIECE, num_stages=STAGES):
        n = begin + tl.arange(0, PIECE)
        at, out_at, live = _places(target.rows, v.rows, n, end, INNER, BLOCK_M, WHOLE)
        gate = tl.load(target.y_ptr + at, mask=live, other=0.0).to(tl.float32)
        up = tl.load(target.y_ptr + INNER + at, mask=live, other=0.0).to(tl.float32)
        if EARLY:
            gate += product(v0, load_b(b0, n, r, end, WHOLE), BLOCK_M, PRECISION)
            up += product(v1, load_b(b1, n, r, end, WHOLE), BLOCK_M, PRECISION)
        else:
            gate += scales[0] * product(v0, load_b(b0, n, r, end, WHOLE), BLOCK_M, PRECISION)
            up += scales[1] * product(v1, load_b(b1, n, r, end, WHOLE), BLOCK_M, PRECISION)
        out = activated(gate, up, ACTIVATION).to(target.out_ptr.dtype.element_ty)
        tl.store(target.out_ptr + out_at, out, mask=live)
        if DOWN > 0:
            known = (r < down.rank)[:, None]
            if not WHOLE:
                known &= (n < end)[None, :]
            a = tl.load(down.a_ptr + r[:, None] * INNER + n[None, :], mask=known, other=0.0)
            acc = tl.dot(out, tl.trans(a), acc, input_precision=PRECISION)
    if DOWN > 0:
        m = tl.arange(0, BLOCK_M)
        known = (m < v.rows)[:, None] & (r < down.rank)[None, :]
        tl.store(down.v_ptr + m[:, None] * DOWN + r[None, :], acc, mask=known)


@triton.jit
def _gated_any_rank(
    target: _Matrices,
    v: Shrunk,
    b0: LoraB,
    b1: LoraB,
    scales: tl.tuple,
    col: tl.tensor,
    end: tl.tensor,
    INNER: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    for begin in range(col, end, PIECE):
        n = begin + tl.arange(0, PIECE)
        at, out_at, live = _places(target.rows, v.rows, n, end, INNER, BLOCK_M, False)
        gate = tl.load(target.y_ptr + at, mask=live, other=0.0).to(tl.float32)
        up = tl.load(target.y_ptr + INNER + at, mask=live, other=0.0).to(tl.float32)
        delta0, delta1 = low_rank(v, b0, b1, n, end, MAX_SPLIT, BLOCK_M, PIECE, PRECISION)
        gate, up = gate + scales[0] * delta0, up + scales[1] * delta1
        out = activated(gate, up, ACTIVATION)
        tl.store(target.out_ptr + out_at, out.to(target.out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _places(
    rows: tl.tensor,
    length: tl.tensor,
    n: tl.tensor,
    end: tl.tensor,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tuple[Any, Any, Any]:
    """Of gate in the product, in the result, and which are real."""
    live = (tl.arange(0, BLOCK_M) < length)[:, None]
    if not WHOLE:
        live &= (n < end)[None, :]
    row = rows[:, None]
    return row * (2 * INNER) + n[None, :], row * INNER + n[None, :], live
