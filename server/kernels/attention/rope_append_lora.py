"""`rope_append` with `expand` fused into it.

The linear's output is read once, and nothing of the prompts' rows is written back. Attention
rotates a step's decodes: their rows get the sum.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.attention.pages import CachePages, place_in_pages
from loraplex.server.kernels.attention.rotation import (
    QkNorm,
    Rotation,
    in_halves,
    load_angles,
    norm_and_rotate,
    norm_arguments,
    norm_switch,
    pair_columns,
)
from loraplex.server.kernels.launch.configs import RopeLoraConfig
from loraplex.server.kernels.launch.launch import dot_precision, load_first
from loraplex.server.kernels.lora.checks import check_context, check_whole_tiles
from loraplex.server.kernels.lora.low_rank import (
    LoraB,
    LowRank,
    even_rank,
    load_b,
    load_v,
    low_rank_one,
    product,
)
from loraplex.server.kernels.lora.pending import PendingLora
from loraplex.server.kernels.lora.tiles import (
    Records,
    load_projection,
    load_tile,
    low_rank_of,
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
    cache: CachePages,
    norm: QkNorm | None,
    config: RopeLoraConfig,
) -> torch.Tensor:
    """Rotate and append `qkv + scale * v B^T`, v of the site's `shrink`.

    The first `num_decodes` rows are written back to qkv. The others' rotated queries `[tokens -
    num_decodes, heads, head_dim]` are returned. The result is that of `rope_append` with `expand`
    before it, but that the sum is not rounded before the rotation. For tiles of more than 16 rows.
    positions, slots: of all tokens; k and v of one at -1 are left out. qkv: in the adapters' dtype.
    One kernel. Raises ValueError on a mismatch, and for a norm over all heads or of values, fewer
    parts than q, k and v and pages of eight bits, before which LoRA must be expanded.
    """
    if norm_switch(norm) > 1 or cache.parts < 3:
        raise ValueError("a norm over all heads or of values, and fewer parts, need the sum")
    segments, workspace, table = pending.segments, pending.workspace, pending.table
    tokens, (page_size, kv_heads, head_dim) = len(qkv), cache.k.shape[1:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    _check(qkv, pending, num_decodes, positions, slots, cache)
    q = torch.empty(tokens - num_decodes, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    items = segments.max_tiles * (heads + 2 * kv_heads)
    _rope_lora_kernel[(min(items, config.num_programs),)](
        (qkv, q, cache.k, cache.v, cache.stride),
        rotation.tables,
        positions,
        slots,
        *norm_arguments(norm, qkv, None)[:2],
        workspace.arguments,
        segments.routed,
        table.tensors,
        pending.site,
        table.num_sites,
        num_decodes,
        config.num_programs,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        PAGE_SIZE=page_size,
        MAX_SPLIT=workspace.max_split,
        BLOCK_M=segments.tile_rows,
        MAX_HEADS=config.max_heads,
        STAGES=config.num_stages,
        NORM=norm_switch(norm),
        PRECISION=dot_precision(qkv.dtype),
        **config.launch_options(),
        **rotation.switches(head_dim),
    )
    return q


def _check(
    qkv: torch.Tensor,
    pending: PendingLora,
    num_decodes: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: CachePages,
) -> None:
    segments, workspace = pending.segments, pending.workspace
    check_context(pending.table, pending.site, segments, workspace)
    check_whole_tiles(segments)
    tokens, (kv_heads, head_dim) = len(qkv), cache.k.shape[2:]
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
    for name, pages in (("k_pages", cache.k), ("v_pages", cache.v)):
        form = (pages.shape, pages.stride())
        if pages.dtype != qkv.dtype or form != (cache.k.shape, cache.k.stride()):
            raise ValueError(f"{name} is {pages.dtype} {list(pages.shape)}")
        if not pages[:1].is_contiguous():
            raise ValueError(f"pages of {name} are not contiguous")


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
    workspace: tl.tuple,
    routed: tl.tuple,
    table: tl.tuple,
    site: tl.tensor,
    num_sites: tl.tensor,
    num_decodes: tl.tensor,
    target_items: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
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
    of_site = Records(table[0], table[1], table[2], site, num_sites)
    tiles = tl.load(num_tiles_ptr + 1)
    heads, n0, n01, blocks = _cut_heads(tiles, target_items, HEADS, KV_HEADS, MAX_HEADS)
    items = tiles * blocks
    item, step = tl.program_id(0), tl.num_programs(0)
    slot, tile = load_tile(tiles_ptr, item // blocks, item < items)
    kind = _projection(item % blocks, n0, n01)
    projection = load_projection(of_site, slot, kind)
    item += step
    slot, next_tile = load_tile(tiles_ptr, item // blocks, item < items)
    splits = load_first(workspace[1], PDL)
    for item in range(tl.program_id(0), items, step):
        kind = _projection((item + step) % blocks, n0, n01)
        next_projection = load_projection(of_site, slot, kind)
        ahead = item + 2 * step
        slot, later_tile = load_tile(tiles_ptr, ahead // blocks, ahead < items)
        _rope_tile(
            _Tokens(targets, tables, positions_ptr, slots_ptr, (norm_ptr, epsilon), num_decodes),
            low_rank_of(projection, tile, workspace, splits, targets[0].dtype.element_ty),
            order_ptr + tile.start, _Cut(item % blocks, n0, n01, heads),
            _Form(
                HEADS, KV_HEADS, HALF, PAGE_SIZE, PAIRS, INTERLEAVED, SCALED, NORM,
                MAX_SPLIT, STAGES, PRECISION,
            ),
            BLOCK_M,
        )  # fmt: skip
        projection, tile, next_tile = next_projection, next_tile, later_tile


class _Form(NamedTuple):
    """Form of the kernel. Constants: heads of q and of k, pairs of a head, tokens of a page;
    `Rotation.switches` and `norm_switch`; planes of v, stages of the loop, precision of float32.
    """

    heads: Any
    kv_heads: Any
    half: Any
    page_size: Any
    pairs: Any
    interleaved: Any
    scaled: Any
    norm: Any
    max_split: Any
    stages: Any
    precision: Any


class _Tokens(NamedTuple):
    """Arguments for all tokens: the product, and where queries, keys and values go.

    Tables of the rotation, positions and slots follow, then weights and epsilon of the norm.
    Decodes come first.
    """

    targets: Any
    tables: Any
    positions_ptr: Any
    slots_ptr: Any
    norm: Any
    num_decodes: Any


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
    tokens: _Tokens,
    low: LowRank,
    order_ptr: tl.tensor,
    cut: _Cut,
    form: _Form,
    BLOCK_M: tl.constexpr,
) -> None:
    """Which heads of the projection; few rows or many. order_ptr: of the tile's rows."""
    is_q, is_qk = cut.block < cut.n0, cut.block < cut.n01
    head = (cut.block - tl.where(is_q, 0, tl.where(is_qk, cut.n0, cut.n01))) * cut.heads
    end = tl.minimum(tl.where(is_q, form.heads, form.kv_heads), head + cut.heads)
    span = _Span(is_q, is_qk, head, end)
    SMALL: tl.constexpr = small_tile(BLOCK_M)
    if low.v.rows <= SMALL:
        _rope_rows(tokens, tile_rows(order_ptr, low.v.rows, SMALL), span, low, form)
    else:
        _rope_rows(tokens, tile_rows(order_ptr, low.v.rows, BLOCK_M), span, low, form)


@triton.constexpr_function
def _half_block(half: int) -> int:
    """Columns of a block of half a head: a power of two, of which `dot` takes 16."""
    block: int = triton.next_power_of_2(half)
    return max(16, block)


@triton.jit
def _rope_rows(tokens: _Tokens, rows: tl.tensor, span: _Span, low: LowRank, form: _Form) -> None:
    """Where each row is read and goes, for the projection's first head, and its angles."""
    qkv_ptr, q_ptr, k_pages_ptr, v_pages_ptr, stride = tokens.targets
    HEADS: tl.constexpr = form.heads
    KV_HEADS: tl.constexpr = form.kv_heads
    HALF: tl.constexpr = form.half
    is_q, is_qk = span.is_q, span.is_qk
    live = tl.arange(0, rows.shape[0]) < low.v.rows
    column = tl.where(is_q, 0, tl.where(is_qk, HEADS, HEADS + KV_HEADS)) * 2 * HALF
    y_rows = qkv_ptr + rows * ((HEADS + 2 * KV_HEADS) * 2 * HALF) + column
    slot = tl.load(tokens.slots_ptr + rows, mask=live, other=0)
    place = tl.where(is_q, rows - tokens.num_decodes, slot)
    target_ptr = tl.where(is_q, q_ptr, tl.where(is_qk, k_pages_ptr, v_pages_ptr))
    # Rows of q lie as if each had a page.
    page = tl.where(is_q, place, slot // form.page_size)
    offset = tl.where(is_q, 0, slot % form.page_size)
    stride = tl.where(is_q, HEADS * 2 * HALF, stride)
    target_rows = target_ptr + place_in_pages(page, offset, stride, KV_HEADS * 2 * HALF)
    d = tl.arange(0, _half_block(HALF))[None, :]
    turned = tl.where(is_qk, HALF, 0)
    real = live[:, None] & (d < turned)
    position = tl.load(tokens.positions_ptr + rows, mask=live, other=0)[:, None]
    angles = load_angles(tokens.tables, position, d, real, is_q, form.pairs, form.scaled)
    _rope_ranks(
        (y_rows, target_rows, rows < tokens.num_decodes, live, place >= 0),
        (tokens.norm[0] + column, tokens.norm[1], angles, turned), low, span, form,
    )  # fmt: skip


@triton.jit
def _rope_ranks(rows: tl.tuple, rotation: tl.tuple, low: LowRank, span: _Span, form: _Form) -> None:
    """As many ranks at a time as the adapter has, as far as registers go."""
    rank = low.b.rank
    if rank % 8 != 0:
        _rope_heads(rows, rotation, low, span, form, 16, True)
    elif rank <= 16:
        _rope_heads(rows, rotation, even_rank(low), span, form, 16, False)
    elif rank <= 32:
        _rope_heads(rows, rotation, even_rank(low), span, form, 32, False)
    elif rank <= 64:
        _rope_heads(rows, rotation, even_rank(low), span, form, 64, False)
    else:
        _rope_heads(rows, rotation, even_rank(low), span, form, 32, True)


@triton.jit
def _rope_heads(
    rows: tl.tuple,
    rotation: tl.tuple,
    low: LowRank,
    span: _Span,
    form: _Form,
    BLOCK_R: tl.constexpr,
    LOOPED: tl.constexpr,
) -> None:
    """The span's heads of a tile's rows. LOOPED: BLOCK_R columns of B at a time; else v is read
    once, and heads of the product and of B are prefetched."""
    HALF: tl.constexpr = form.half
    MAX_SPLIT: tl.constexpr = form.max_split
    PRECISION: tl.constexpr = form.precision
    STAGES: tl.constexpr = 1 if LOOPED else form.stages
    v, b = low.v, low.b
    y_rows, target_rows, decode, live, placed = rows
    BLOCK_M: tl.constexpr = y_rows.shape[0]
    BLOCK_D: tl.constexpr = _half_block(HALF)
    norm_ptr, epsilon, angles, turned = rotation
    d, r = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    real = live[:, None] & (d < HALF)[None, :]
    kept, moved = real & decode[:, None], real & (placed & (decode == 0))[:, None]
    rotated = (d < turned)[None, :]
    column, apart = pair_columns(d[None, :], rotated, form.pairs, form.interleaved, HALF)
    HALVES: tl.constexpr = in_halves(form.pairs, form.interleaved, HALF)
    END: tl.constexpr = HALF if HALVES else 2 * HALF
    if not LOOPED:
        total = load_v(v, r, b.rank, MAX_SPLIT, BLOCK_M)
    for h in tl.range(span.head, span.end, num_stages=STAGES):
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
        first = first.to(tl.float32) + low.scale * delta_first
        second = second.to(tl.float32) + low.scale * delta_second
        new_first, new_second = norm_and_rotate(
            (first, second), norm_ptr + (h * 2 * HALF + column), apart,
            (rotated, epsilon, 1.0), angles, rotated & (decode == 0)[:, None], HALF, form.norm,
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
