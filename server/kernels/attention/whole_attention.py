"""Attention of whole texts, whose tokens see all others, in one launch a layer. Nothing is kept.

FlashAttention (https://arxiv.org/abs/2205.14135): a program takes a tile of a text's tokens for one
query head, and keeps a running softmax over the text's keys. They are read where the product of q,
k and v has left them.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from loraplex.server.kernels.attention.scores import LOG2_E, NO_SCORE, ScoreRule, capped

TILE_TOKENS = 64
# Head sizes, padded, whose keys and values leave room for stages.
_NARROW = 128


def cut_texts(num_new: np.ndarray) -> np.ndarray:
    """Cut texts into tiles: int32 `[tiles, 3]`: the text's first token in the flat batch, the
    tile's first token within the text, and the text's tokens. Those of long texts come first.

    num_new: tokens of texts, int64 `[texts]`, one after the other in the flat batch.
    """
    counts = -(-num_new // TILE_TOKENS)
    of = np.repeat(np.arange(len(counts)), counts)
    begins = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * TILE_TOKENS
    firsts = (np.cumsum(num_new) - num_new)[of]
    tiles = np.stack((firsts, begins, num_new[of]), axis=1).astype(np.int32)
    return tiles[np.argsort(-num_new[of], kind="stable")]


def whole_attention(
    qkv: torch.Tensor,
    heads: tuple[int, int],
    tiles: torch.Tensor,
    rule: ScoreRule,
    biases: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Compute attention of whole texts, tile by tile. qkv: `[tokens, heads + 2 kv_heads,
    head_dim]`, contiguous. heads: of q, and of k. tiles: int32 `[tiles, 3]`, contiguous, as of
    `cut_texts`; a tile of a text without tokens computes nothing. rule: its window is the least
    distance of a token that is not seen. biases: float32 `[heads, 2 * n - 1]`, added to scores by
    the key's distance, from `1 - n` on, of texts of at most n tokens; None = none. out: `[tokens,
    heads * head_dim]`, contiguous. One kernel.
    """
    num_heads, kv_heads = heads
    reach = 0 if biases is None else biases.shape[1] // 2
    block_d = max(16, triton.next_power_of_2(qkv.shape[2]))
    _whole_attention_kernel[(num_heads, len(tiles))](
        qkv,
        out,
        tiles,
        qkv if biases is None else biases,
        reach,
        *rule.arguments,
        GROUP=num_heads // kv_heads,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=qkv.shape[2],
        BLOCK_M=TILE_TOKENS,
        BLOCK_N=64 if block_d <= _NARROW else 32,
        BLOCK_D=block_d,
        BIASED=biases is not None,
        num_warps=4,
        num_stages=3 if block_d <= _NARROW else 2,
        **rule.switches,
    )


@triton.jit(
    do_not_specialize=["reach", "inner", "outer", "window"],
    do_not_specialize_on_alignment=["tiles_ptr", "biases_ptr"],
)
def _whole_attention_kernel(
    qkv_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    reach: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    window: tl.tensor,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """A program takes one tile for one query head."""
    ROW: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    head = tl.program_id(0)
    tile_ptr = tiles_ptr + tl.program_id(1) * 3
    first, start, length = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    if length == 0:
        return
    # Rows that pad compute what the last token does, and so do keys behind the end.
    places = tl.minimum(start + tl.arange(0, BLOCK_M), length - 1)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)[None, :]
    in_head = d < HEAD_DIM
    text_ptr = qkv_ptr + first.to(tl.int64) * ROW
    q = tl.load(text_ptr + places[:, None] * ROW + head * HEAD_DIM + d, mask=in_head, other=0.0)
    k_ptr = text_ptr + (HEADS + head // GROUP) * HEAD_DIM + d
    begin, end = start * 0, length
    if WINDOWED:
        begin = tl.maximum(start + 1 - window, 0)
        end = tl.minimum(start + BLOCK_M - 1 + window, length)
    top = tl.full((BLOCK_M,), NO_SCORE, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for block in tl.range(begin, end, BLOCK_N):
        key = block + n
        at = tl.minimum(key, length - 1)[:, None] * ROW
        k = tl.load(k_ptr + at, mask=in_head, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAPPED:
            scores = capped(scores, inner)
        scores *= outer
        away = key[None, :] - places[:, None]
        seen = (key < length)[None, :] & (away == away)
        if WINDOWED:
            seen = seen & (away < window) & (-away < window)
        if BIASED:
            bias_ptr = biases_ptr + head * (2 * reach + 1) + reach
            scores += tl.load(bias_ptr + away, mask=seen, other=0.0) * LOG2_E
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        decay = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        v = tl.load(k_ptr + KV_HEADS * HEAD_DIM + at, mask=in_head, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        top = higher
    m = start + tl.arange(0, BLOCK_M)
    out_at = (first + m).to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + d
    result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at, result, mask=(m < length)[:, None] & in_head)
