"""`rope_append` with `expand` fused into it.

The linear's output is read once, and nothing of the prompts' rows is written back. Attention
rotates a step's decodes: their rows get the sum.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from server.kernels.attention.rotation import (
    QkNorm,
    Rotation,
    in_halves,
    load_angles,
    norm_and_rotate,
    norm_arguments,
    norm_switch,
    pair_columns,
)
from server.kernels.launch.configs import RopeLoraConfig
from server.kernels.launch.launch import load_first
from server.kernels.lora.checks import check_context, check_whole_tiles
from server.kernels.lora.low_rank import LoraB, Shrunk, even, load_b, load_v, low_rank_one, product
from server.kernels.lora.pending import PendingLora
from server.kernels.lora.tiles import (
    ProjectionRecord,
    Records,
    Tile,
    load_projection,
    load_tile,
    small_tile,
    tile_rows,
)


def rope_append_lora(
    qkv: torch.Tensor,
    pending: PendingLora,
    num_decodes: int,
    rotation: Rotation,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    norm: QkNorm | None,
    config: RopeLoraConfig,
) -> torch.Tensor:
    """Of `qkv + scale * v B^T`, v of the site's `shrink`: the first `num_decodes` rows are written
    back to qkv, the others' rotated queries `[tokens - num_decodes, heads, head_dim]` returned.

    As `rope_append` with `expand` before it, but that the sum of what is rotated is not rounded
    before. For tiles of more than 16 rows. positions, slots: of all tokens; k and v of one at -1
    are left out. qkv: in the adapters' dtype. One kernel. Raises ValueError on a mismatch, and for
    a norm over all heads, which must be expanded first.
    """
    if norm is not None and norm.all_heads:
        raise ValueError("a norm over all heads needs the sum that is rotated")
    segments, workspace, table = pending.segments, pending.workspace, pending.table
    tokens, (kv_heads, head_dim) = len(qkv), k_pages.shape[2:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    _check(qkv, pending, num_decodes, positions, slots, k_pages, v_pages)
    q = torch.empty(tokens - num_decodes, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    items = segments.max_tiles * (heads + 2 * kv_heads)
    _rope_lora_kernel[(min(items, config.num_programs),)](
        (qkv, q, k_pages, v_pages),
        rotation.tables,
        positions,
        slots,
        *norm_arguments(norm, qkv, None)[:2],
        (workspace.planes, workspace.planes.stride(1), workspace.planes.stride(0)),
        workspace.splits,
        (segments.order, segments.tiles, segments.num_tiles),
        (table.words, table.ints, table.floats),
        pending.site,
        table.num_sites,
        num_decodes,
        config.num_programs,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        MAX_SPLIT=workspace.max_split,
        BLOCK_M=segments.tile_rows,
        MAX_HEADS=config.max_heads,
        STAGES=config.num_stages,
        NORM=norm_switch(norm),
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        PDL=config.programmatic_launch,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
        launch_pdl=config.programmatic_launch,
        **rotation.switches(head_dim),
    )
    return q


def _check(
    qkv: torch.Tensor,
    pending: PendingLora,
    num_decodes: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
) -> None:
    segments, workspace = pending.segments, pending.workspace
    check_context(pending.table, pending.site, segments, workspace)
    check_whole_tiles(segments)
    tokens, (kv_heads, head_dim) = len(qkv), k_pages.shape[2:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    if not qkv.is_contiguous() or qkv.dtype != workspace.dtype or tokens != segments.rows:
        raise ValueError(
            f"qkv is {qkv.dtype} {list(qkv.shape)}, for {workspace.dtype} [{segments.rows}]"
        )
    if segments.tile_rows <= 16:
        raise ValueError(f"tiles of {segments.tile_rows} rows are expanded in place")
    if heads < 1 or qkv.shape[1] % head_dim:
        raise ValueError(
            f"{qkv.shape[1]} columns are not q, {kv_heads} k and v heads of {head_dim}"
        )
    if not 0 <= num_decodes <= tokens:
        raise ValueError(f"num_decodes {num_decodes} is not in 0..{tokens}")
    if positions.shape != (tokens,) or slots.shape != (tokens,):
        raise ValueError(
            f"positions {list(positions.shape)} and slots {list(slots.shape)} are not [{tokens}]"
        )
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.dtype != qkv.dtype or pages.shape != k_pages.shape or not pages.is_contiguous():
            raise ValueError(f"{name} is {pages.dtype} {list(pages.shape)}")


# Positions and slots begin anywhere in an upload: no kernel for each alignment.
@triton.jit(
    do_not_specialize=["epsilon", "site", "num_sites", "num_decodes", "target_items"],
    do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"],
)
def _rope_lora_kernel(
    targets: tl.tuple,
    tables: tl.tuple,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    epsilon: tl.tensor,
    planes: tl.tuple,
    splits_ptr: tl.tensor,
    routed: tl.tuple,
    records: tl.tuple,
    site: tl.tensor,
    num_sites: tl.tensor,
    num_decodes: tl.tensor,
    target_items: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MAX_HEADS: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """An item is (tile of rows, some heads of one projection), round robin; as in `shrink`."""
    order_ptr, tiles_ptr, num_tiles_ptr = routed
    of_site = Records(records[0], records[1], records[2], site, num_sites)
    tiles = tl.load(num_tiles_ptr + 1)
    heads, n0, n01, blocks = _cut_heads(tiles, target_items, HEADS, KV_HEADS, MAX_HEADS)
    items = tiles * blocks
    item, step = tl.program_id(0), tl.num_programs(0)
    slot, tile = load_tile(tiles_ptr, item // blocks, item < items)
    kind = _projection(item % blocks, n0, n01)
    projection = load_projection(of_site, slot, kind)
    item += step
    slot, next_tile = load_tile(tiles_ptr, item // blocks, item < items)
    splits = load_first(splits_ptr, PDL)
    for item in range(tl.program_id(0), items, step):
        kind = _projection((item + step) % blocks, n0, n01)
        next_projection = load_projection(of_site, slot, kind)
        ahead = item + 2 * step
        slot, later_tile = load_tile(tiles_ptr, ahead // blocks, ahead < items)
        _rope_tile(
            targets, tables, positions_ptr, slots_ptr, (norm_ptr, epsilon), num_decodes,
            planes, splits, order_ptr, tile, projection, _Cut(item % blocks, n0, n01, heads),
            HEADS, KV_HEADS, HALF, MAX_SPLIT, BLOCK_M, STAGES, NORM, PRECISION,
            PAIRS, INTERLEAVED, SCALED,
        )  # fmt: skip
        projection, tile, next_tile = next_projection, next_tile, later_tile


class _Cut(NamedTuple):
    """A block of heads, where the blocks of k and of v begin, and how many heads a block has."""

    block: Any
    n0: Any
    n01: Any
    heads: Any


class _Span(NamedTuple):
    """Whether the projection is q, and q or k; its first head and where the heads end."""

    is_q: Any
    is_qk: Any
    head: Any
    end: Any


class _LowRank(NamedTuple):
    """`scale * v B^T`, which the projection adds."""

    v: Shrunk
    b: LoraB
    scale: Any


@triton.jit
def _cut_heads(
    tiles: tl.tensor,
    target_items: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    MAX_HEADS: tl.constexpr,
) -> tuple[Any, Any, Any, Any]:
    """Heads of a block, and how many blocks q, q and k, and all three have."""
    wanted = tl.cdiv((HEADS + 2 * KV_HEADS) * tiles, target_items)
    heads = tl.maximum(1, tl.minimum(MAX_HEADS, wanted))
    n0, of_kv = tl.cdiv(HEADS, heads), tl.cdiv(KV_HEADS, heads)
    return heads, n0, n0 + of_kv, n0 + 2 * of_kv


@triton.jit
def _projection(block: tl.tensor, n0: tl.tensor, n01: tl.tensor) -> Any:
    return (block >= n0).to(tl.int32) + (block >= n01).to(tl.int32)


@triton.jit
def _rope_tile(
    targets: tl.tuple,
    tables: tl.tuple,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    norm: tl.tuple,
    num_decodes: tl.tensor,
    planes: tl.tuple,
    splits: tl.tensor,
    order_ptr: tl.tensor,
    tile: Tile,
    projection: ProjectionRecord,
    cut: _Cut,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """What the projection's weights and v are, and which heads; few rows or many."""
    planes_ptr, stride_v, stride_plane = planes
    order_ptr += tile.start
    is_q, is_qk = cut.block < cut.n0, cut.block < cut.n01
    head = (cut.block - tl.where(is_q, 0, tl.where(is_qk, cut.n0, cut.n01))) * cut.heads
    end = tl.minimum(tl.where(is_q, HEADS, KV_HEADS), head + cut.heads)
    span = _Span(is_q, is_qk, head, end)
    b_ptr = projection.address.to(tl.pointer_type(targets[0].dtype.element_ty))
    b = LoraB(tl.multiple_of(b_ptr, 16), projection.rank)
    v_ptr = planes_ptr + tile.start * stride_v + projection.first
    v = Shrunk(v_ptr, stride_v, stride_plane, splits, tile.length)
    low = _LowRank(v, b, projection.scale)
    SMALL: tl.constexpr = small_tile(BLOCK_M)
    if v.rows <= SMALL:
        few = tile_rows(order_ptr, v.rows, SMALL)
        _rope_rows(
            targets, tables, positions_ptr, slots_ptr, norm, num_decodes, few, span, low,
            HEADS, KV_HEADS, HALF, MAX_SPLIT, SMALL, STAGES, NORM, PRECISION,
            PAIRS, INTERLEAVED, SCALED,
        )  # fmt: skip
    else:
        many = tile_rows(order_ptr, v.rows, BLOCK_M)
        _rope_rows(
            targets, tables, positions_ptr, slots_ptr, norm, num_decodes, many, span, low,
            HEADS, KV_HEADS, HALF, MAX_SPLIT, BLOCK_M, STAGES, NORM, PRECISION,
            PAIRS, INTERLEAVED, SCALED,
        )  # fmt: skip


@triton.constexpr_function
def _half_block(half: int) -> int:
    """Columns of a block of half a head: a power of two, of which `dot` takes 16."""
    block: int = triton.next_power_of_2(half)
    return max(16, block)


@triton.jit
def _rope_rows(
    targets: tl.tuple,
    tables: tl.tuple,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    norm: tl.tuple,
    num_decodes: tl.tensor,
    rows: tl.tensor,
    span: _Span,
    low: _LowRank,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Where each row is read and goes, for the projection's first head, and its angles."""
    qkv_ptr, q_ptr, k_pages_ptr, v_pages_ptr = targets
    is_q, is_qk = span.is_q, span.is_qk
    live = tl.arange(0, BLOCK_M) < low.v.rows
    column = tl.where(is_q, 0, tl.where(is_qk, HEADS, HEADS + KV_HEADS)) * 2 * HALF
    y_rows = qkv_ptr + rows * ((HEADS + 2 * KV_HEADS) * 2 * HALF) + column
    place = tl.where(is_q, rows - num_decodes, tl.load(slots_ptr + rows, mask=live, other=0))
    target_ptr = tl.where(is_q, q_ptr, tl.where(is_qk, k_pages_ptr, v_pages_ptr))
    target_rows = target_ptr + place * (tl.where(is_q, HEADS, KV_HEADS) * 2 * HALF)
    BLOCK_D: tl.constexpr = _half_block(HALF)
    d = tl.arange(0, BLOCK_D)[None, :]
    turned = tl.where(is_qk, HALF, 0)
    real = live[:, None] & (d < turned)
    position = tl.load(positions_ptr + rows, mask=live, other=0)[:, None]
    angles = load_angles(tables, position, d, real, is_q, PAIRS, SCALED)
    _rope_ranks(
        (y_rows, target_rows, rows < num_decodes, live, place >= 0),
        (norm[0] + column, norm[1], angles, turned), low, span.head, span.end,
        HALF, MAX_SPLIT, BLOCK_M, BLOCK_D, STAGES, NORM, PRECISION,
        PAIRS, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def _rope_ranks(
    rows: tl.tuple,
    rotation: tl.tuple,
    low: _LowRank,
    head: tl.tensor,
    end: tl.tensor,
    HALF: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    """As many ranks at a time as the adapter has, as far as registers go."""
    rank = low.b.rank
    if rank % 8 != 0:
        _rope_heads(
            rows, rotation, low.v, low.b, low.scale, head, end,
            HALF, MAX_SPLIT, BLOCK_M, BLOCK_D, 16, True, 1, NORM, PRECISION,
            PAIRS, INTERLEAVED,
        )  # fmt: skip
    elif rank <= 16:
        _rope_heads(
            rows, rotation, low.v, even(low.b), low.scale, head, end,
            HALF, MAX_SPLIT, BLOCK_M, BLOCK_D, 16, False, STAGES, NORM, PRECISION,
            PAIRS, INTERLEAVED,
        )  # fmt: skip
    elif rank <= 32:
        _rope_heads(
            rows, rotation, low.v, even(low.b), low.scale, head, end,
            HALF, MAX_SPLIT, BLOCK_M, BLOCK_D, 32, False, STAGES, NORM, PRECISION,
            PAIRS, INTERLEAVED,
        )  # fmt: skip
    elif rank <= 64:
        _rope_heads(
            rows, rotation, low.v, even(low.b), low.scale, head, end,
            HALF, MAX_SPLIT, BLOCK_M, BLOCK_D, 64, False, STAGES, NORM, PRECISION,
            PAIRS, INTERLEAVED,
        )  # fmt: skip
    else:
        _rope_heads(
            rows, rotation, low.v, even(low.b), low.scale, head, end,
            HALF, MAX_SPLIT, BLOCK_M, BLOCK_D, 32, True, 1, NORM, PRECISION,
            PAIRS, INTERLEAVED,
        )  # fmt: skip


@triton.jit
def _rope_heads(
    rows: tl.tuple,
    rotation: tl.tuple,
    v: Shrunk,
    b: LoraB,
    scale: tl.tensor,
    head: tl.tensor,
    end: tl.tensor,
    HALF: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LOOPED: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    """Heads head .. end of a tile's rows. LOOPED: BLOCK_R columns of B at a time; else
    v is read once, and heads of the product and of B are prefetched."""
    y_rows, target_rows, decode, live, placed = rows
    norm_ptr, epsilon, angles, turned = rotation
    d, r = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    real = live[:, None] & (d < HALF)[None, :]
    kept, moved = real & decode[:, None], real & (placed & (decode == 0))[:, None]
    rotated = (d < turned)[None, :]
    column, apart = pair_columns(d[None, :], rotated, PAIRS, INTERLEAVED, HALF)
    HALVES: tl.constexpr = in_halves(PAIRS, INTERLEAVED, HALF)
    END: tl.constexpr = HALF if HALVES else 2 * HALF
    if not LOOPED:
        total = load_v(v, r, b.rank, MAX_SPLIT, BLOCK_M)
    for h in tl.range(head, end, num_stages=STAGES):
        at = h * 2 * HALF + d[None, :]
        source = y_rows[:, None] + (h * 2 * HALF + column)
        first = tl.load(source, mask=real, other=0.0)
        second = tl.load(source + apart, mask=real, other=0.0)
        b_first, b_second, n_first, n_second = _rows_of_b(b, h, d, column, apart, HALF, HALVES)
        if LOOPED:
            delta_first = low_rank_one(
                v, b_first, n_first, END, MAX_SPLIT, BLOCK_M, BLOCK_D, BLOCK_R, PRECISION
            )
            delta_second = low_rank_one(
                v, b_second, n_second, END, MAX_SPLIT, BLOCK_M, BLOCK_D, BLOCK_R, PRECISION
            )
        else:
            delta_first = product(total, load_b(b_first, n_first, r, END), BLOCK_M, PRECISION)
            delta_second = product(total, load_b(b_second, n_second, r, END), BLOCK_M, PRECISION)
        first = first.to(tl.float32) + scale * delta_first
        second = second.to(tl.float32) + scale * delta_second
        new_first, new_second = norm_and_rotate(
            (first, second), norm_ptr + (h * 2 * HALF + column), apart,
            (rotated, epsilon, 1.0), angles, rotated & (decode == 0)[:, None], HALF, NORM,
        )  # fmt: skip
        # A choice between addresses would cost the vectors.
        tl.store(source, new_first, mask=kept)
        tl.store(source + apart, new_second, mask=kept)
        tl.store(target_rows[:, None] + at, new_first, mask=moved)
        tl.store(target_rows[:, None] + at + HALF, new_second, mask=moved)


@triton.jit
def _rows_of_b(
    b: LoraB,
    h: tl.tensor,
    d: tl.tensor,
    column: tl.tensor,
    apart: tl.tensor,
    HALF: tl.constexpr,
    HALVES: tl.constexpr,
) -> tuple[Any, Any, Any, Any]:
    """B of head h for the first and the second features of pairs d, and which of its rows: they end
    at HALF where features lie in halves, else at twice that."""
    b_first = LoraB(b.ptr + h * 2 * HALF * b.rank, b.rank)
    if HALVES:
        return b_first, LoraB(b_first.ptr + HALF * b.rank, b.rank), d, d
    else:
        last: tl.constexpr = 2 * HALF
        first = tl.where(d < HALF, tl.reshape(column, d.shape[0]), last)
        second = tl.where(d < HALF, tl.reshape(column + apart, d.shape[0]), last)
        return b_first, b_first, first, second
