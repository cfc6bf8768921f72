"""`activation(gate) * up`, alone or with `expand` before it fused in, and `shrink` after it.

The input is the widest output of a layer's linears: a change in place would cost more than the
activation. The result is the widest input of a linear: shrink would read it once more.
"""

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.configs import FusedConfig
from loraplex.server.kernels.launch.launch import dot_precision, follow, load_first
from loraplex.server.kernels.linear.round_rows import rounded_arguments, store_rounded, warps_of_row
from loraplex.server.kernels.linear.row_form import Rounding
from loraplex.server.kernels.lora.pending import PendingDelta, PendingLora, delta_arguments
from loraplex.server.kernels.lora.segments import check_context, check_whole_tiles
from loraplex.server.kernels.lora.table import RANK_BLOCKS
from loraplex.server.kernels.lora.tiles import (
    LoraB,
    Records,
    Shrunk,
    a_at,
    b_at,
    columns_from,
    even,
    load_b,
    load_tile,
    load_v,
    low_rank,
    product,
    rank_pair_at,
    ranks_at,
    record_of,
    scales_at,
    small_tile,
    tile_rows,
    touches,
)
from loraplex.server.kernels.lora.workspace import Workspace

Activation = Literal["silu", "gelu_tanh"]
# `clamped_swiglu`: experts whose gate and up are clamped, see
# `loraplex.server.model.spec.moe_spec`.
GatedActivation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
# `relu2`, the square of what is positive, has no gate.
ExpertActivation = GatedActivation | Literal["relu2"]

_BLOCK = 1024
_ALPHA, _LIMIT = tl.constexpr(1.702), tl.constexpr(7.0)


def gated(
    gate_up: torch.Tensor,
    pending: PendingDelta | None,
    activation: GatedActivation,
    rounding: Rounding | None = None,
    up: torch.Tensor | None = None,
    *,
    programmatic_launch: bool,
) -> torch.Tensor:
    """Apply the gated activation: `[rows, 2 n]`, contiguous, gate first -> `[rows, n]`; pending:
    LoRA of it, of rows and halves that their adapter touches. rounding: takes the result, too,
    `[rows, n]`. up: `[rows, n]`, rows of any stride, beside a gate alone, `[rows, n]`, without
    pending. In float32; one kernel. Raises ValueError on a mismatch.
    """
    rows, inner = gate_up.shape[0], gate_up.shape[1] // (2 if up is None else 1)
    if up is not None and (pending is not None or up.shape != gate_up.shape or up.stride(1) != 1):
        raise ValueError("an activation beside its gate is of one shape, without LoRA")
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    block, warps = _BLOCK, 4
    if rounding is not None and rounding[1].groups == 0:  # a scale needs the whole row
        block = triton.next_power_of_2(inner)
        warps = warps_of_row(block)
    if rows:
        _gated_kernel[(rows * triton.cdiv(inner, block),)](
            gate_up,
            *delta_arguments(gate_up, pending),
            out,
            rows,
            None if rounding is None else rounded_arguments(*rounding),
            up,
            0 if up is None else up.stride(0),
            INNER=inner,
            BLOCK=block,
            ACTIVATION=activation,
            LORA=pending is not None,
            ROUND=rounding is not None,
            GROUP=0 if rounding is None else rounding[1].groups,
            PDL=programmatic_launch,
            num_warps=warps,
            launch_pdl=programmatic_launch,
        )
    return out


@triton.jit(
    do_not_specialize=["site", "num_sites", "rows"], do_not_specialize_on_alignment=["slots_ptr"]
)
def _gated_kernel(
    y_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    to_rounded: tl.tuple,
    up_ptr: tl.tensor,
    stride_up: tl.tensor,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LORA: tl.constexpr,
    ROUND: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    follow(PDL)
    BLOCKS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    first = tl.program_id(0) % BLOCKS * BLOCK
    n = first + tl.arange(0, BLOCK)
    inside = n < INNER
    if up_ptr is None:
        at = row * 2 * INNER + n
        up = tl.load(y_ptr + at + INNER, mask=inside, other=0.0).to(tl.float32)
    else:
        at = row * INNER + n
        up = tl.load(up_ptr + row * stride_up + n, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if LORA:
        # Read beside the chain slot -> rank, not after it, and dropped where it means nothing.
        delta0 = tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)
        delta1 = tl.load(delta_ptr + at + INNER, mask=inside, other=0.0).to(tl.float32)
        slot_ptr = slots_ptr + row
        gate += tl.where(touches(slot_ptr, ints_ptr, site, num_sites, 0), delta0, 0.0)
        up += tl.where(touches(slot_ptr, ints_ptr, site, num_sites, 1), delta1, 0.0)
    out = activated(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * INNER + n, out, mask=inside)
    if ROUND:
        store_rounded(to_rounded, rows, row, out.to(tl.float32), first, INNER, GROUP)


def has_gate(activation: ExpertActivation | None) -> bool:
    """Whether the activation takes the halves of a product, gate and up."""
    return activation is not None and activation != "relu2"


@triton.jit
def activated(gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr) -> Any:
    """`gate / (1 + e^-x) * up`: with x = gate that is silu's, with `x = sqrt(8 / pi) * (gate +
    0.044715 gate^3)` that of gelu by its tanh (arXiv:1606.08415); "clamped_swiglu" clamps both.

    A square root's reciprocal, squared, and a power of 2 are an instruction each on a GPU; division
    and e's power take five, for numbers that do not come.
    """
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, _LIMIT)
        up = tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT) + 1.0
    x = gate
    if ACTIVATION == "clamped_swiglu":
        x = _ALPHA * gate
    elif ACTIVATION == "gelu_tanh":
        x = 1.5957691216057308 * (gate + 0.044715 * (gate * gate * gate))
    else:
        tl.static_assert(ACTIVATION == "silu")
    root = tl.rsqrt(1.0 + tl.exp2(-1.4426950408889634 * x))
    return gate * (root * root) * up


@triton.jit
def activated_alone(x: tl.tensor, ACTIVATION: tl.constexpr) -> Any:
    """The activation of a product without gate."""
    tl.static_assert(ACTIVATION == "relu2")
    positive = tl.maximum(x, 0.0)
    return positive * positive


def gated_lora(
    gate_up: torch.Tensor,
    pending: PendingLora,
    config: FusedConfig,
    activation: Activation,
    shrunk: Workspace | None = None,
) -> torch.Tensor:
    """Apply the gated activation to a product with LoRA, `[rows, n]`: `activation(g) * u`, `g, u =
    gate_up + scale * v B^T`, v of the site's `shrink`.

    gate_up: `[rows, 2 n]`, contiguous, gate first, in the adapters' dtype; rows without an adapter
    are activated alone. Sums in float32; one kernel. Raises ValueError on a mismatch.

    shrunk: where to leave what `shrink` of the result would for the next site, down, of one
    projection. For tiles of more than 16 rows, and where every adapter of the batch has ranks, at
    both sites, that are multiples of 8 up to its width, one of RANK_BLOCKS.
    """
    segments, workspace, table = pending.segments, pending.workspace, pending.table
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
        workspace.arguments,
        down.arguments,
        segments.routed,
        table.tensors,
        pending.site,
        table.num_sites,
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
        PRECISION=dot_precision(gate_up.dtype),
        **config.launch_options(),
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
    workspace: tl.tuple,
    down_workspace: tl.tuple,
    routed: tl.tuple,
    table: tl.tuple,
    site: tl.tensor,
    num_sites: tl.tensor,
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
    planes_ptr, splits_ptr, stride_v, stride_plane = workspace
    down_ptr, down_splits_ptr, _, stride_down = down_workspace
    order_ptr, tiles_ptr, num_tiles_ptr = routed
    pieces, blocks, items = _cut_columns(
        num_tiles_ptr, target_items, INNER, PIECE, MAX_PIECES, DOWN_SPLIT
    )
    item, step = tl.program_id(0), tl.num_programs(0)
    slot, tile = load_tile(tiles_ptr, item // blocks, item < items)
    records = Records(table[0], table[1], table[2], site, num_sites)
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
            (col, tl.minimum(INNER, col + pieces * PIECE)),
            _Form(INNER, MAX_SPLIT, PIECE, STAGES, ACTIVATION, PRECISION, DOWN), BLOCK_M,
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


class _Form(NamedTuple):
    """Form of the kernel. Constants: features of the result, planes of v, columns of a piece at
    rank 16, stages of the loop, activation, precision of float32. down: columns of the next
    site's v, 0 = it is not wanted; where it is, all ranks fit it.
    """

    inner: Any
    max_split: Any
    piece: Any
    stages: Any
    activation: Any
    precision: Any
    down: Any


class _Record(NamedTuple):
    """Both ranks as one word (0 without an adapter), addresses of both B and of the scales."""

    ranks: Any
    gate: Any
    up: Any
    scales_ptr: Any


class _DownRecord(NamedTuple):
    """The record of the next site: address of A, and rank."""

    address: Any
    rank: Any


class _Down(NamedTuple):
    """A of the next site, its rank, and where its v goes."""

    a_ptr: Any
    rank: Any
    v_ptr: Any


class _LowRanks(NamedTuple):
    """`scale * v B^T` of gate and up: v of gate's ranks and then of up's, both B, both scales."""

    v: Shrunk
    b0: LoraB
    b1: LoraB
    scale0: Any
    scale1: Any


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
    columns: tl.tuple,
    form: _Form,
    BLOCK_M: tl.constexpr,
) -> None:
    """Few rows or many. columns: where those of the item begin and end."""
    kind: tl.constexpr = tl.pointer_type(y_ptr.dtype.element_ty)
    ranks = record.ranks
    b0 = LoraB(tl.multiple_of(record.gate.to(kind), 16), (ranks & 0xFFFFFFFF).to(tl.int32))
    b1 = LoraB(tl.multiple_of(record.up.to(kind), 16), (ranks >> 32).to(tl.int32))
    next_site = _Down(tl.multiple_of(down.address.to(kind), 16), down.rank, down_ptr)
    scale0, scale1 = tl.load(record.scales_ptr), tl.load(record.scales_ptr + 1)
    low = _LowRanks(v, b0, b1, scale0, scale1)
    SMALL: tl.constexpr = small_tile(BLOCK_M)
    if v.rows <= SMALL:
        few = tile_rows(order_ptr, v.rows, SMALL)
        _gated_rows(_Matrices(y_ptr, out_ptr, few), low, next_site, columns, form)
    else:
        many = tile_rows(order_ptr, v.rows, BLOCK_M)
        _gated_rows(_Matrices(y_ptr, out_ptr, many), low, next_site, columns, form)


@triton.jit
def _gated_rows(
    target: _Matrices, low: _LowRanks, down: _Down, columns: tl.tuple, form: _Form
) -> None:
    """As many ranks at a time as both projections have, as far as registers go."""
    rank0, rank1 = low.b0.rank, low.b1.rank
    widest = tl.maximum(rank0, rank1)
    evens = _LowRanks(low.v, even(low.b0), even(low.b1), low.scale0, low.scale1)
    if form.down > 0:
        _gated_pieces(target, evens, down, columns, form, form.down)
    elif (rank0 | rank1) % 8 != 0:
        _gated_any_rank(target, low, columns, form)
    elif widest <= 16:
        _gated_pieces(target, evens, down, columns, form, 16)
    elif widest <= 32:
        _gated_pieces(target, evens, down, columns, form, 32)
    elif widest <= 64:
        _gated_pieces(target, evens, down, columns, form, 64)
    else:
        _gated_any_rank(target, evens, columns, form)


@triton.jit
def _gated_pieces(
    target: _Matrices,
    low: _LowRanks,
    down: _Down,
    columns: tl.tuple,
    form: _Form,
    BLOCK_R: tl.constexpr,
) -> None:
    """Where all ranks fit one step: v is read once, pieces of B and of the product ahead."""
    INNER: tl.constexpr = form.inner
    DOWN: tl.constexpr = form.down
    BLOCK_M: tl.constexpr = target.rows.shape[0]
    PIECE: tl.constexpr = form.piece * 16 // BLOCK_R
    PRECISION: tl.constexpr = form.precision
    v, b0, b1, scale0, scale1 = low
    col, end = columns
    r = tl.arange(0, BLOCK_R)
    if DOWN > 0:
        acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    v0 = load_v(v, r, b0.rank, form.max_split, BLOCK_M)
    v1 = load_v(columns_from(v, b0.rank), r, b1.rank, form.max_split, BLOCK_M)
    # Of few columns that is less work, but float16 may not hold what the product would bring back.
    EARLY: tl.constexpr = target.y_ptr.dtype.element_ty != tl.float16
    if EARLY:
        v0, v1 = scale0 * v0, scale1 * v1
    WHOLE: tl.constexpr = INNER % PIECE == 0
    for begin in tl.range(col, end, PIECE, num_stages=form.stages):
        n = begin + tl.arange(0, PIECE)
        at, out_at, live = _places(target.rows, v.rows, n, end, INNER, BLOCK_M, WHOLE)
        gate = tl.load(target.y_ptr + at, mask=live, other=0.0).to(tl.float32)
        up = tl.load(target.y_ptr + INNER + at, mask=live, other=0.0).to(tl.float32)
        if EARLY:
            gate += product(v0, load_b(b0, n, r, end, WHOLE), BLOCK_M, PRECISION)
            up += product(v1, load_b(b1, n, r, end, WHOLE), BLOCK_M, PRECISION)
        else:
            gate += scale0 * product(v0, load_b(b0, n, r, end, WHOLE), BLOCK_M, PRECISION)
            up += scale1 * product(v1, load_b(b1, n, r, end, WHOLE), BLOCK_M, PRECISION)
        out = activated(gate, up, form.activation).to(target.out_ptr.dtype.element_ty)
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
def _gated_any_rank(target: _Matrices, low: _LowRanks, columns: tl.tuple, form: _Form) -> None:
    INNER: tl.constexpr = form.inner
    BLOCK_M: tl.constexpr = target.rows.shape[0]
    PIECE: tl.constexpr = form.piece // 4
    v, b0, b1, scale0, scale1 = low
    col, end = columns
    for begin in range(col, end, PIECE):
        n = begin + tl.arange(0, PIECE)
        at, out_at, live = _places(target.rows, v.rows, n, end, INNER, BLOCK_M, False)
        gate = tl.load(target.y_ptr + at, mask=live, other=0.0).to(tl.float32)
        up = tl.load(target.y_ptr + INNER + at, mask=live, other=0.0).to(tl.float32)
        delta0, delta1 = low_rank(v, b0, b1, n, end, form.max_split, BLOCK_M, PIECE, form.precision)
        gate, up = gate + scale0 * delta0, up + scale1 * delta1
        out = activated(gate, up, form.activation)
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
    """Places of gate in the product and in the result, and which are real."""
    live = (tl.arange(0, BLOCK_M) < length)[:, None]
    if not WHOLE:
        live &= (n < end)[None, :]
    row = rows[:, None]
    return row * (2 * INNER) + n[None, :], row * INNER + n[None, :], live
