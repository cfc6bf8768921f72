"""Attention of one new token a sequence over paged keys and values, in one launch a layer.

The kernel adds LoRA's delta to q, k and v, norms and rotates q and k, writes the token's k and v
into their page, and attends. Long contexts are cut into pieces of equal length (FlashDecoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html); the program that ends a sequence's last
piece merges them, in order, so that results do not depend on who is last.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.attention.decode_work import PIECE_STEP, DecodeItems, max_items
from loraplex.server.kernels.attention.pages import (
    CachePages,
    as_stored,
    as_whole,
    for_pages,
    head_scales,
    place_in_pages,
    scaled_weights,
    widened,
)
from loraplex.server.kernels.attention.rope_append import (
    QkNorm,
    Rotation,
    head_factor,
    load_angles,
    norm_and_rotate,
    norm_arguments,
    norm_factors,
    norm_switch,
    pair_columns,
)
from loraplex.server.kernels.attention.scores import LOG2_E, NO_SCORE, ScoreRule, capped, slopes_of
from loraplex.server.kernels.launch.launch import follow
from loraplex.server.kernels.lora.pending import PendingDelta, delta_arguments
from loraplex.server.kernels.lora.tiles import ranks_at, record_of

# Programs, from which on they are some, or many.
_SOME, _MANY = 512, 768
# What one warp has registers for.
_SUMS_OF_A_WARP = 2048


class DecodeScratch:
    """Results of pieces, of up to `batch` sequences. All of one stream's launches may share it."""

    def __init__(
        self, batch: int, heads: int, head_dim: int, device: torch.device, rows: int = 0
    ) -> None:
        """Allocate scratch for batches of up to `batch` sequences. rows: of the product among which
        the sequences' are, if more.
        """
        items = max_items(batch)
        self.sums = torch.empty(items, heads, head_dim, dtype=torch.float32, device=device)
        self.weights = torch.empty(2 * items * heads, dtype=torch.float32, device=device)
        self.done = torch.zeros(max(batch, rows), heads, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class DecodeBatchView:
    """Places of a batch's sequences. rows: int32 `[batch]`, rows of the page table; positions:
    int64 `[batch]` of the new tokens; page_table: int64 `[rows, pages a row]`. work: of each
    window of the model. turns: int64 `[batch]`, rows of the rotation's tables, where these are
    not the positions.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    page_table: torch.Tensor
    work: tuple[DecodeItems, ...]
    turns: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerScores:
    """The treatment of `q k^T` in one layer. window: which of the batch's `work` is of the rule's
    window.

    sinks: float32 `[heads]`, a further score of each softmax, neither scaled nor capped, that
    weighs no value; None = without.
    """

    rule: ScoreRule
    window: int = 0
    sinks: torch.Tensor | None = None


def decode_attention(
    qkv: torch.Tensor,
    pending: PendingDelta | None,
    batch: DecodeBatchView,
    cache: CachePages,
    rotation: Rotation,
    norm: QkNorm | None,
    scores: LayerScores,
    scratch: DecodeScratch,
    out: torch.Tensor,
    *,
    programmatic_launch: bool,
) -> None:
    """Compute attention of one new token a sequence, and write its keys and values to the cache.
    qkv: `[batch, (heads + 2 kv_heads) * head_dim]`, contiguous, or of fewer parts
    (`CachePages.parts`); pending: LoRA of it, computed
    beside it. cache: features of k lie as `rope_append.py` says. out: `[batch, heads, head_dim]`.
    One kernel, two with a norm over all heads. Raises ValueError on a mismatch, and where
    scratch has no room for the batch.
    """
    rule, work = cache.scored(scores.rule), batch.work[scores.window]
    if len(qkv) > len(scratch.done) or work.items.shape[1] > len(scratch.sums):
        raise ValueError(f"scratch is for {len(scratch.done)} sequences, the batch has {len(qkv)}")
    page_size, kv_heads, head_dim = cache.k.shape[1:]
    heads = cache.heads(qkv.shape[1])
    sizes = (heads * head_dim, kv_heads * head_dim)
    factors = norm_factors(qkv, pending, norm, sizes, programmatic_launch=programmatic_launch)
    group = heads // kv_heads
    narrow = cache.k.dtype.itemsize == 1
    block_n, num_warps = _shape(kv_heads * len(qkv), group, head_dim, narrow=narrow)
    _decode_attention_kernel[(kv_heads, work.items.shape[1])](
        qkv,
        *delta_arguments(qkv, pending),
        out,
        rotation.tables,
        norm_arguments(norm, qkv, factors),
        cache.arguments,
        batch.rows,
        batch.positions,
        batch.positions if batch.turns is None else batch.turns,
        batch.page_table,
        batch.page_table.stride(0),
        work.items,
        work.piece,
        (scratch.sums, scratch.weights, scratch.done),
        qkv if scores.sinks is None else scores.sinks,
        rule.slopes,
        *rule.arguments,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_Q=triton.next_power_of_2(group),
        BLOCK_H=max(16, triton.next_power_of_2(head_dim // 2)),
        BLOCK_N=block_n,
        PARTS=cache.parts,
        NORM=norm_switch(norm),
        TURNS=batch.turns is not None,
        LORA=pending is not None,
        SINKS=scores.sinks is not None,
        PDL=programmatic_launch,
        num_warps=num_warps,
        launch_pdl=programmatic_launch,
        **rotation.switches(head_dim),
        **rule.switches,
    )


def rows_of_each_shape(kv_heads: int, most: int) -> list[int]:
    """Numbers of sequences, at most `most`, that between them take every shape that so many can."""
    return [rows for bound in (1, _SOME, _MANY) if (rows := -(-bound // kv_heads)) <= most]


def _shape(programs: int, group: int, head_dim: int, *, narrow: bool = False) -> tuple[int, int]:
    """Tokens of a tile, of which a step takes two, and warps: few programs keep much in flight
    each, many together, and one warp waits for no other. group: query heads of a kv head. narrow:
    keys have eight bits."""
    width = triton.next_power_of_2(head_dim)
    if programs < _SOME:
        return max(16, (4096 if narrow else 8192) // width), 4
    if programs < _MANY:
        return max(16, 4096 // width), 2 if narrow else 4
    sums = max(16, triton.next_power_of_2(group)) * width
    return 16, min(4, max(1, sums // _SUMS_OF_A_WARP))


# What is read one number at a time may begin anywhere in an upload: no kernel for each alignment.
@triton.jit(
    do_not_specialize=["stride_pages", "site", "num_sites", "inner", "outer", "window"],
    do_not_specialize_on_alignment=[
        *("slots_ptr", "rows_ptr", "positions_ptr", "turns_ptr", "items_ptr", "piece_ptr"),
        *("sinks_ptr", "slopes_ptr"),
    ],
)
def _decode_attention_kernel(
    qkv_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    out_ptr: tl.tensor,
    tables: tl.tuple,
    norm: tl.tuple,
    cache: tl.tuple,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    turns_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    stride_pages: tl.tensor,
    items_ptr: tl.tensor,
    piece_ptr: tl.tensor,
    scratch: tl.tuple,
    sinks_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    window: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    TURNS: tl.constexpr,
    LORA: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """A program takes one piece of one sequence for the query heads of one kv head."""
    follow(PDL)
    kv_head, item = tl.program_id(0), tl.program_id(1)
    seq = tl.load(items_ptr + item)
    if seq >= 0:
        number, piece = tl.load(items_ptr + tl.num_programs(1) + item), tl.load(piece_ptr)
        position = tl.load(positions_ptr + seq).to(tl.int32)
        pages_ptr = page_table_ptr + tl.load(rows_ptr + seq).to(tl.int64) * stride_pages
        slot = tl.load(slots_ptr + seq) if LORA else seq * 0 - 1
        row = seq.to(tl.int64) * ((GROUP + PARTS - 1) * KV_HEADS * HEAD_DIM)
        turn = tl.load(turns_ptr + seq) if TURNS else position.to(tl.int64)
        token = _new_token(
            qkv_ptr + row, delta_ptr + row, ranks_at(ints_ptr, record_of(slot, site, num_sites)),
            slot, kv_head, (norm[0], norm[1], norm[2] + seq.to(tl.int64) * 2), tables, turn,
            GROUP, KV_HEADS, HEAD_DIM, BLOCK_Q, BLOCK_H, PARTS, NORM, LORA,
            PAIRS, INTERLEAVED, SCALED,
        )  # fmt: skip
        seen = tl.maximum(position + 1 - window, 0) if WINDOWED else position * 0
        origin = seen // PIECE_STEP * PIECE_STEP
        so_far = _attend_piece(
            token, origin + number * piece, piece, position, seen, pages_ptr, cache,
            sinks_ptr, kv_head, (inner, outer, slopes_ptr), GROUP, KV_HEADS, HEAD_DIM, PAGE_SIZE,
            max(16, BLOCK_Q), BLOCK_N, BLOCK_H, PARTS, CAPPED, WINDOWED, SINKS,
        )  # fmt: skip
        write_result(
            so_far, item, number, (position - origin) // piece + 1, kv_head,
            out_ptr + seq.to(tl.int64) * (GROUP * KV_HEADS * HEAD_DIM), cache[4], scratch,
            seq * (GROUP * KV_HEADS), GROUP, GROUP * KV_HEADS, HEAD_DIM, max(16, BLOCK_Q), BLOCK_H,
        )  # fmt: skip


# The new token, the running softmax, and the combination of pieces. Heads are computed in halves,
# which the rotation pairs. With many sequences the device's power is the limit, and instructions
# cost as much as bytes.


@triton.jit
def _new_token(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slot: tl.tensor,
    kv_head: tl.tensor,
    norm: tl.tuple,
    tables: tl.tuple,
    turn: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    LORA: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
) -> tuple[Any, Any, Any]:
    """Halves of q, each `[BLOCK_Q, BLOCK_H]`, of k and of v, each `[1, BLOCK_H]`, of the token, as
    they are used; k and v are zeros where the product has q alone. norm: weights, epsilon, factors
    of the token. turn: row of the tables."""
    HEADS: tl.constexpr = GROUP * KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    touched = slot >= 0
    if LORA:
        rank_q = tl.load(ranks_ptr, mask=touched, other=0)
        rank_k = tl.load(ranks_ptr + 1, mask=touched, other=0)
        rank_v = tl.load(ranks_ptr + PARTS - 1, mask=touched, other=0)
    else:
        rank_q, rank_k, rank_v = 0, 0, 0
    g = tl.arange(0, BLOCK_Q)[:, None]
    inside = (tl.arange(0, BLOCK_H) < HALF)[None, :]
    q = _rotated(
        x_ptr, delta_ptr, rank_q, kv_head * GROUP + g, (g < GROUP) & inside,
        norm, tables, turn, HEAD_DIM, BLOCK_H, NORM, LORA, PAIRS, INTERLEAVED, SCALED,
    )  # fmt: skip
    dtype = x_ptr.dtype.element_ty
    if PARTS == 1:
        nothing = tl.zeros((1, BLOCK_H), dtype)
        k, v = (nothing, nothing), (nothing, nothing)
    else:
        k_head = tl.zeros((1, 1), tl.int32) + (HEADS + kv_head)
        k = _rotated(
            x_ptr, delta_ptr, rank_k, k_head, inside,
            (norm[0], norm[1], norm[2] + 1), tables, turn,
            HEAD_DIM, BLOCK_H, NORM, LORA, PAIRS, INTERLEAVED, False,
        )  # fmt: skip
        at = (k_head + (PARTS - 2) * KV_HEADS) * HEAD_DIM + tl.arange(0, BLOCK_H)[None, :]
        a, b = _adapted(x_ptr, delta_ptr, rank_v, at, HALF, inside, HALF, BLOCK_H, LORA)
        if NORM == 3:
            factor = head_factor(a, b, norm[1], HALF)
            a *= factor
            b *= factor
        v = (a.to(dtype), b.to(dtype))
    return q, k, v


@triton.jit
def _adapted(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    rank: tl.tensor,
    at: tl.tensor,
    apart: tl.tensor,
    live: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    LORA: tl.constexpr,
) -> tuple[Any, Any]:
    """Halves of heads with LoRA, float32 `[n, BLOCK_H]`; at, live: as many, where the first half
    lies, and which of it there is; apart: how far behind it the second one lies."""
    a = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + at + apart, mask=live, other=0.0).to(tl.float32)
    if LORA:
        h = tl.arange(0, BLOCK_H)[None, :]
        touched = live & (h < tl.where(rank > 0, HALF, 0))
        a += tl.load(delta_ptr + at, mask=touched, other=0.0).to(tl.float32)
        b += tl.load(delta_ptr + at + apart, mask=touched, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _rotated(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    rank: tl.tensor,
    head: tl.tensor,
    live: tl.tensor,
    norm: tl.tuple,
    tables: tl.tuple,
    turn: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORM: tl.constexpr,
    LORA: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
) -> tuple[Any, Any]:
    """Halves of heads of q or k, with LoRA, normed and rotated, in x's dtype; head `[n, 1]`, live
    `[n, BLOCK_H]`; norm, turn: as of `_new_token`, the factor first."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype = x_ptr.dtype.element_ty
    h = tl.arange(0, BLOCK_H)[None, :]
    inside = h < HALF
    column, apart = pair_columns(h, inside, PAIRS, INTERLEAVED, HALF)
    at = head * HEAD_DIM + column
    raw = _adapted(x_ptr, delta_ptr, rank, at, apart, live, HALF, BLOCK_H, LORA)
    angles = load_angles(tables, turn, h, inside, True, PAIRS, SCALED)
    factor = tl.load(norm[2]) if NORM == 2 else 1.0
    a, b = norm_and_rotate(
        raw, norm[0] + at, apart, (live, norm[1], factor), angles, True, HALF, NORM
    )
    return a.to(dtype), b.to(dtype)


@triton.jit
def _attend_piece(
    token: tl.tuple,
    begin: tl.tensor,
    piece: tl.tensor,
    position: tl.tensor,
    seen: tl.tensor,
    pages_ptr: tl.tensor,
    cache: tl.tuple,
    sinks_ptr: tl.tensor,
    kv_head: tl.tensor,
    factors: tl.tuple,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PARTS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
) -> Any:
    """The piece's cached tokens from `seen` on; the last piece has the new token too, and the sink,
    and keeps the token. factors: inner and outer of the rule, and its slopes. Returns what
    `_attend` does."""
    q = token[0]
    TOKEN: tl.constexpr = KV_HEADS * HEAD_DIM
    HALF: tl.constexpr = HEAD_DIM // 2
    k_ptr = cache[0] + kv_head * HEAD_DIM
    v_ptr = cache[1] + kv_head * HEAD_DIM
    scales = cache[6]
    if scales is not None:
        of_head = kv_head * PAGE_SIZE
        scales = (scales[0] + of_head, scales[1] + of_head, scales[2])
    is_last = begin + piece > position
    page = tl.load(pages_ptr + position // PAGE_SIZE)
    place = place_in_pages(page, position % PAGE_SIZE, cache[5], TOKEN)
    kept = tl.where(is_last, HALF, 0)
    # As later tokens will find them.
    new_k, new_v = token[1], token[2]
    if PARTS == 1:
        if scales is not None:
            at = page * scales[2] + position % PAGE_SIZE
            new_k = _load_halves(k_ptr + place, scales[0] + at, True, HALF, BLOCK_H)
            new_v = _load_halves(v_ptr + place, scales[1] + at, True, HALF, BLOCK_H)
        else:
            new_k = _load_halves(k_ptr + place, k_ptr, False, HALF, BLOCK_H)
            new_v = _load_halves(v_ptr + place, v_ptr, False, HALF, BLOCK_H)
    elif scales is not None:
        at = page * scales[2] + position % PAGE_SIZE
        new_k = _keep_whole(new_k, cache[2], k_ptr + place, scales[0] + at, kept, HALF, BLOCK_H)
        new_v = _keep_whole(new_v, cache[3], v_ptr + place, scales[1] + at, kept, HALF, BLOCK_H)
    else:
        new_k = _keep(new_k, cache[2], k_ptr + place, kept, HALF, BLOCK_H)
        new_v = _keep(new_v, cache[3], v_ptr + place, kept, HALF, BLOCK_H)
    so_far = _first_scores(q, new_k, new_v, is_last, factors, BLOCK_G, BLOCK_H, CAPPED)
    if SINKS:
        g = tl.arange(0, BLOCK_G)
        sink = tl.load(sinks_ptr + kv_head * GROUP + g, mask=g < GROUP, other=0.0).to(tl.float32)
        so_far = _with_sink(so_far, tl.where(is_last, sink * LOG2_E, NO_SCORE))
    bias = factors[2]
    if bias is not None:
        g = tl.arange(0, BLOCK_G)
        bias = (slopes_of(factors[2], kv_head * GROUP + g, g < GROUP, factors[1]), position)
    q = (for_pages(_padded(q[0], BLOCK_G), k_ptr), for_pages(_padded(q[1], BLOCK_G), k_ptr))
    return _attend(
        q, so_far,
        begin, tl.minimum(begin + piece, position), seen, pages_ptr, k_ptr, v_ptr, cache[5],
        scales, factors, bias, TOKEN, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_H, CAPPED, WINDOWED,
    )  # fmt: skip


@triton.jit
def _load_halves(
    from_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    SCALED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> tuple[Any, Any]:
    """Both halves of a head as pages have them, float32 `[1, BLOCK_H]` each, 0 beyond HALF; times
    a scale, where they are SCALED."""
    h = tl.arange(0, BLOCK_H)[None, :]
    a = tl.load(from_ptr + h, mask=h < HALF, other=0.0).to(tl.float32)
    b = tl.load(from_ptr + HALF + h, mask=h < HALF, other=0.0).to(tl.float32)
    if SCALED:
        scale = tl.load(scale_ptr)
        a *= scale
        b *= scale
    return a, b


@triton.jit
def _keep(
    x: tl.tuple,
    factor: tl.tensor,
    to_ptr: tl.tensor,
    kept: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> tuple[Any, Any]:
    """Store a head's halves, `[1, BLOCK_H]` each -> the same as they are stored, in x's dtype."""
    stored = (as_stored(x[0], factor, to_ptr), as_stored(x[1], factor, to_ptr))
    _store_halves(to_ptr, stored, kept, HALF, BLOCK_H)
    return stored[0].to(x[0].dtype), stored[1].to(x[1].dtype)


@triton.jit
def _keep_whole(
    x: tl.tuple,
    factor: tl.tensor,
    to_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    kept: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> tuple[Any, Any]:
    """Store a head's halves as `_keep` does, in int8, and their scale -> float32, scaled."""
    scales = head_scales(x[0], x[1])
    stored = (as_whole(x[0], scales), as_whole(x[1], scales))
    _store_halves(to_ptr, stored, kept, HALF, BLOCK_H)
    scales *= factor
    tl.store(scale_ptr + tl.zeros((1, 1), tl.int32), scales, mask=kept > 0)
    return stored[0].to(tl.float32) * scales, stored[1].to(tl.float32) * scales


@triton.jit
def _store_halves(
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
def _first_scores(
    q: tl.tuple,
    k: tl.tuple,
    v: tl.tuple,
    is_last: tl.tensor,
    factors: tl.tuple,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CAPPED: tl.constexpr,
) -> tuple[Any, Any, Any, Any]:
    """The running softmax after the new token, or before any: largest score and sum, `[BLOCK_G]`,
    and halves of weighted v, `[BLOCK_G, BLOCK_H]`."""
    products = q[0].to(tl.float32) * k[0].to(tl.float32) + q[1].to(tl.float32) * k[1].to(tl.float32)
    score = tl.sum(products, axis=1)[None, :]
    score = tl.reshape(tl.broadcast_to(score, BLOCK_G // score.shape[1], score.shape[1]), BLOCK_G)
    if CAPPED:
        score = capped(score, factors[0])
    top = tl.where(is_last, score * factors[1], NO_SCORE)
    total = tl.zeros((BLOCK_G,), tl.float32) + tl.where(is_last, 1.0, 0.0)
    nothing = tl.zeros((BLOCK_G, BLOCK_H), tl.float32)
    acc_a = nothing + tl.where(is_last, v[0].to(tl.float32), 0.0)
    acc_b = nothing + tl.where(is_last, v[1].to(tl.float32), 0.0)
    return top, total, acc_a, acc_b


@triton.jit
def _with_sink(so_far: tl.tuple, sink: tl.tensor) -> tuple[Any, Any, Any, Any]:
    """The running softmax with one more score, `[BLOCK_G]`, of no value."""
    top, total, acc_a, acc_b = so_far
    higher = tl.maximum(top, sink)
    decay = tl.exp2(top - higher)
    total = total * decay + tl.where(sink > NO_SCORE, tl.exp2(sink - higher), 0.0)
    return higher, total, acc_a * decay[:, None], acc_b * decay[:, None]


@triton.jit
def _padded(x: tl.tensor, BLOCK_G: tl.constexpr) -> Any:
    """`[n, m]` with rows of zeros to `[BLOCK_G, m]`."""
    repeats: tl.constexpr = BLOCK_G // x.shape[0]
    many = tl.broadcast_to(x[None, :, :], repeats, x.shape[0], x.shape[1])
    many = tl.reshape(many, BLOCK_G, x.shape[1])
    return tl.where(tl.arange(0, BLOCK_G)[:, None] < x.shape[0], many, 0.0)


@triton.jit
def _attend(
    q: tl.tuple,
    so_far: tl.tuple,
    begin: tl.tensor,
    end: tl.tensor,
    seen: tl.tensor,
    pages_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    stride: tl.tensor,
    scales: tl.tuple,
    factors: tl.tuple,
    bias: tl.tuple,
    TOKEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> tuple[Any, Any, Any, Any]:
    """Cached tokens begin .. end, but those before `seen`, into the running softmax
    (arXiv:1805.02867), two tiles of BLOCK_N at a time. stride: from page to page; scales: as of
    `CachePages.token_scales`, of the head; factors: inner and outer of the rule; bias: None, or
    slopes `[BLOCK_G]` and the query's position."""
    HALF: tl.constexpr = HEAD_DIM // 2
    n = tl.arange(0, BLOCK_N)
    h = tl.arange(0, BLOCK_H)[None, :]
    at = n[:, None] * TOKEN + h
    inside = h < HALF
    inner, outer = factors[0], factors[1]
    top, total, acc_a, acc_b = so_far
    for first in tl.range(begin, end, 2 * BLOCK_N, num_stages=2):
        x_live = n < end - first
        y_live = n < end - first - BLOCK_N
        if WINDOWED:
            x_live = x_live & (n >= seen - first)
            y_live = y_live & (n >= seen - first - BLOCK_N)
        x = _tile_start(pages_ptr, first, end, seen, stride, TOKEN, PAGE_SIZE, BLOCK_N, WINDOWED)
        # Where the second tile would begin behind the end, the first is read in its place.
        second = tl.where(end - first > BLOCK_N, first + BLOCK_N, first)
        y = _tile_start(pages_ptr, second, end, seen, stride, TOKEN, PAGE_SIZE, BLOCK_N, WINDOWED)
        # Keys of tokens that are not seen may be anything, as their scores are not taken.
        kx_a = tl.load((k_ptr + x) + at, mask=inside, other=0.0)
        kx_b = tl.load((k_ptr + x) + (at + HALF), mask=inside, other=0.0)
        ky_a = tl.load((k_ptr + y) + at, mask=inside, other=0.0)
        ky_b = tl.load((k_ptr + y) + (at + HALF), mask=inside, other=0.0)
        of_x, of_y = _qk(q, kx_a, kx_b), _qk(q, ky_a, ky_b)
        if scales is not None:
            sx = _tile_start(
                pages_ptr, first, end, seen, scales[2], 1, PAGE_SIZE, BLOCK_N, WINDOWED
            )
            sy = _tile_start(
                pages_ptr, second, end, seen, scales[2], 1, PAGE_SIZE, BLOCK_N, WINDOWED
            )
            of_x *= _scales_of(scales[0], sx, x_live)
            of_y *= _scales_of(scales[0], sy, y_live)
        if CAPPED:
            of_x, of_y = capped(of_x, inner), capped(of_y, inner)
        if bias is not None:
            apart = (n + (first - bias[1]))[None, :]
            of_x += bias[0][:, None] * apart.to(tl.float32)
            of_y += bias[0][:, None] * (apart + BLOCK_N).to(tl.float32)
        of_x = tl.where(x_live[None, :], of_x, float("-inf"))
        of_y = tl.where(y_live[None, :], of_y, float("-inf"))
        higher = tl.maximum(top, tl.max(tl.maximum(of_x, of_y), axis=1) * outer)
        decay = tl.exp2(top - higher)
        of_x = tl.exp2(of_x * outer - higher[:, None])
        of_y = tl.exp2(of_y * outer - higher[:, None])
        total = total * decay + tl.sum(of_x + of_y, axis=1)
        if scales is not None:
            of_x = scaled_weights(of_x, _scales_of(scales[1], sx, x_live))
            of_y = scaled_weights(of_y, _scales_of(scales[1], sy, y_live))
        vx_a = tl.load((v_ptr + x) + at, mask=x_live[:, None] & inside, other=0.0)
        vx_b = tl.load((v_ptr + x) + (at + HALF), mask=x_live[:, None] & inside, other=0.0)
        vy_a = tl.load((v_ptr + y) + at, mask=y_live[:, None] & inside, other=0.0)
        vy_b = tl.load((v_ptr + y) + (at + HALF), mask=y_live[:, None] & inside, other=0.0)
        acc_a = _add_pv(q, _add_pv(q, acc_a * decay[:, None], of_x, vx_a), of_y, vy_a)
        acc_b = _add_pv(q, _add_pv(q, acc_b * decay[:, None], of_x, vx_b), of_y, vy_b)
        top = higher
    return top, total, acc_a, acc_b


@triton.jit
def _tile_start(
    pages_ptr: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    seen: tl.tensor,
    stride: tl.tensor,
    TOKEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> Any:
    """Where a tile's tokens lie: less its number, that of each, int64 `[BLOCK_N, 1]`; or one for
    all, where no tile is in two pages. No page is looked up of which no token is seen."""
    if PAGE_SIZE % BLOCK_N == 0 and PIECE_STEP % BLOCK_N == 0:
        known = tl.maximum(first, seen) if WINDOWED else first
        page = tl.load(pages_ptr + known // PAGE_SIZE)
        start = place_in_pages(page, first % PAGE_SIZE, stride, TOKEN)
    else:
        n = tl.arange(0, BLOCK_N)
        token = tl.minimum(first + n, end - 1)
        if WINDOWED:
            token = tl.maximum(token, seen)
        page = tl.load(pages_ptr + token // PAGE_SIZE)
        start = place_in_pages(page, token % PAGE_SIZE - n, stride, TOKEN)[:, None]
    return start


@triton.jit
def _scales_of(scales_ptr: tl.tensor, start: tl.tensor, live: tl.tensor) -> Any:
    """Scales of a tile's tokens, `[1, BLOCK_N]`, 0 where a token is not live. start: as of
    `_tile_start`."""
    n = tl.arange(0, live.shape[0])
    return tl.trans(tl.load(scales_ptr + start + n[:, None], mask=live[:, None], other=0.0))


@triton.jit
def _qk(q: tl.tuple, k_a: tl.tensor, k_b: tl.tensor) -> Any:
    """`[BLOCK_G, BLOCK_N]`."""
    dtype: tl.constexpr = q[0].dtype
    of_a = tl.dot(q[0], tl.trans(widened(k_a, dtype)), input_precision="ieee")
    return tl.dot(q[1], tl.trans(widened(k_b, dtype)), of_a, input_precision="ieee")


@triton.jit
def _add_pv(q: tl.tuple, acc: tl.tensor, weight: tl.tensor, v: tl.tensor) -> Any:
    """A half of the sums, with those of a tile."""
    dtype: tl.constexpr = q[0].dtype
    return tl.dot(weight.to(dtype), widened(v, dtype), acc, input_precision="ieee")


@triton.jit
def write_result(
    so_far: tl.tuple,
    item: tl.tensor,
    number: tl.tensor,
    pieces: tl.tensor,
    kv_head: tl.tensor,
    out_ptr: tl.tensor,
    factor: tl.tensor,
    scratch: tl.tuple,
    done_at: tl.tensor,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """Write the result, or this piece's, and then all pieces' if the others are done. factor: of
    values."""
    HALF: tl.constexpr = HEAD_DIM // 2
    sums_ptr, weights_ptr, done_ptr = scratch
    done_ptr += done_at
    top, total, acc_a, acc_b = so_far
    g = tl.arange(0, BLOCK_G)
    h = tl.arange(0, BLOCK_H)[None, :]
    live = (g < GROUP)[:, None] & (h < HALF)
    head = kv_head * GROUP + g
    out = out_ptr + head[:, None] * HEAD_DIM + h
    if pieces == 1:
        scale = (factor / total)[:, None]
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
            acc_a, acc_b = _combine(
                sums_ptr, weights_ptr, stride_weights, (item - number) * HEADS + head,
                pieces, g < GROUP, live, h, HEADS, HEAD_DIM, BLOCK_G, BLOCK_H,
            )  # fmt: skip
            tl.store(out, (acc_a * factor).to(out_ptr.dtype.element_ty), mask=live)
            tl.store(out + HALF, (acc_b * factor).to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _combine(
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
