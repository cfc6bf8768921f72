"""Rotary embedding, the optional norm of q and k, and the write of k and v into their pages.

One launch a layer. Heads are rotated in halves, in float32, by a table of cosines and sines.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_HEADS_A_PROGRAM = 8


def rope_append(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    qk_norm: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """Returns the rotated queries `[tokens, heads, head_dim]`; k and v go to their places.

    qkv: `[tokens, (heads + 2 kv_heads) * head_dim]`, contiguous. cos_sin: float32 `[positions,
    head_dim]`, cosines first. positions: int64 `[tokens]`. slots: int64 `[tokens]`, page *
    page_size + offset; a token at -1 is left out, and so are its queries. k_pages, v_pages:
    `[pages, page_size, kv_heads, head_dim]`, contiguous.
    qk_norm: `[heads + kv_heads, head_dim]`, weights of an RMS norm before the rotation.
    """
    kv_heads, head_dim = k_pages.shape[2:]
    tokens = qkv.shape[0]
    all_heads = qkv.shape[1] // head_dim
    heads = all_heads - 2 * kv_heads
    q = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    _rope_append_kernel[(tokens, triton.cdiv(all_heads, _HEADS_A_PROGRAM))](
        qkv,
        q,
        cos_sin,
        positions,
        slots,
        k_pages,
        v_pages,
        cos_sin if qk_norm is None else qk_norm,
        epsilon,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        BLOCK_D=triton.next_power_of_2(head_dim // 2),
        BLOCK_H=_HEADS_A_PROGRAM,
        NORM=qk_norm is not None,
        num_warps=2,
    )
    return q


# Of a step with decodes before the prompts these begin at any token: no kernel for each alignment.
@triton.jit(
    do_not_specialize=["epsilon"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"]
)
def _rope_append_kernel(
    qkv_ptr: tl.tensor,
    q_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    epsilon: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    """A program takes some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = d < HALF
    slot = tl.load(slots_ptr + token)
    live = (head < tl.where(slot >= 0, HEADS + 2 * KV_HEADS, 0)) & inside
    rotated = head < HEADS + KV_HEADS
    source = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF + d
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    first = tl.load(source, mask=live, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=live, other=0.0).to(tl.float32)
    angle = cos_sin_ptr + tl.load(positions_ptr + token) * 2 * HALF + d
    cos = tl.load(angle, mask=inside, other=0.0)
    sin = tl.load(angle + HALF, mask=inside, other=0.0)
    weight = norm_ptr + head * 2 * HALF + d
    first, second = norm_and_rotate(
        first, second, weight, live & rotated, epsilon, cos, sin, rotated, dtype, HALF, NORM
    )
    new_first, new_second = first.to(dtype), second.to(dtype)
    is_q = live & (head < HEADS)
    target = q_ptr + (token * HEADS + head) * 2 * HALF + d
    tl.store(target, new_first, mask=is_q)
    tl.store(target + HALF, new_second, mask=is_q)
    place = slot * KV_HEADS
    is_k = live & rotated & (head >= HEADS)
    target = k_ptr + (place + head - HEADS) * 2 * HALF + d
    tl.store(target, new_first, mask=is_k)
    tl.store(target + HALF, new_second, mask=is_k)
    is_v = live & (head >= HEADS + KV_HEADS)
    target = v_ptr + (place + head - HEADS - KV_HEADS) * 2 * HALF + d
    tl.store(target, new_first, mask=is_v)
    tl.store(target + HALF, new_second, mask=is_v)


@triton.jit
def norm_and_rotate(
    raw_first: tl.tensor,
    raw_second: tl.tensor,
    weight_ptr: tl.tensor,
    normed: tl.tensor,
    epsilon: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    rotated: tl.tensor,
    dtype: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
) -> tuple[Any, Any]:
    """Both halves of heads, float32 `[heads or tokens, BLOCK_D]`, 0 beyond HALF; where not rotated,
    as they are. weight_ptr: where the norm's weights of the first half lie; normed: which there
    are; dtype: the model's."""
    first, second = raw_first, raw_second
    if NORM:
        first, second = norm(first, second, weight_ptr, normed, epsilon, dtype, HALF)
    new_first = tl.where(rotated, first * cos - second * sin, raw_first)
    new_second = tl.where(rotated, second * cos + first * sin, raw_second)
    return new_first, new_second


@triton.jit
def norm(
    first: tl.tensor,
    second: tl.tensor,
    weight_ptr: tl.tensor,
    normed: tl.tensor,
    epsilon: tl.tensor,
    dtype: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[Any, Any]:
    """Both halves of heads, float32, rounded to the model's dtype as its own norm does; weight_ptr,
    normed: as of `norm_and_rotate`."""
    mean = tl.sum(first * first + second * second, axis=1) / (2 * HALF)
    scale = tl.rsqrt(mean + epsilon)[:, None]
    w_first = tl.load(weight_ptr, mask=normed, other=0.0).to(tl.float32)
    w_second = tl.load(weight_ptr + HALF, mask=normed, other=0.0).to(tl.float32)
    first = ((first * scale).to(dtype).to(tl.float32) * w_first).to(dtype).to(tl.float32)
    second = ((second * scale).to(dtype).to(tl.float32) * w_second).to(dtype).to(tl.float32)
    return first, second
