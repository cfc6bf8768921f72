"""The arithmetic of decode attention: the new token, the running softmax, pieces put together."""

from typing import Any

import triton
import triton.language as tl


@triton.jit
def new_token(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slot: tl.tensor,
    kv_head: tl.tensor,
    norm_ptr: tl.tensor,
    epsilon: tl.tensor,
    cos_sin_ptr: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
    LORA: tl.constexpr,
) -> tuple[Any, Any, Any]:
    """q `[BLOCK_G, BLOCK_D]`, k `[1, BLOCK_D]` and v `[BLOCK_D]` of the token, as they are used."""
    HEADS: tl.constexpr = GROUP * KV_HEADS
    g = tl.arange(0, BLOCK_G)[:, None]
    d = tl.arange(0, BLOCK_D)
    inside = d < HEAD_DIM
    touched = slot >= 0
    if LORA:
        rank_q = tl.load(ranks_ptr, mask=touched, other=0)
        rank_k = tl.load(ranks_ptr + 1, mask=touched, other=0)
        rank_v = tl.load(ranks_ptr + 2, mask=touched, other=0)
    else:
        rank_q, rank_k, rank_v = 0, 0, 0
    q = rotated(
        x_ptr, delta_ptr, rank_q, kv_head * GROUP + g, (g < GROUP) & inside[None, :],
        norm_ptr, epsilon, cos_sin_ptr, d[None, :], HEAD_DIM, NORM, LORA,
    )  # fmt: skip
    k_head = tl.zeros((1, 1), tl.int32) + (HEADS + kv_head)
    k = rotated(
        x_ptr, delta_ptr, rank_k, k_head, inside[None, :],
        norm_ptr, epsilon, cos_sin_ptr, d[None, :], HEAD_DIM, NORM, LORA,
    )  # fmt: skip
    v_at = (HEADS + KV_HEADS + kv_head) * HEAD_DIM + d
    v = tl.load(x_ptr + v_at, mask=inside, other=0.0)
    if LORA:
        live = d < tl.where(rank_v > 0, HEAD_DIM, 0)
        delta = tl.load(delta_ptr + v_at, mask=live, other=0.0)
        v = (v.to(tl.float32) + delta.to(tl.float32)).to(v.dtype)
    return q, k, v


@triton.jit
def attend_piece(
    q: tl.tensor,
    new_k: tl.tensor,
    new_v: tl.tensor,
    begin: tl.tensor,
    piece: tl.tensor,
    position: tl.tensor,
    pages_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    kv_head: tl.tensor,
    scale_log2: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[Any, Any, Any]:
    """The piece's cached tokens; the last piece has the new token too, and keeps it."""
    is_last = begin + piece > position
    page = tl.load(pages_ptr + position // PAGE_SIZE)
    place = ((page * PAGE_SIZE + position % PAGE_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
    store_token(k_ptr + place, v_ptr + place, new_k, new_v, is_last, HEAD_DIM, BLOCK_D)
    top, total, acc = first_scores(q, new_k, new_v, is_last, scale_log2, BLOCK_G, BLOCK_D)
    top, total, acc = attend(
        q, top, total, acc, begin, tl.minimum(begin + piece, position), pages_ptr,
        k_ptr + kv_head * HEAD_DIM, v_ptr + kv_head * HEAD_DIM, scale_log2,
        KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, STAGES,
    )  # fmt: skip
    return top, total, acc


@triton.jit
def store_token(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    is_last: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """By the program that attends to it."""
    d = tl.arange(0, BLOCK_D)
    written = d < tl.where(is_last, HEAD_DIM, 0)
    tl.store(k_ptr + d[None, :], k, mask=written[None, :])
    tl.store(v_ptr + d, v, mask=written)


@triton.jit
def first_scores(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    is_last: tl.tensor,
    scale_log2: tl.tensor,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tuple[Any, Any, Any]:
    """The running softmax after the new token, or before any: largest score, sum, weighted v."""
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale_log2
    top = tl.where(is_last, score, float("-inf"))
    total = tl.zeros((BLOCK_G,), tl.float32) + tl.where(is_last, 1.0, 0.0)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    return top, total, acc + tl.where(is_last, v.to(tl.float32), 0.0)[None, :]


@triton.jit
def rotated(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    rank: tl.tensor,
    head: tl.tensor,
    live: tl.tensor,
    norm_ptr: tl.tensor,
    epsilon: tl.tensor,
    cos_sin_ptr: tl.tensor,
    d: tl.tensor,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
    LORA: tl.constexpr,
) -> Any:
    """Heads of q or k, with LoRA, normed and rotated in halves; head `[n, 1]`, d `[1, BLOCK_D]`."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype = x_ptr.dtype.element_ty
    at = head * HEAD_DIM + d
    partner = head * HEAD_DIM + (d + HALF) % HEAD_DIM
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + partner, mask=live, other=0.0).to(tl.float32)
    if LORA:
        touched = live & (d < tl.where(rank > 0, HEAD_DIM, 0))
        x += tl.load(delta_ptr + at, mask=touched, other=0.0).to(tl.float32)
        other += tl.load(delta_ptr + partner, mask=touched, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + epsilon)[:, None]
        weight = tl.load(norm_ptr + at, mask=live, other=0.0).to(tl.float32)
        other_weight = tl.load(norm_ptr + partner, mask=live, other=0.0).to(tl.float32)
        x = ((x * factor).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
        other = (other * factor).to(dtype).to(tl.float32) * other_weight
        other = other.to(dtype).to(tl.float32)
    cos = tl.load(cos_sin_ptr + d % HALF)
    sin = tl.load(cos_sin_ptr + HALF + d % HALF)
    return (x * cos + tl.where(d < HALF, -other, other) * sin).to(dtype)


@triton.jit
def attend(
    q: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    pages_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    scale_log2: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[Any, Any, Any]:
    """Cached tokens begin .. end into the running softmax (arXiv:1805.02867)."""
    d = tl.arange(0, BLOCK_D)
    inside = (d < HEAD_DIM)[None, :]
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        live = n < end
        page = tl.load(pages_ptr + n // PAGE_SIZE, mask=live, other=0)
        at = (page * PAGE_SIZE + n % PAGE_SIZE)[:, None] * (KV_HEADS * HEAD_DIM) + d[None, :]
        k = tl.load(k_ptr + at, mask=live[:, None] & inside, other=0.0)
        v = tl.load(v_ptr + at, mask=live[:, None] & inside, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        score = tl.where(live[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        weight = tl.exp2(score - higher[:, None])
        decay = tl.exp2(top - higher)
        total = total * decay + tl.sum(weight, axis=1)
        acc = acc * decay[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
        top = higher
    return top, total, acc


@triton.jit
def finish(
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    item: tl.tensor,
    number: tl.tensor,
    pieces: tl.tensor,
    kv_head: tl.tensor,
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    done_ptr: tl.tensor,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Write the result, or this piece's, and then all pieces' if the others are done."""
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    live = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    head = kv_head * GROUP + g
    out = out_ptr + head[:, None] * HEAD_DIM + d[None, :]
    if pieces == 1:
        tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=live)
    else:
        at = item * HEADS + head
        stride_weights = tl.num_programs(1) * HEADS  # scores of all items, then their sums
        tl.store(sums_ptr + at[:, None] * HEAD_DIM + d[None, :], acc, mask=live)
        tl.store(weights_ptr + at, top, mask=g < GROUP)
        tl.store(weights_ptr + stride_weights + at, total, mask=g < GROUP)
        tl.debug_barrier()
        before = tl.atomic_add(done_ptr + kv_head, 1, sem="acq_rel")
        if before == pieces - 1:
            tl.store(done_ptr + kv_head, 0)
            merged = merge(
                sums_ptr, weights_ptr, stride_weights, (item - number) * HEADS + head,
                pieces, d, g < GROUP, d < HEAD_DIM, HEADS, HEAD_DIM, BLOCK_G, BLOCK_D,
            )  # fmt: skip
            tl.store(out, merged.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def merge(
    sums_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    stride_weights: tl.tensor,
    at: tl.tensor,
    pieces: tl.tensor,
    d: tl.tensor,
    live_g: tl.tensor,
    inside: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> Any:
    """All pieces of a sequence; read past the first-level cache, which is not coherent."""
    top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    live = live_g[:, None] & inside[None, :]
    for i in range(pieces):
        here = at + i * HEADS
        piece_top = tl.load(weights_ptr + here, mask=live_g, other=0.0, cache_modifier=".cg")
        piece_total = tl.load(
            weights_ptr + stride_weights + here, mask=live_g, other=1.0, cache_modifier=".cg"
        )
        piece_sum = tl.load(
            sums_ptr + here[:, None] * HEAD_DIM + d[None, :],
            mask=live, other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        higher = tl.maximum(top, piece_top)
        decay, weight = tl.exp2(top - higher), tl.exp2(piece_top - higher)
        total = total * decay + piece_total * weight
        acc = acc * decay[:, None] + piece_sum * weight[:, None]
        top = higher
    return acc / total[:, None]
