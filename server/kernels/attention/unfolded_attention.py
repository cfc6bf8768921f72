"""Attention of prompts to keys and values that were made of latents, for each head its own.

As in `prompt_attention.py`, but a key is in two parts: its head's own, which lies beside the value,
and the rotated one, which all heads share. Keys come in pieces: a launch takes one piece, and goes
on from the results and sums that the one before left.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.attention.prompt_attention import TileShape
from loraplex.server.kernels.attention.scores import NO_SCORE

# Queries and keys of a tile, warps and stages, for narrow heads and for wide ones: first for
# multiprocessors with 227 KB of shared memory, then for 99 KB.
_LARGE = ((128, 64, 8, 3), (128, 32, 8, 3))
_SMALL = ((64, 32, 4, 2), (64, 16, 4, 2))
_NARROW = 128


class UnfoldedKeys(NamedTuple):
    """Keys and values of some tokens. kv: `[keys, heads, nope + value]`; parts: the rotated parts,
    `[keys, part]`; both contiguous."""

    kv: torch.Tensor
    parts: torch.Tensor


def unfolded_tiles(nope: int, value: int, capability: tuple[int, int]) -> TileShape:
    """Choose the tile shape. capability: of the device."""
    table = _LARGE if (9, 0) <= capability < (12, 0) else _SMALL
    most, block_n, num_warps, stages = table[int(max(nope, value) > _NARROW)]
    return TileShape(most, most, block_n, num_warps, stages)


def unfolded_prompts(
    q: torch.Tensor,
    turned: torch.Tensor,
    keys: UnfoldedKeys,
    tiles: torch.Tensor,
    shape: TileShape,
    outer: float,
    sums: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute attention of prompts to a piece of their keys, tile by tile. q: `[tokens, heads, nope
    + part]`, contiguous, of which the part is not read; turned: rotated parts, `[tokens, heads,
    part]`, a head's contiguous. tiles: int32 `[tiles, 6]`, as of `KeyPiece`. outer: of ScoreRule.
    sums: float32 `[tokens, heads]`, logarithms to base 2 of the softmax's sums; out: `[tokens,
    heads, value]`, contiguous. A tile whose keys do not begin at position 0 goes on from both. One
    kernel.
    """
    heads, value = out.shape[1:]
    part = turned.shape[2]
    nope = q.shape[2] - part
    block, rest = _blocks(nope)
    if len(tiles):
        _unfolded_prompt_kernel[(heads, len(tiles))](
            q,
            turned,
            *keys,
            tiles,
            outer,
            sums,
            out,
            turned.stride(0),
            turned.stride(1),
            HEADS=heads,
            NOPE=nope,
            PART=part,
            VALUE=value,
            BLOCK_M=shape.block_m,
            BLOCK_N=shape.block_n,
            BLOCK_D=block,
            BLOCK_R=rest,
            BLOCK_P=max(16, triton.next_power_of_2(part)),
            BLOCK_V=max(16, triton.next_power_of_2(value)),
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )


def _blocks(nope: int) -> tuple[int, int]:
    """Powers of two that hold a head's own part: one and 0, or two where these are less."""
    whole: int = max(16, triton.next_power_of_2(nope))
    rest: int = max(16, triton.next_power_of_2(max(1, nope - whole // 2)))
    split = whole // 2, rest
    return split if min(split) >= 16 and sum(split) < whole else (whole, 0)


@triton.jit(do_not_specialize=["outer"], do_not_specialize_on_alignment=["tiles_ptr"])
def _unfolded_prompt_kernel(
    q_ptr: tl.tensor,
    turned_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    outer: tl.tensor,
    sums_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    PART: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """A program takes one tile for one head."""
    head = tl.program_id(0)
    tile_ptr = tiles_ptr + tl.program_id(1) * 6
    first, start, count = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    begin, end, place = tl.load(tile_ptr + 3), tl.load(tile_ptr + 4), tl.load(tile_ptr + 5)
    m = tl.arange(0, BLOCK_M)
    # Rows that pad compute what the last token does.
    token = tl.minimum(m, count - 1)
    row = (first + token).to(tl.int64)
    v = tl.arange(0, BLOCK_V)[None, :]
    at_sums = sums_ptr + row * HEADS + head
    at_out = out_ptr + (row * HEADS + head)[:, None] * VALUE + v
    goes_on = (begin > 0) & (m >= 0)
    top = tl.load(at_sums, mask=goes_on, other=NO_SCORE)
    total = tl.zeros((BLOCK_M,), tl.float32) + tl.where(goes_on, 1.0, 0.0)
    acc = tl.load(at_out, mask=goes_on[:, None] & (v < VALUE), other=0.0).to(tl.float32)
    own_ptr = q_ptr + (row * HEADS + head)[:, None] * (NOPE + PART)
    p = tl.arange(0, BLOCK_P)[None, :]
    at = turned_ptr + row[:, None] * stride_token + head * stride_head + p
    a, b = _load_own(own_ptr, NOPE, BLOCK_D, BLOCK_R)
    q = (a, b, tl.load(at, mask=p < PART, other=0.0))
    # The piece's first key of the prompt lies at place.
    of_keys = place.to(tl.int64) - begin
    keys = (kv_ptr + (of_keys * HEADS + head) * (NOPE + VALUE), parts_ptr + of_keys * PART, end)
    diagonal = begin + tl.maximum(tl.minimum(start + 1, end) - begin, 0) // BLOCK_N * BLOCK_N
    so_far = _attend(
        q, (top, total, acc), start + token, begin, diagonal, keys, outer,
        HEADS, NOPE, PART, VALUE, BLOCK_N, BLOCK_R, False,
    )  # fmt: skip
    top, total, acc = _attend(
        q, so_far, start + token, diagonal, end, keys, outer,
        HEADS, NOPE, PART, VALUE, BLOCK_N, BLOCK_R, True,
    )  # fmt: skip
    live = m < count
    tl.store(at_sums, top + tl.log2(total), mask=live)
    result = acc * (1.0 / total)[:, None]
    tl.store(at_out, result.to(out_ptr.dtype.element_ty), mask=live[:, None] & (v < VALUE))


@triton.jit
def _load_own(
    ptr: tl.tensor, NOPE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr
) -> tuple[Any, Any]:
    """Features of a head's own part: the first block's, and the rest; without rest the first twice.
    ptr: `[n, 1]`."""
    d = tl.arange(0, BLOCK_D)[None, :]
    first = tl.load(ptr + d, mask=d < NOPE, other=0.0)
    rest = first
    if BLOCK_R > 0:
        r = BLOCK_D + tl.arange(0, BLOCK_R)[None, :]
        rest = tl.load(ptr + r, mask=r < NOPE, other=0.0)
    return first, rest


@triton.jit
def _attend(
    q: tl.tuple,
    so_far: tl.tuple,
    positions: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    keys: tl.tuple,
    outer: tl.tensor,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    PART: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[Any, Any, Any]:
    """Keys begin .. stop, in blocks, into the running softmax (arXiv:1805.02867): largest score and
    sum, `[BLOCK_M]`, and weighted values, `[BLOCK_M, BLOCK_V]`. keys: addresses of position 0, and
    the end. MASKED: some see not all of them."""
    top, total, acc = so_far
    BLOCK_V: tl.constexpr = acc.shape[1]
    dtype: tl.constexpr = q[0].dtype
    n = tl.arange(0, BLOCK_N)
    p, v = tl.arange(0, q[2].shape[1])[None, :], tl.arange(0, BLOCK_V)[None, :]
    for first in tl.range(begin, stop, BLOCK_N):
        key = first + n
        at = (tl.minimum(key, keys[2] - 1) if MASKED else key).to(tl.int64)[:, None]
        own_ptr = keys[0] + at * (HEADS * (NOPE + VALUE))
        a, b = _load_own(own_ptr, NOPE, q[0].shape[1], BLOCK_R)
        part = tl.load(keys[1] + at * PART + p, mask=p < PART, other=0.0)
        scores = tl.dot(q[0], tl.trans(a), input_precision="ieee")
        if BLOCK_R > 0:
            scores = tl.dot(q[1], tl.trans(b), scores, input_precision="ieee")
        scores = tl.dot(q[2], tl.trans(part), scores, input_precision="ieee")
        if MASKED:
            seen = (key[None, :] <= positions[:, None]) & (key < keys[2])[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1) * outer)
        decay = tl.exp2(top - higher)
        weights = tl.exp2(scores * outer - higher[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        value = tl.load(own_ptr + NOPE + v, mask=v < VALUE, other=0.0)
        acc = tl.dot(weights.to(dtype), value, acc * decay[:, None], input_precision="ieee")
        top = higher
    return top, total, acc
