"""The arithmetic of decode attention: the new token, the running softmax, pieces put together.

Heads are taken in halves, as the rotation pairs them. Where many sequences run at once the device
is held back by its watts, and these are a matter of instructions as much as of bytes.
"""

from typing import Any

import triton
import triton.language as tl

from server.kernels.attention.rope_append import norm

# Pieces of contexts begin at multiples of so many tokens.
PIECE_STEP = tl.constexpr(64)


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
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORM: tl.constexpr,
    LORA: tl.constexpr,
) -> tuple[Any, Any, Any]:
    """Halves of q, each `[BLOCK_Q, BLOCK_H]`, of k and of v, each `[1, BLOCK_H]`, of the token, as
    they are used."""
    HEADS: tl.constexpr = GROUP * KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    touched = slot >= 0
    if LORA:
        rank_q = tl.load(ranks_ptr, mask=touched, other=0)
        rank_k = tl.load(ranks_ptr + 1, mask=touched, other=0)
        rank_v = tl.load(ranks_ptr + 2, mask=touched, other=0)
    else:
        rank_q, rank_k, rank_v = 0, 0, 0
    g = tl.arange(0, BLOCK_Q)[:, None]
    inside = (tl.arange(0, BLOCK_H) < HALF)[None, :]
    q = rotated(
        x_ptr, delta_ptr, rank_q, kv_head * GROUP + g, (g < GROUP) & inside,
        norm_ptr, epsilon, cos_sin_ptr, HEAD_DIM, BLOCK_H, NORM, LORA,
    )  # fmt: skip
    k_head = tl.zeros((1, 1), tl.int32) + (HEADS + kv_head)
    k = rotated(
        x_ptr, delta_ptr, rank_k, k_head, inside,
        norm_ptr, epsilon, cos_sin_ptr, HEAD_DIM, BLOCK_H, NORM, LORA,
    )  # fmt: skip
    dtype = x_ptr.dtype.element_ty
    a, b = adapted(x_ptr, delta_ptr, rank_v, k_head + KV_HEADS, inside, HEAD_DIM, BLOCK_H, LORA)
    return q, k, (a.to(dtype), b.to(dtype))


@triton.jit
def adapted(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    rank: tl.tensor,
    head: tl.tensor,
    live: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    LORA: tl.constexpr,
) -> tuple[Any, Any]:
    """Halves of heads with LoRA, float32 `[n, BLOCK_H]`; head `[n, 1]`, live `[n, BLOCK_H]`."""
    HALF: tl.constexpr = HEAD_DIM // 2
    h = tl.arange(0, BLOCK_H)[None, :]
    at = head * HEAD_DIM + h
    a = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + at + HALF, mask=live, other=0.0).to(tl.float32)
    if LORA:
        touched = live & (h < tl.where(rank > 0, HALF, 0))
        a += tl.load(delta_ptr + at, mask=touched, other=0.0).to(tl.float32)
        b += tl.load(delta_ptr + at + HALF, mask=touched, other=0.0).to(tl.float32)
    return a, b


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
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORM: tl.constexpr,
    LORA: tl.constexpr,
) -> tuple[Any, Any]:
    """Halves of heads of q or k, with LoRA, normed and rotated, in x's dtype; arguments as of
    `adapted`."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype = x_ptr.dtype.element_ty
    h = tl.arange(0, BLOCK_H)[None, :]
    a, b = adapted(x_ptr, delta_ptr, rank, head, live, HEAD_DIM, BLOCK_H, LORA)
    if NORM:
        a, b = norm(a, b, norm_ptr + head * HEAD_DIM + h, live, epsilon, dtype, HALF)
    cos = tl.load(cos_sin_ptr + h, mask=h < HALF, other=0.0)
    sin = tl.load(cos_sin_ptr + HALF + h, mask=h < HALF, other=0.0)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit
def attend_piece(
    token: tl.tuple,
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
    BLOCK_H: tl.constexpr,
) -> Any:
    """The piece's cached tokens; the last piece has the new token too, and keeps it. Returns what
    `attend` does."""
    q, new_k, new_v = token
    STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    HALF: tl.constexpr = HEAD_DIM // 2
    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * HEAD_DIM
    is_last = begin + piece > position
    page = tl.load(pages_ptr + position // PAGE_SIZE)
    place = (page * PAGE_SIZE + position % PAGE_SIZE) * STRIDE
    kept = tl.where(is_last, HALF, 0)
    store_halves(k_ptr + place, new_k, kept, HALF, BLOCK_H)
    store_halves(v_ptr + place, new_v, kept, HALF, BLOCK_H)
    return attend(
        (padded(q[0], BLOCK_G), padded(q[1], BLOCK_G)),
        first_scores(q, new_k, new_v, is_last, scale_log2, BLOCK_G, BLOCK_H),
        begin, tl.minimum(begin + piece, position), pages_ptr, k_ptr, v_ptr, scale_log2,
        STRIDE, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_H,
    )  # fmt: skip


@triton.jit
def store_halves(
    to_ptr: tl.tensor,
    x: tl.tuple,
    kept: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """The first `kept` of each half of a head, each `[1, BLOCK_H]`."""
    h = tl.arange(0, BLOCK_H)[None, :]
    tl.store(to_ptr + h, x[0], mask=h < kept)
    tl.store(to_ptr + HALF + h, x[1], mask=h < kept)


@triton.jit
def first_scores(
    q: tl.tuple,
    k: tl.tuple,
    v: tl.tuple,
    is_last: tl.tensor,
    scale_log2: tl.tensor,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> tuple[Any, Any, Any, Any]:
    """The running softmax after the new token, or before any: largest score and sum, `[BLOCK_G]`,
    and halves of weighted v, `[BLOCK_G, BLOCK_H]`."""
    products = q[0].to(tl.float32) * k[0].to(tl.float32) + q[1].to(tl.float32) * k[1].to(tl.float32)
    score = tl.sum(products, axis=1)[None, :]
    score = tl.reshape(tl.broadcast_to(score, BLOCK_G // score.shape[1], score.shape[1]), BLOCK_G)
    top = tl.where(is_last, score * scale_log2, float("-inf"))
    total = tl.zeros((BLOCK_G,), tl.float32) + tl.where(is_last, 1.0, 0.0)
    nothing = tl.zeros((BLOCK_G, BLOCK_H), tl.float32)
    acc_a = nothing + tl.where(is_last, v[0].to(tl.float32), 0.0)
    acc_b = nothing + tl.where(is_last, v[1].to(tl.float32), 0.0)
    return top, total, acc_a, acc_b


@triton.jit
def padded(x: tl.tensor, BLOCK_G: tl.constexpr) -> Any:
    """`[n, m]` with rows of zeros to `[BLOCK_G, m]`."""
    repeats: tl.constexpr = BLOCK_G // x.shape[0]
    many = tl.broadcast_to(x[None, :, :], repeats, x.shape[0], x.shape[1])
    many = tl.reshape(many, BLOCK_G, x.shape[1])
    return tl.where(tl.arange(0, BLOCK_G)[:, None] < x.shape[0], many, 0.0)


@triton.jit
def attend(
    q: tl.tuple,
    so_far: tl.tuple,
    begin: tl.tensor,
    end: tl.tensor,
    pages_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    scale_log2: tl.tensor,
    STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> tuple[Any, Any, Any, Any]:
    """Cached tokens begin .. end into the running softmax (arXiv:1805.02867), two tiles of BLOCK_N
    at a time."""
    HALF: tl.constexpr = HEAD_DIM // 2
    n = tl.arange(0, BLOCK_N)
    h = tl.arange(0, BLOCK_H)[None, :]
    at = n[:, None] * STRIDE + h
    inside = h < HALF
    top, total, acc_a, acc_b = so_far
    for first in tl.range(begin, end, 2 * BLOCK_N, num_stages=2):
        x_live = n < end - first
        y_live = n < end - first - BLOCK_N
        x = tile_start(pages_ptr, first, end, PAGE_SIZE, BLOCK_N) * STRIDE
        # Where the second tile would begin behind the end, the first is read in its place.
        second = tl.where(end - first > BLOCK_N, first + BLOCK_N, first)
        y = tile_start(pages_ptr, second, end, PAGE_SIZE, BLOCK_N) * STRIDE
        # Keys of tokens behind the end may be anything, as their scores are not taken.
        kx_a = tl.load((k_ptr + x) + at, mask=inside, other=0.0)
        kx_b = tl.load((k_ptr + x) + (at + HALF), mask=inside, other=0.0)
        ky_a = tl.load((k_ptr + y) + at, mask=inside, other=0.0)
        ky_b = tl.load((k_ptr + y) + (at + HALF), mask=inside, other=0.0)
        of_x = tl.where(x_live[None, :], scores(q, kx_a, kx_b), float("-inf"))
        of_y = tl.where(y_live[None, :], scores(q, ky_a, ky_b), float("-inf"))
        higher = tl.maximum(top, tl.max(tl.maximum(of_x, of_y), axis=1) * scale_log2)
        decay = tl.exp2(top - higher)
        of_x = tl.exp2(of_x * scale_log2 - higher[:, None])
        of_y = tl.exp2(of_y * scale_log2 - higher[:, None])
        total = total * decay + tl.sum(of_x + of_y, axis=1)
        vx_a = tl.load((v_ptr + x) + at, mask=x_live[:, None] & inside, other=0.0)
        vx_b = tl.load((v_ptr + x) + (at + HALF), mask=x_live[:, None] & inside, other=0.0)
        vy_a = tl.load((v_ptr + y) + at, mask=y_live[:, None] & inside, other=0.0)
        vy_b = tl.load((v_ptr + y) + (at + HALF), mask=y_live[:, None] & inside, other=0.0)
        acc_a = weigh(weigh(acc_a * decay[:, None], of_x, vx_a), of_y, vy_a)
        acc_b = weigh(weigh(acc_b * decay[:, None], of_x, vx_b), of_y, vy_b)
        top = higher
    return top, total, acc_a, acc_b


@triton.jit
def tile_start(
    pages_ptr: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> Any:
    """Where a tile's tokens lie: less its number, that of each, int64 `[BLOCK_N, 1]`; or one for
    all, where no tile is in two pages."""
    if PAGE_SIZE % BLOCK_N == 0 and PIECE_STEP % BLOCK_N == 0:
        start = tl.load(pages_ptr + first // PAGE_SIZE) * PAGE_SIZE + first % PAGE_SIZE
    else:
        n = tl.arange(0, BLOCK_N)
        token = tl.minimum(first + n, end - 1)
        of_page = tl.load(pages_ptr + token // PAGE_SIZE) * PAGE_SIZE
        start = (of_page + token % PAGE_SIZE - n)[:, None]
    return start


@triton.jit
def scores(q: tl.tuple, k_a: tl.tensor, k_b: tl.tensor) -> Any:
    """`[BLOCK_G, BLOCK_N]`."""
    of_a = tl.dot(q[0], tl.trans(k_a), input_precision="ieee")
    return tl.dot(q[1], tl.trans(k_b), of_a, input_precision="ieee")


@triton.jit
def weigh(acc: tl.tensor, weight: tl.tensor, v: tl.tensor) -> Any:
    """A half of the sums, with those of a tile."""
    return tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")


@triton.jit
def finish(
    so_far: tl.tuple,
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
    BLOCK_H: tl.constexpr,
) -> None:
    """Write the result, or this piece's, and then all pieces' if the others are done."""
    HALF: tl.constexpr = HEAD_DIM // 2
    top, total, acc_a, acc_b = so_far
    g = tl.arange(0, BLOCK_G)
    h = tl.arange(0, BLOCK_H)[None, :]
    live = (g < GROUP)[:, None] & (h < HALF)
    head = kv_head * GROUP + g
    out = out_ptr + head[:, None] * HEAD_DIM + h
    if pieces == 1:
        scale = (1.0 / total)[:, None]
        tl.store(out, (acc_a * scale).to(out_ptr.dtype.element_ty), mask=live)
        tl.store(out + HALF, (acc_b * scale).to(out_ptr.dtype.element_ty), mask=live)
    else:
        at = item * HEADS + head
        stride_weights = tl.num_programs(1) * HEADS  # scores of all items, then their sums
        sums = sums_ptr + at[:, None] * HEAD_DIM + h
        tl.store(sums, acc_a, mask=live)
        tl.store(sums + HALF, acc_b, mask=live)
        tl.store(weights_ptr + at, top, mask=g < GROUP)
        tl.store(weights_ptr + stride_weights + at, total, mask=g < GROUP)
        tl.debug_barrier()
        before = tl.atomic_add(done_ptr + kv_head, 1, sem="acq_rel")
        if before == pieces - 1:
            tl.store(done_ptr + kv_head, 0)
            acc_a, acc_b = merge(
                sums_ptr, weights_ptr, stride_weights, (item - number) * HEADS + head,
                pieces, g < GROUP, live, h, HEADS, HEAD_DIM, BLOCK_G, BLOCK_H,
            )  # fmt: skip
            tl.store(out, acc_a.to(out_ptr.dtype.element_ty), mask=live)
            tl.store(out + HALF, acc_b.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def merge(
    sums_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    stride_weights: tl.tensor,
    at: tl.tensor,
    pieces: tl.tensor,
    live_g: tl.tensor,
    live: tl.tensor,
    h: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> tuple[Any, Any]:
    """Halves of all pieces of a sequence; read past the first-level cache, which is not
    coherent."""
    HALF: tl.constexpr = HEAD_DIM // 2
    top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc_a = tl.zeros((BLOCK_G, BLOCK_H), tl.float32)
    acc_b = acc_a
    for i in range(pieces):
        here = at + i * HEADS
        piece_top = tl.load(weights_ptr + here, mask=live_g, other=0.0, cache_modifier=".cg")
        piece_total = tl.load(
            weights_ptr + stride_weights + here, mask=live_g, other=1.0, cache_modifier=".cg"
        )
        sums = sums_ptr + here[:, None] * HEAD_DIM + h
        piece_a = tl.load(sums, mask=live, other=0.0, cache_modifier=".cg")
        piece_b = tl.load(sums + HALF, mask=live, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, piece_top)
        decay, weight = tl.exp2(top - higher), tl.exp2(piece_top - higher)
        total = total * decay + piece_total * weight
        acc_a = acc_a * decay[:, None] + piece_a * weight[:, None]
        acc_b = acc_b * decay[:, None] + piece_b * weight[:, None]
        top = higher
    scale = (1.0 / total)[:, None]
    return acc_a * scale, acc_b * scale
