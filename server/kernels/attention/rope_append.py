"""Rotary embedding, the optional norm of q and k, and the write of k and v into their pages.

One launch a layer, and one more for a norm over all heads.
"""

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
from loraplex.server.kernels.attention.rotation import (
    QkNorm,
    Rotation,
    load_angles,
    norm_and_rotate,
    norm_arguments,
    norm_factors,
    norm_switch,
    pair_columns,
)

_HEADS_A_PROGRAM = 8


def rope_append(
    qkv: torch.Tensor,
    rotation: Rotation,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: CachePages,
    norm: QkNorm | None,
) -> torch.Tensor:
    """Returns the rotated queries `[tokens, heads, head_dim]`, whose features lie as those of
    cached keys do (`rotation.py`); k and v go to their places.

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
