"""Attention to latents in pages: one cached row a token, which all heads read.

A row is a key; its first features, the latent, are the value, too, and are read once for both. Of
decodes long contexts are cut into pieces, as `decode_attention.py` does; of prompts a program takes
a tile of tokens. Either takes some heads of its tokens together: these share what is read.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.attention.decode_attention import (
    DecodeBatchView,
    DecodeScratch,
    LayerScores,
    write_result,
)
from loraplex.server.kernels.attention.pages import place_in_pages
from loraplex.server.kernels.attention.prompt_attention import TileShape
from loraplex.server.kernels.attention.scores import NO_SCORE
from loraplex.server.kernels.launch.launch import follow

# Heads of a program, at most.
_MOST_HEADS = 32
# Queries and rows of a tile, warps and stages, first for multiprocessors with 227 KB of shared
# memory, then for 99 KB.
_LARGE, _SMALL = (64, 32, 8, 2), (32, 16, 8, 2)
_DECODE_ROWS, _DECODE_WARPS, _DECODE_STAGES = 32, 8, 2


def heads_together(heads: int) -> int:
    """The most heads that a program takes: as many in each."""
    return max(n for n in range(1, _MOST_HEADS + 1) if heads % n == 0)


def latent_tiles(heads: int, capability: tuple[int, int]) -> TileShape:
    """Choose the tile shape of prompts. heads: of queries. capability: of the device."""
    large = (9, 0) <= capability < (12, 0)
    most, *others = _LARGE if large else _SMALL
    group = heads_together(heads)
    block_n, num_warps, stages = others
    return TileShape(most // group, most, block_n, num_warps, stages)


def latent_decodes(
    q: torch.Tensor,
    batch: DecodeBatchView,
    pages: torch.Tensor,
    scores: LayerScores,
    scratch: DecodeScratch,
    out: torch.Tensor,
    *,
    programmatic_launch: bool,
) -> None:
    """Compute attention of one new token a sequence, whose row is in its page. q: `[batch, heads,
    latent + part]`, out: `[batch, heads, latent]`, both contiguous. pages: `[pages, page_size, 1,
    latent + part]`. One kernel. Raises ValueError where scratch has no room for the batch.
    """
    work = batch.work[scores.window]
    if len(q) > len(scratch.done) or work.items.shape[1] > len(scratch.sums):
        raise ValueError(f"scratch is for {len(scratch.done)} sequences, the batch has {len(q)}")
    heads, latent = out.shape[1:]
    group = heads_together(heads)
    _latent_decode_kernel[(heads // group, work.items.shape[1])](
        q,
        out,
        pages,
        pages.stride(0),
        batch.rows,
        batch.positions,
        batch.page_table,
        batch.page_table.stride(0),
        work.items,
        work.piece,
        (scratch.sums, scratch.weights, scratch.done),
        scores.rule.outer,
        GROUP=group,
        BLOCKS=heads // group,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_N=_DECODE_ROWS,
        STAGES=_DECODE_STAGES,
        PDL=programmatic_launch,
        num_warps=_DECODE_WARPS,
        launch_pdl=programmatic_launch,
        **_form(q, latent, pages),
    )


def latent_prompts(
    q: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    tiles: torch.Tensor,
    shape: TileShape,
    outer: float,
    out: torch.Tensor,
) -> None:
    """Compute attention of prompts, tile by tile, whose rows are in their pages. q, out, pages: as
    of `latent_decodes`, for tokens; page_table, tiles: as of `prompt_attention`. outer: as of
    ScoreRule. One kernel.
    """
    heads, latent = out.shape[1:]
    group = heads_together(heads)
    if not len(tiles):
        return
    _latent_prompt_kernel[(heads // group, len(tiles))](
        q,
        out,
        pages,
        pages.stride(0),
        page_table,
        page_table.stride(0),
        tiles,
        outer,
        GROUP=group,
        BLOCKS=heads // group,
        TOKENS=shape.tokens,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        STAGES=shape.num_stages,
        num_warps=shape.num_warps,
        **_form(q, latent, pages),
    )


def _form(q: torch.Tensor, latent: int, pages: torch.Tensor) -> dict[str, int]:
    part = q.shape[2] - latent
    return {
        "LATENT": latent,
        "PART": part,
        "PAGE_SIZE": pages.shape[1],
        "BLOCK_H": max(16, triton.next_power_of_2(latent // 2)),
        "BLOCK_P": max(16, triton.next_power_of_2(part)),
    }


@triton.jit(
    do_not_specialize=["stride_pages", "outer"],
    do_not_specialize_on_alignment=["rows_ptr", "positions_ptr", "items_ptr", "piece_ptr"],
)
def _latent_decode_kernel(
    q_ptr: tl.tensor,
    out_ptr: tl.tensor,
    k_ptr: tl.tensor,
    stride: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    stride_pages: tl.tensor,
    items_ptr: tl.tensor,
    piece_ptr: tl.tensor,
    scratch: tl.tuple,
    outer: tl.tensor,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    LATENT: tl.constexpr,
    PART: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """A program takes one piece of one sequence for some heads."""
    follow(PDL)
    HEADS: tl.constexpr = GROUP * BLOCKS
    block, item = tl.program_id(0), tl.program_id(1)
    seq = tl.load(items_ptr + item)
    if seq >= 0:
        number, piece = tl.load(items_ptr + tl.num_programs(1) + item), tl.load(piece_ptr)
        position = tl.load(positions_ptr + seq).to(tl.int32)
        pages_ptr = page_table_ptr + tl.load(rows_ptr + seq).to(tl.int64) * stride_pages
        m = tl.arange(0, BLOCK_M)
        row = seq.to(tl.int64) * HEADS + block * GROUP + tl.minimum(m, GROUP - 1)
        q = _load_queries(q_ptr, row, LATENT, PART, BLOCK_H, BLOCK_P)
        begin = number * piece
        so_far = _attend(
            q, position + m * 0, begin, tl.minimum(begin + piece, position + 1), pages_ptr,
            k_ptr, stride, outer, LATENT, PART, PAGE_SIZE, BLOCK_N, STAGES,
        )  # fmt: skip
        write_result(
            so_far, item, number, position // piece + 1, block,
            out_ptr + seq.to(tl.int64) * (HEADS * LATENT), 1.0, scratch, seq * HEADS,
            GROUP, HEADS, LATENT, BLOCK_M, BLOCK_H,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["stride_pages", "outer"], do_not_specialize_on_alignment=["tiles_ptr"]
)
def _latent_prompt_kernel(
    q_ptr: tl.tensor,
    out_ptr: tl.tensor,
    k_ptr: tl.tensor,
    stride: tl.tensor,
    page_table_ptr: tl.tensor,
    stride_pages: tl.tensor,
    tiles_ptr: tl.tensor,
    outer: tl.tensor,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    LATENT: tl.constexpr,
    PART: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """A program takes one tile for some heads. Row m of its block is head `m % GROUP` of these, of
    the tile's token `m // GROUP`."""
    HALF: tl.constexpr = LATENT // 2
    block = tl.program_id(0)
    tile_ptr = tiles_ptr + tl.program_id(1) * 4
    count = tl.load(tile_ptr + 3)
    if count > 0:
        start = tl.load(tile_ptr + 2)
        pages_ptr = page_table_ptr + tl.load(tile_ptr).to(tl.int64) * stride_pages
        m = tl.arange(0, BLOCK_M)
        # Rows that pad compute what the last token does.
        token = tl.minimum(m // GROUP, count - 1)
        row = (tl.load(tile_ptr + 1) + token).to(tl.int64) * (GROUP * BLOCKS)
        row += block * GROUP + m % GROUP
        q = _load_queries(q_ptr, row, LATENT, PART, BLOCK_H, BLOCK_P)
        so_far = _attend(
            q, start + token, 0, start + count, pages_ptr, k_ptr, stride, outer,
            LATENT, PART, PAGE_SIZE, BLOCK_N, STAGES,
        )  # fmt: skip
        h = tl.arange(0, BLOCK_H)[None, :]
        live = ((m < TOKENS * GROUP) & (m // GROUP < count))[:, None] & (h < HALF)
        out = out_ptr + row[:, None] * LATENT + h
        scale = (1.0 / so_far[1])[:, None]
        tl.store(out, (so_far[2] * scale).to(out_ptr.dtype.element_ty), mask=live)
        tl.store(out + HALF, (so_far[3] * scale).to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _load_queries(
    q_ptr: tl.tensor,
    row: tl.tensor,
    LATENT: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> tuple[Any, Any, Any]:
    """Halves of what meets latents, each `[rows, BLOCK_H]`, and the part, `[rows, BLOCK_P]`. row:
    int64 `[rows]`."""
    HALF: tl.constexpr = LATENT // 2
    at = q_ptr + row[:, None] * (LATENT + PART)
    h, p = tl.arange(0, BLOCK_H)[None, :], tl.arange(0, BLOCK_P)[None, :]
    a = tl.load(at + h, mask=h < HALF, other=0.0)
    b = tl.load(at + HALF + h, mask=h < HALF, other=0.0)
    return a, b, tl.load(at + LATENT + p, mask=p < PART, other=0.0)


@triton.jit
def _attend(
    q: tl.tuple,
    positions: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    pages_ptr: tl.tensor,
    k_ptr: tl.tensor,
    stride: tl.tensor,
    outer: tl.tensor,
    LATENT: tl.constexpr,
    PART: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[Any, Any, Any, Any]:
    """Rows begin .. end in a running softmax (arXiv:1805.02867): largest score and sum, `[rows]`,
    and halves of weighted latents, `[rows, BLOCK_H]`. positions: of queries, `[rows]`."""
    HALF: tl.constexpr = LATENT // 2
    BLOCK_M: tl.constexpr = q[0].shape[0]
    BLOCK_H: tl.constexpr = q[0].shape[1]
    BLOCK_P: tl.constexpr = q[2].shape[1]
    dtype: tl.constexpr = q[0].dtype
    n = tl.arange(0, BLOCK_N)
    h, p = tl.arange(0, BLOCK_H)[None, :], tl.arange(0, BLOCK_P)[None, :]
    top = tl.full((BLOCK_M,), NO_SCORE, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc_a = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
    acc_b = acc_a
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        # Behind the end lies what nobody sees: the last row is read in its place.
        token = tl.minimum(first + n, end - 1)
        page = tl.load(pages_ptr + token // PAGE_SIZE)
        at = k_ptr + place_in_pages(page, token % PAGE_SIZE, stride, LATENT + PART)[:, None]
        a = tl.load(at + h, mask=h < HALF, other=0.0)
        b = tl.load(at + HALF + h, mask=h < HALF, other=0.0)
        part = tl.load(at + LATENT + p, mask=p < PART, other=0.0)
        scores = tl.dot(q[0], tl.trans(a), input_precision="ieee")
        scores = tl.dot(q[1], tl.trans(b), scores, input_precision="ieee")
        scores = tl.dot(q[2], tl.trans(part), scores, input_precision="ieee")
        key = (first + n)[None, :]
        scores = tl.where((key <= positions[:, None]) & (key < end), scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1) * outer)
        decay = tl.exp2(top - higher)
        weights = tl.exp2(scores * outer - higher[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        weights = weights.to(dtype)
        acc_a = tl.dot(weights, a, acc_a * decay[:, None], input_precision="ieee")
        acc_b = tl.dot(weights, b, acc_b * decay[:, None], input_precision="ieee")
        top = higher
    return top, total, acc_a, acc_b
