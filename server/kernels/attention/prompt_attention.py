"""Causal attention of prompts' chunks over paged keys and values, in one launch a layer.

FlashAttention (https://arxiv.org/abs/2205.14135): a program takes a tile of a chunk's tokens, for
all query heads of one kv head, and keeps a running softmax over keys. Wide values are shared among
programs, each of which computes the scores. Windows, soft caps, sinks,
slopes, scales and head sizes are a layer's own. No key and no page outside of what a tile's tokens
see is read. What the host knows of lengths lies in the tiles: a launch of a graph finds others each
time.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from loraplex.server.kernels.attention.pages import (
    CachePages,
    for_pages,
    place_in_pages,
    scaled_weights,
    widened,
)
from loraplex.server.kernels.attention.scores import LOG2_E, NO_SCORE, ScoreRule, capped, slopes_of

TILE_COLUMNS = 4
_WIDEST_HEAD = 512
# Sums of so many features, of 128 queries, are what registers hold beside all else.
_MOST_VALUES = 256
_FEW_QUERIES = 64  # the fewest that the tensor cores of a Hopper GPU multiply at once


@dataclass(frozen=True, slots=True)
class TileShape:
    """Sizes of a tile, and launch parameters. tokens: of a chunk, for which one program computes.
    block_m: their queries, with what pads them; block_n: keys of a step of its loop. aligned: steps
    begin at multiples of their size, also where a window begins elsewhere, so that a token's sums
    do not depend on the others of its tile. most_values: features of values that a program takes.
    """

    tokens: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    aligned: bool = False
    most_values: int = _WIDEST_HEAD


# By head size, padded: queries and keys of a tile, warps and stages. Page numbers, keys and sums
# share the stages: of five, a block of keys is under way while another is computed, of three none.
# First for multiprocessors with 227 KB of shared memory, then for 99 KB.
_LARGE = {
    64: (128, 64, 8, 5),
    128: (128, 64, 8, 5),
    256: (128, 32, 8, 5),
    512: (128, 32, 8, 3),
}
_SMALL = {
    64: (64, 64, 4, 3),
    128: (128, 32, 8, 3),
    256: (64, 32, 8, 3),
    512: (32, 16, 8, 3),
}


def tile_shape(
    group: int, head_dim: int, capability: tuple[int, int], *, of_decodes: bool = False
) -> TileShape:
    """Choose the tile shape for a head size and a device. group: query heads of a kv head.
    capability: of the device. of_decodes: most tiles have one token. Raises ValueError for a head
    size above 512.
    """
    if head_dim > _WIDEST_HEAD:
        raise ValueError(f"head sizes are at most {_WIDEST_HEAD}, not {head_dim}")
    is_large = (9, 0) <= capability < (12, 0)
    table = _LARGE if is_large else _SMALL
    most, block_n, num_warps, stages = table[max(64, triton.next_power_of_2(head_dim))]
    if of_decodes and most > _FEW_QUERIES:
        most, num_warps = _FEW_QUERIES, num_warps * _FEW_QUERIES // most
    block_m = max(most, triton.next_power_of_2(group))
    sizes = (block_m // group, block_m, block_n, num_warps, stages)
    values = _MOST_VALUES if is_large else _WIDEST_HEAD
    return TileShape(*sizes, aligned=of_decodes, most_values=values)


def cut_prompts(
    seq_rows: np.ndarray,
    starts: np.ndarray,
    num_new: np.ndarray,
    tokens: int,
    chosen: np.ndarray | None = None,
) -> np.ndarray:
    """Cut prompts into tiles: int32 `[tiles, 4]`: row of the page table, first token in the flat
    batch, its position, and how many tokens of the at most `tokens` of a tile there are. Those
    with most keys come first.

    All int64 `[prompts]`: prompts compute tokens `start .. start + num_new`, one after the other in
    the flat batch. chosen: bool `[prompts]`, which have tiles; None = all.
    """
    counts = -(-num_new // tokens)
    if chosen is not None:
        counts = np.where(chosen, counts, 0)
    of = np.repeat(np.arange(len(counts)), counts)
    begins = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
    firsts = (np.cumsum(num_new) - num_new)[of] + begins
    positions, lengths = starts[of] + begins, np.minimum(num_new[of] - begins, tokens)
    tiles = np.stack((seq_rows[of], firsts, positions, lengths), axis=1).astype(np.int32)
    return tiles[np.argsort(-positions, kind="stable")]


def max_tiles(tokens: int, prompts: int, shape: TileShape) -> int:
    """The most tiles of `prompts` prompts with `tokens` tokens together."""
    return tokens // shape.tokens + min(prompts, tokens)


def prompt_attention(
    q: torch.Tensor,
    cache: CachePages,
    page_table: torch.Tensor,
    tiles: torch.Tensor,
    shape: TileShape,
    rule: ScoreRule,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lasts: torch.Tensor | None = None,
) -> None:
    """Compute attention of prompts, tile by tile. q, out: `[tokens, heads, head_dim]`, contiguous;
    tokens of no tile are left as they are. cache: with the prompts' own keys and values.
    page_table: int64 `[rows, pages a row]`. tiles: int32 `[tiles, 4]`, contiguous, as of
    `cut_prompts`; a tile of no tokens computes nothing. sinks: float32 `[heads]`, a further
    score of each softmax, neither scaled nor capped, that weighs no value; None = without. lasts:
    int32 `[tokens]`, the last position that each token sees, no less than its own, with keys in the
    cache; None = its own. One kernel. Raises ValueError where the shape is of other heads.
    """
    page_size, kv_heads, head_dim = cache.k.shape[1:]
    rule = cache.scored(rule)
    group = q.shape[1] // kv_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_v = min(block_d, shape.most_values)
    if shape.tokens != shape.block_m // group:
        raise ValueError(f"tiles of {shape.tokens} tokens are not for {group} heads a kv head")
    _prompt_attention_kernel[(kv_heads, len(tiles), triton.cdiv(head_dim, block_v))](
        q,
        out,
        cache.k,
        cache.v,
        cache.v_scale,
        cache.stride,
        cache.token_scales,
        page_table,
        page_table.stride(0),
        tiles,
        q if sinks is None else sinks,
        rule.slopes,
        lasts,
        *rule.arguments,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        TOKENS=shape.tokens,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_D=block_d,
        BLOCK_V=block_v,
        SINKS=sinks is not None,
        ALIGNED=shape.aligned,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **rule.switches,
    )


@triton.jit(
    do_not_specialize=["v_scale", "stride_pages", "inner", "outer", "window"],
    do_not_specialize_on_alignment=["tiles_ptr", "sinks_ptr", "slopes_ptr", "lasts_ptr"],
)
def _prompt_attention_kernel(
    q_ptr: tl.tensor,
    out_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    v_scale: tl.tensor,
    stride: tl.tensor,
    token_scales: tl.tuple,
    page_table_ptr: tl.tensor,
    stride_pages: tl.tensor,
    tiles_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    lasts_ptr: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    window: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """A program takes one tile for the query heads of one kv head, and BLOCK_V features of values.
    Row m of its block is query head `m % GROUP` of the tile's token `m // GROUP`."""
    kv_head = tl.program_id(0)
    tile_ptr = tiles_ptr + tl.program_id(1) * 4
    count = tl.load(tile_ptr + 3)
    if count > 0:
        start = tl.load(tile_ptr + 2)
        pages_ptr = page_table_ptr + tl.load(tile_ptr).to(tl.int64) * stride_pages
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)[None, :]
        # Rows that pad compute what the last token does.
        token = tl.minimum(m // GROUP, count - 1)
        head = kv_head * GROUP + m % GROUP
        row = (tl.load(tile_ptr + 1) + token).to(tl.int64) * (GROUP * KV_HEADS) + head
        q_at = row[:, None] * HEAD_DIM + d
        q = for_pages(tl.load(q_ptr + q_at, mask=d < HEAD_DIM, other=0.0), k_ptr)
        top = tl.full((BLOCK_M,), NO_SCORE, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        if SINKS:
            top = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
            total += 1.0
        slopes = slopes_ptr
        if slopes_ptr is not None:
            slopes = slopes_of(slopes_ptr, head, m >= 0, outer)
        scales = token_scales
        if token_scales is not None:
            of_head = kv_head * PAGE_SIZE
            scales = (token_scales[0] + of_head, token_scales[1] + of_head, token_scales[2])
        lasts, end = start + token, start + count
        if lasts_ptr is not None:
            lasts = tl.load(lasts_ptr + tl.load(tile_ptr + 1) + token)
            end = tl.max(lasts) + 1
        first_value = tl.program_id(2) * BLOCK_V
        keys = _Keys(
            pages_ptr, k_ptr + kv_head * HEAD_DIM, v_ptr + kv_head * HEAD_DIM, first_value, stride,
            scales, slopes, lasts,
            tl.maximum(start + 1 - window, 0) if WINDOWED else start * 0, end,
        )  # fmt: skip
        top, total, acc = _attend_tile(
            q, (top, total, tl.zeros((BLOCK_M, BLOCK_V), tl.float32)), start + token, start,
            keys, (inner, outer, window),
            _Form(KV_HEADS * HEAD_DIM, HEAD_DIM, PAGE_SIZE, BLOCK_N, CAPPED, WINDOWED, ALIGNED),
        )  # fmt: skip
        live = (m < TOKENS * GROUP) & (m // GROUP < count)
        result = acc * (v_scale / total)[:, None]
        d_v = first_value + tl.arange(0, BLOCK_V)[None, :]
        tl.store(
            out_ptr + row[:, None] * HEAD_DIM + d_v, result.to(out_ptr.dtype.element_ty),
            mask=live[:, None] & (d_v < HEAD_DIM),
        )  # fmt: skip


class _Keys(NamedTuple):
    """Keys and values of one kv head: the sequence's pages, addresses, the first feature of values
    that is read, the stride from page to page, as much of `CachePages.token_scales`, slopes of the
    queries, the last position that each sees, the position of the first key that the tile's tokens
    see, and of the end.
    """

    pages_ptr: Any
    k_ptr: Any
    v_ptr: Any
    first_value: Any
    stride: Any
    scales: Any
    slopes: Any
    lasts: Any
    begin: Any
    end: Any


class _Form(NamedTuple):
    """Form of the attention kernel. Constants: from one key to the next, size of a head and of a
    page, keys of a step, whether scores are capped and seen through a window, and as of
    `TileShape.aligned`.
    """

    token: Any
    head_dim: Any
    page_size: Any
    step: Any
    capped: Any
    windowed: Any
    aligned: Any


@triton.jit
def _attend_tile(
    q: tl.tensor,
    so_far: tl.tuple,
    positions: tl.tensor,
    start: tl.tensor,
    keys: _Keys,
    rule: tl.tuple,
    form: _Form,
) -> tuple[Any, Any, Any]:
    """Attend with a tile's tokens, from start on.

    First come keys that left the windows of some tokens, then keys that all tokens see, then keys
    behind some tokens. rule: as of `ScoreRule.arguments`. Returns what `_attend` does.
    """
    STEP: tl.constexpr = form.step
    begin, end = start * 0, keys.end
    if form.windowed:
        begin = keys.begin // STEP * STEP if form.aligned else keys.begin
        left = tl.maximum(end - rule[2] - begin, 0)
        seen_by_all = begin + tl.cdiv(left, STEP) * STEP
        stop = tl.minimum(seen_by_all, end)
        so_far = _attend(q, so_far, positions, begin, stop, keys, rule, form, True)
        begin = seen_by_all
    diagonal = begin + tl.maximum(start + 1 - begin, 0) // STEP * STEP
    so_far = _attend(q, so_far, positions, begin, diagonal, keys, rule, form, False)
    so_far = _attend(q, so_far, positions, diagonal, end, keys, rule, form, True)
    return so_far[0], so_far[1], so_far[2]


@triton.jit
def _attend(
    q: tl.tensor,
    so_far: tl.tuple,
    positions: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    keys: _Keys,
    rule: tl.tuple,
    form: _Form,
    MASKED: tl.constexpr,
) -> tuple[Any, Any, Any]:
    """Keys begin .. stop, in blocks, into the running softmax (arXiv:1805.02867): largest score and
    sum, `[BLOCK_M]`, and weighted v, `[BLOCK_M, BLOCK_V]`. MASKED: some see not all of them."""
    BLOCK_D: tl.constexpr = q.shape[1]
    STEP: tl.constexpr = form.step
    inner, outer, window = rule
    n = tl.arange(0, STEP)
    d = tl.arange(0, BLOCK_D)[None, :]
    top, total, acc = so_far
    BLOCK_V: tl.constexpr = acc.shape[1]
    d_v = keys.first_value + tl.arange(0, BLOCK_V)[None, :]
    for first in tl.range(begin, stop, STEP):
        # What nobody sees may be gone: a key that somebody sees is read in its place.
        token = tl.minimum(first + n, keys.end - 1)
        if form.aligned and form.windowed:
            token = tl.maximum(token, keys.begin)
        page = tl.load(keys.pages_ptr + token // form.page_size)
        offset = token % form.page_size
        at = place_in_pages(page, offset, keys.stride, form.token)[:, None]
        k = tl.load(keys.k_ptr + at + d, mask=d < form.head_dim, other=0.0)
        scores = tl.dot(q, tl.trans(widened(k, q.dtype)), input_precision="ieee")
        if keys.scales is not None:
            scores *= tl.load(keys.scales[0] + page * keys.scales[2] + offset)[None, :]
        if form.capped:
            scores = capped(scores, inner)
        key = (first + n)[None, :]
        if keys.slopes is not None:
            scores += keys.slopes[:, None] * (key - positions[:, None]).to(tl.float32)
        if MASKED:
            seen = key <= keys.lasts[:, None]
            if form.windowed:
                seen = seen & (key > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1) * outer)
        decay = tl.exp2(top - higher)
        weights = tl.exp2(scores * outer - higher[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        if keys.scales is not None:
            of_values = tl.load(keys.scales[1] + page * keys.scales[2] + offset)
            weights = scaled_weights(weights, of_values[None, :])
        v = tl.load(keys.v_ptr + at + d_v, mask=d_v < form.head_dim, other=0.0)
        acc = tl.dot(
            weights.to(q.dtype), widened(v, q.dtype), acc * decay[:, None], input_precision="ieee"
        )
        top = higher
    return top, total, acc
