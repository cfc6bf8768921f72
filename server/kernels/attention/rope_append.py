"""Rotary embedding, the optional norm of q and k, and the write of k and v into their pages.

One launch a layer, and one more for a norm over all heads. With `expand` fused into it the linear's
output is read once, and nothing of the prompts' rows is written back. Attention rotates a step's
decodes: their rows get the sum.

A head is a list of pairs of features, in float32. Those that turn come first. In a cached key, and
in the query beside it, the first features of all pairs lie before the second ones, whatever their
order in the linear's output: scores are the same for every order that both have.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.attention.pages import (
    CachePages,
    as_stored,
    as_whole,
    head_scales,
    place_in_pages,
)
from loraplex.server.kernels.launch.configs import RopeLoraConfig
from loraplex.server.kernels.launch.launch import dot_precision, follow, load_first
from loraplex.server.kernels.lora.pending import PendingDelta, PendingLora, delta_arguments
from loraplex.server.kernels.lora.segments import check_context, check_whole_tiles
from loraplex.server.kernels.lora.tiles import (
    LoraB,
    LowRank,
    Records,
    even_rank,
    load_b,
    load_projection,
    load_tile,
    load_v,
    low_rank_of,
    low_rank_one,
    product,
    small_tile,
    tile_rows,
    touches,
)

_HEADS_A_PROGRAM = 8


@dataclass(frozen=True, slots=True)
class Rotation:
    """How positions turn q and k.

    cos_sin: float32 `[positions, 2 n]`, cosines first, of the n pairs that turn; 0 of them turn
    nothing. interleaved: pairs are neighbours, `x[2 i]` and `x[2 i + 1]`; else halves, `x[i]` and
    `x[i + n]`. q_scale: float32 `[positions]`, a factor of queries, or None.
    """

    cos_sin: torch.Tensor
    interleaved: bool = False
    q_scale: torch.Tensor | None = None

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos_sin and q_scale, or what stands in for it."""
        return self.cos_sin, self.cos_sin if self.q_scale is None else self.q_scale

    def switches(self, head_dim: int) -> dict[str, Any]:
        """Constants of kernels. Raises ValueError where more turns than a head has."""
        pairs = self.cos_sin.shape[1] // 2
        if 2 * pairs > head_dim:
            raise ValueError(f"{2 * pairs} features turn, a head has {head_dim}")
        scaled = self.q_scale is not None
        return {"PAIRS": pairs, "INTERLEAVED": self.interleaved, "SCALED": scaled}


@dataclass(frozen=True, slots=True)
class QkNorm:
    """An RMS norm of q and k before the rotation. weights: `[heads + kv_heads, head_dim]`, or of
    q alone. all_heads: over all heads of q together, and over those of k; else over each head.
    values: over each value, too, without weights; not with all_heads."""

    weights: torch.Tensor
    epsilon: float
    all_heads: bool = False
    values: bool = False


def norm_arguments(
    norm: QkNorm | None, qkv: torch.Tensor, factors: torch.Tensor | None
) -> tuple[torch.Tensor, float, torch.Tensor]:
    """Weights, epsilon and factors, or what stands in for them."""
    weights, epsilon = (qkv, 0.0) if norm is None else (norm.weights, norm.epsilon)
    return weights, epsilon, qkv if factors is None else factors


def norm_switch(norm: QkNorm | None) -> int:
    """The constant NORM of kernels: 0 = without, 1 = of each head, 2 = of all heads, 3 = of each
    head, and of values."""
    if norm is None:
        return 0
    if norm.all_heads:
        return 2
    return 3 if norm.values else 1


def norm_factors(
    qkv: torch.Tensor,
    pending: PendingDelta | None,
    norm: QkNorm | None,
    sizes: tuple[int, int],
    *,
    programmatic_launch: bool,
) -> torch.Tensor | None:
    """Factors of q and k by a norm over all heads, before its weights: float32 `[tokens, 2]`.

    None where there is no such norm. One kernel. qkv: `[tokens, features]`, contiguous; pending:
    LoRA of it. sizes: features of q, and of k.
    """
    if norm is None or not norm.all_heads:
        return None
    tokens, features = qkv.shape
    factors = torch.empty(tokens, 2, dtype=torch.float32, device=qkv.device)
    if tokens:
        _norm_factors_kernel[(tokens, 2)](
            qkv,
            *delta_arguments(qkv, pending),
            factors,
            norm.epsilon,
            FEATURES=features,
            Q=sizes[0],
            K=sizes[1],
            BLOCK=triton.next_power_of_2(max(sizes)),
            LORA=pending is not None,
            PDL=programmatic_launch,
            num_warps=8,
            launch_pdl=programmatic_launch,
        )
    return factors


@triton.jit(
    do_not_specialize=["site", "num_sites", "epsilon"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _norm_factors_kernel(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    factors_ptr: tl.tensor,
    epsilon: tl.tensor,
    FEATURES: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    LORA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program takes q or k of one token."""
    follow(PDL)
    row, projection = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, BLOCK)
    size = tl.where(projection == 0, Q, K)
    at = row * FEATURES + projection * Q + n
    x = tl.load(x_ptr + at, mask=n < size, other=0.0).to(tl.float32)
    if LORA:
        # Read beside the chain slot -> rank, not after it, and dropped where it means nothing.
        delta = tl.load(delta_ptr + at, mask=n < size, other=0.0).to(tl.float32)
        touched = touches(slots_ptr + row, ints_ptr, site, num_sites, projection)
        x += tl.where(touched, delta, 0.0)
    tl.store(factors_ptr + row * 2 + projection, tl.rsqrt(tl.sum(x * x, axis=0) / size + epsilon))


@triton.constexpr_function
def in_halves(pairs: int, interleaved: bool, half: int) -> bool:
    """Whether a head's features lie as cached keys have them."""
    return not interleaved and pairs in (0, half)


@triton.jit
def pair_columns(
    d: tl.tensor,
    turned: tl.tensor,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[Any, Any]:
    """Where in a head the first feature of pair d lies, and how far behind it the second one; where
    not turned, in halves."""
    if in_halves(PAIRS, INTERLEAVED, HALF):
        return d, HALF
    elif INTERLEAVED:
        return tl.where(turned, 2 * d, d), tl.where(turned, 1, HALF)
    else:
        column = tl.where(turned & (d >= PAIRS), d + PAIRS, d)
        return column, tl.where(turned, tl.where(d < PAIRS, PAIRS, HALF - PAIRS), HALF)


@triton.jit
def load_angles(
    tables: tl.tuple,
    position: tl.tensor,
    d: tl.tensor,
    live: tl.tensor,
    is_q: tl.tensor,
    PAIRS: tl.constexpr,
    SCALED: tl.constexpr,
) -> tuple[Any, Any]:
    """Cosine and sine of pairs d. tables: as of `Rotation`."""
    angle = tables[0] + position * (2 * PAIRS) + d
    cos = tl.load(angle, mask=live & (d < PAIRS), other=1.0)
    sin = tl.load(angle + PAIRS, mask=live & (d < PAIRS), other=0.0)
    if SCALED:
        factor = tl.where(is_q, tl.load(tables[1] + position), 1.0)
        cos, sin = cos * factor, sin * factor
    return cos, sin


@triton.jit
def head_factor(first: tl.tensor, second: tl.tensor, epsilon: tl.tensor, HALF: tl.constexpr) -> Any:
    """The factor of each head by an RMS norm, before its weights: `[heads, 1]`."""
    mean = tl.sum(first * first + second * second, axis=1) / (2 * HALF)
    return tl.rsqrt(mean + epsilon)[:, None]


@triton.jit
def norm_and_rotate(
    raw: tl.tuple,
    weight_ptr: tl.tensor,
    apart: tl.tensor,
    norm: tl.tuple,
    angles: tl.tuple,
    rotated: tl.tensor,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
) -> tuple[Any, Any]:
    """The first and the second features of pairs, float32 `[heads or tokens, BLOCK_D]`, 0 beyond
    HALF; where not rotated, as they are, or normed without weights. weight_ptr: where the norm's
    weights of the first ones lie; apart: as of `pair_columns`. norm: which weights there are,
    epsilon, factor. angles: as of `load_angles`."""
    first, second = raw
    cos, sin = angles
    if NORM != 0:
        normed, epsilon, factor = norm
        if NORM != 2:
            factor = head_factor(first, second, epsilon, HALF)
        if NORM == 3:
            raw = (first * factor, second * factor)
        first *= factor * tl.load(weight_ptr, mask=normed, other=0.0).to(tl.float32)
        second *= factor * tl.load(weight_ptr + apart, mask=normed, other=0.0).to(tl.float32)
    new_first = tl.where(rotated, first * cos - second * sin, raw[0])
    new_second = tl.where(rotated, second * cos + first * sin, raw[1])
    return new_first, new_second


def rope_append(
    qkv: torch.Tensor,
    rotation: Rotation,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: CachePages,
    norm: QkNorm | None,
) -> torch.Tensor:
    """Returns the rotated queries `[tokens, heads, head_dim]`, whose features lie as those of
    cached keys do; k and v go to their places.

    qkv: `[tokens, (heads + 2 kv_heads) * head_dim]`, contiguous, or of fewer parts
    (`CachePages.parts`). positions: int64 `[tokens]`, rows
    of the rotation's tables. slots: int64 `[tokens]`, page * page_size + offset; a token at -1 is
    left out, and so are its queries. Raises ValueError where more turns than a head has.
    """
    page_size, kv_heads, head_dim = cache.k.shape[1:]
    tokens = qkv.shape[0]
    heads = cache.heads(qkv.shape[1])
    all_heads = heads if cache.parts == 1 else heads + 2 * kv_heads
    q = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    sizes = (heads * head_dim, kv_heads * head_dim)
    factors = norm_factors(qkv, None, norm, sizes, programmatic_launch=False)
    _rope_append_kernel[(tokens, triton.cdiv(all_heads, _HEADS_A_PROGRAM))](
        qkv,
        q,
        rotation.tables,
        positions,
        slots,
        cache.arguments,
        *norm_arguments(norm, qkv, factors),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        PAGE_SIZE=page_size,
        BLOCK_D=triton.next_power_of_2(head_dim // 2),
        BLOCK_H=_HEADS_A_PROGRAM,
        PARTS=cache.parts,
        NORM=norm_switch(norm),
        num_warps=2,
        **rotation.switches(head_dim),
    )
    return q


# Of a step with decodes before the prompts these begin at any token: no kernel for each alignment.
@triton.jit(
    do_not_specialize=["epsilon"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"]
)
def _rope_append_kernel(
    qkv_ptr: tl.tensor,
    q_ptr: tl.tensor,
    tables: tl.tuple,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    cache: tl.tuple,
    norm_ptr: tl.tensor,
    epsilon: tl.tensor,
    factors_ptr: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """A program takes some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = d < HALF
    slot = tl.load(slots_ptr + token)
    ALL_HEADS: tl.constexpr = HEADS if PARTS == 1 else HEADS + 2 * KV_HEADS
    live = (head < tl.where(slot >= 0, ALL_HEADS, 0)) & inside
    rotated = head < HEADS + KV_HEADS
    column, apart = pair_columns(d, rotated, PAIRS, INTERLEAVED, HALF)
    of_head = head
    if PARTS == 2:  # keys are values
        of_head = tl.where(rotated, head, head - KV_HEADS)
    source = qkv_ptr + (token * (HEADS + (PARTS - 1) * KV_HEADS) + of_head) * 2 * HALF + column
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    first = tl.load(source, mask=live, other=0.0).to(tl.float32)
    second = tl.load(source + apart, mask=live, other=0.0).to(tl.float32)
    is_key = head >= HEADS
    position = tl.load(positions_ptr + token)
    angles = load_angles(tables, position, d, inside, head < HEADS, PAIRS, SCALED)
    factor = tl.load(factors_ptr + token * 2 + is_key.to(tl.int32)) if NORM == 2 else 1.0
    first, second = norm_and_rotate(
        (first, second), norm_ptr + head * 2 * HALF + column, apart,
        (live & rotated, epsilon, factor), angles, rotated, HALF, NORM,
    )  # fmt: skip
    new_first, new_second = first.to(dtype), second.to(dtype)
    is_q = live & (head < HEADS)
    target = q_ptr + (token * HEADS + head) * 2 * HALF + d
    tl.store(target, new_first, mask=is_q)
    tl.store(target + HALF, new_second, mask=is_q)
    if PARTS > 1:
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        place = place_in_pages(page, offset, cache[5], KV_HEADS * 2 * HALF)
        is_k, is_v = live & rotated & is_key, live & (head >= HEADS + KV_HEADS)
        scales = cache[6]
        if scales is not None:
            of_head = head_scales(new_first, new_second)
            new_first, new_second = as_whole(new_first, of_head), as_whole(new_second, of_head)
            at = page * scales[2] + (head - HEADS) * PAGE_SIZE + offset
            kept = (slot >= 0) & (head < HEADS + 2 * KV_HEADS)
            tl.store(scales[0] + at, of_head * cache[2], mask=kept & is_key & rotated)
            at -= KV_HEADS * PAGE_SIZE
            tl.store(scales[1] + at, of_head * cache[3], mask=kept & (head >= HEADS + KV_HEADS))
        target = cache[0] + place + (head - HEADS) * 2 * HALF + d
        tl.store(target, as_stored(new_first, cache[2], target), mask=is_k)
        tl.store(target + HALF, as_stored(new_second, cache[2], target), mask=is_k)
        target = cache[1] + place + (head - HEADS - KV_HEADS) * 2 * HALF + d
        tl.store(target, as_stored(new_first, cache[3], target), mask=is_v)
        tl.store(target + HALF, as_stored(new_second, cache[3], target), mask=is_v)


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
    """Rotate and append a program's heads of the projection, of few rows or many. order_ptr: of the
    tile's rows."""
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
