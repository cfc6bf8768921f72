"""Attention of one new token a sequence over paged keys and values, in one launch a layer.

The kernel takes up LoRA's delta of q, k and v, norms and rotates q and k, writes the token's k and
v into their page, and attends. Long contexts are cut into pieces of equal length (FlashDecoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html); the program that ends a sequence's last
piece merges them, in order, so that results do not depend on who is last.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from server.kernels.attention.attention_block import PIECE_STEP, attend_piece, finish, new_token
from server.kernels.launch.launch import follow
from server.kernels.lora.pending import PendingDelta, delta_arguments
from server.kernels.lora.record import ranks_at, record_of

# Below so many tokens a piece costs more than it saves.
MIN_PIECE = 256
# Programs, from which on they are some, or many.
_SOME, _MANY = 512, 768
# What one warp has registers for.
_SUMS_OF_A_WARP = 2048


@dataclass(frozen=True, slots=True)
class DecodeItems:
    """Pieces of contexts, one program for each and each kv head.

    items: int32 `[2, max_items]`: sequence (-1 = no work) and which piece of it; those of one
    sequence are neighbours. piece: int32 `[1]`, tokens of a piece.
    """

    items: torch.Tensor
    piece: torch.Tensor


def max_items(batch: int) -> int:
    """Programs a kv head in a batch: one a sequence, and some for pieces of long contexts."""
    return batch + 32 + batch // 2


def cut_contexts(contexts: np.ndarray, items: np.ndarray) -> int:
    """contexts: int `[batch]`, tokens that each sequence attends to, its new one included. Fills
    items, int32 `[2, max_items(batch)]` as in DecodeItems, and returns the tokens of a piece."""
    spare = items.shape[1] - len(contexts)
    piece = max(MIN_PIECE, -(-int(contexts.sum()) // spare))
    piece = -(-piece // PIECE_STEP.value) * PIECE_STEP.value
    pieces = -(-contexts // piece)
    total = int(pieces.sum())
    items[0, :total] = np.repeat(np.arange(len(contexts)), pieces)
    items[1, :total] = np.arange(total) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    items[0, total:] = -1
    return int(piece)


class DecodeScratch:
    """Results of pieces, of up to `batch` sequences. All of one stream's launches may share it."""

    def __init__(
        self, batch: int, heads: int, head_dim: int, device: torch.device, rows: int = 0
    ) -> None:
        """rows: of the product among which the sequences' are, if more."""
        items = max_items(batch)
        self.sums = torch.empty(items, heads, head_dim, dtype=torch.float32, device=device)
        self.weights = torch.empty(2 * items * heads, dtype=torch.float32, device=device)
        self.done = torch.zeros(max(batch, rows), heads, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class DecodeBatchView:
    """Where a batch's sequences stand. rows: int32 `[batch]`, rows of the page table; positions:
    int64 `[batch]` of the new tokens; page_table: int64 `[rows, pages a row]`."""

    rows: torch.Tensor
    positions: torch.Tensor
    page_table: torch.Tensor
    work: DecodeItems


def decode_attention(
    qkv: torch.Tensor,
    pending: PendingDelta | None,
    batch: DecodeBatchView,
    cache: tuple[torch.Tensor, torch.Tensor],
    cos_sin: torch.Tensor,
    norm: tuple[torch.Tensor | None, float],
    scratch: DecodeScratch,
    out: torch.Tensor,
    *,
    programmatic_launch: bool,
) -> None:
    """qkv: `[batch, (heads + 2 kv_heads) * head_dim]`, contiguous; pending: LoRA of it, computed
    beside it. cache: k and v, `[pages, page_size, kv_heads, head_dim]`, contiguous. cos_sin:
    float32 `[positions, head_dim]`, cosines first. norm: weights `[heads + kv_heads, head_dim]` of
    an RMS norm before the rotation, or None, and its epsilon. out: `[batch, heads, head_dim]`. One
    kernel. Raises ValueError where scratch has no room for the batch, or the delta does not fit.
    """
    if len(qkv) > len(scratch.done) or batch.work.items.shape[1] > len(scratch.sums):
        raise ValueError(f"scratch is for {len(scratch.done)} sequences, the batch has {len(qkv)}")
    k_pages, v_pages = cache
    page_size, kv_heads, head_dim = k_pages.shape[1:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    weights, epsilon = norm
    group = heads // kv_heads
    block_n, num_warps = _shape(kv_heads * len(qkv), group, head_dim)
    _decode_attention_kernel[(kv_heads, batch.work.items.shape[1])](
        qkv,
        *delta_arguments(qkv, pending),
        out,
        cos_sin,
        cos_sin if weights is None else weights,
        epsilon,
        k_pages,
        v_pages,
        batch.rows,
        batch.positions,
        batch.page_table,
        batch.page_table.stride(0),
        batch.work.items,
        batch.work.piece,
        scratch.sums,
        scratch.weights,
        scratch.done,
        head_dim**-0.5 * 1.4426950408889634,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_Q=triton.next_power_of_2(group),
        BLOCK_H=max(16, triton.next_power_of_2(head_dim // 2)),
        BLOCK_N=block_n,
        NORM=weights is not None,
        LORA=pending is not None,
        PDL=programmatic_launch,
        num_warps=num_warps,
        launch_pdl=programmatic_launch,
    )


def rows_of_each_shape(kv_heads: int, most: int) -> list[int]:
    """Numbers of sequences, at most `most`, that between them take every shape that so many can."""
    return [rows for bound in (1, _SOME, _MANY) if (rows := -(-bound // kv_heads)) <= most]


def _shape(programs: int, group: int, head_dim: int) -> tuple[int, int]:
    """Tokens of a tile, of which a step takes two, and warps: few programs keep much in flight
    each, many together, and one warp waits for no other. group: query heads of a kv head."""
    width = triton.next_power_of_2(head_dim)
    if programs < _SOME:
        return max(16, 8192 // width), 4
    if programs < _MANY:
        return max(16, 4096 // width), 4
    sums = max(16, triton.next_power_of_2(group)) * width
    return 16, min(4, max(1, sums // _SUMS_OF_A_WARP))


# What is read one number at a time may begin anywhere in an upload: no kernel for each alignment.
@triton.jit(
    do_not_specialize=["epsilon", "stride_pages", "site", "num_sites"],
    do_not_specialize_on_alignment=[
        *("slots_ptr", "rows_ptr", "positions_ptr", "items_ptr", "piece_ptr")
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
    cos_sin_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    epsilon: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    stride_pages: tl.tensor,
    items_ptr: tl.tensor,
    piece_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    done_ptr: tl.tensor,
    scale_log2: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NORM: tl.constexpr,
    LORA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program takes one piece of one sequence for the query heads of one kv head."""
    follow(PDL)
    kv_head, item = tl.program_id(0), tl.program_id(1)
    HEADS: tl.constexpr = GROUP * KV_HEADS
    seq = tl.load(items_ptr + item)
    if seq >= 0:
        number, piece = tl.load(items_ptr + tl.num_programs(1) + item), tl.load(piece_ptr)
        position = tl.load(positions_ptr + seq).to(tl.int32)
        pages_ptr = page_table_ptr + tl.load(rows_ptr + seq).to(tl.int64) * stride_pages
        slot = tl.load(slots_ptr + seq) if LORA else seq * 0 - 1
        row = seq.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
        ranks_ptr = ranks_at(ints_ptr, record_of(slot, site, num_sites))
        token = new_token(
            qkv_ptr + row, delta_ptr + row, ranks_ptr, slot, kv_head,
            norm_ptr, epsilon, cos_sin_ptr + position.to(tl.int64) * HEAD_DIM,
            GROUP, KV_HEADS, HEAD_DIM, BLOCK_Q, BLOCK_H, NORM, LORA,
        )  # fmt: skip
        so_far = attend_piece(
            token, number * piece, piece, position, pages_ptr, k_ptr, v_ptr, kv_head, scale_log2,
            KV_HEADS, HEAD_DIM, PAGE_SIZE, max(16, BLOCK_Q), BLOCK_N, BLOCK_H,
        )  # fmt: skip
        finish(
            so_far, item, number, position // piece + 1, kv_head,
            out_ptr + seq.to(tl.int64) * (HEADS * HEAD_DIM), sums_ptr, weights_ptr,
            done_ptr + seq * HEADS, GROUP, HEADS, HEAD_DIM, max(16, BLOCK_Q), BLOCK_H,
        )  # fmt: skip
