"""From a router's logits to each token's experts, their weights, and tiles of rows by expert."""

from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import follow
from loraplex.server.kernels.moe.tiles import ExpertTiles, expert_tiles, max_tiles

# The most rows whose places one program finds sooner than two kernels do.
_MOST_COMPARED = 32


def assign_experts(
    logits: torch.Tensor,
    top_k: int,
    tile_rows: int,
    *,
    of_chosen: bool,
    rounded: bool,
    scales: torch.Tensor | None = None,
    programmatic_launch: bool,
) -> tuple[ExpertTiles, torch.Tensor]:
    """Choose each token's experts, and sort the rows into tiles. logits: `[tokens, experts]`, at
    least one token, contiguous -> tiles of the rows of those that `choose_experts` gives, and
    their weights, float32 `[tokens, top_k]`. One kernel for a few tokens, two for more; nothing
    waits for the device.
    """
    tokens, experts = logits.shape
    rule: dict[str, Any] = {"of_chosen": of_chosen, "rounded": rounded, "scales": scales}
    block_t, block_k = triton.next_power_of_2(tokens), triton.next_power_of_2(top_k)
    if block_t * block_k > _MOST_COMPARED:
        chosen, weights = choose_experts(
            logits, top_k, **rule, programmatic_launch=programmatic_launch
        )
        early = programmatic_launch
        return expert_tiles(chosen, experts, tile_rows, programmatic_launch=early), weights
    rows = tokens * top_k
    most = max_tiles(rows, tile_rows, experts)
    chosen, order = (logits.new_empty(rows, dtype=torch.int32) for _ in range(2))
    tiles = logits.new_empty(most, 3, dtype=torch.int32)
    weights = logits.new_empty(tokens, top_k, dtype=torch.float32)
    _assign_kernel[(1,)](
        logits,
        chosen,
        order,
        tiles,
        weights,
        logits if scales is None else scales,
        tokens,
        most,
        EXPERTS=experts,
        TOP_K=top_k,
        TILE_ROWS=tile_rows,
        BLOCK_T=block_t,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_K=block_k,
        BLOCK_TILES=triton.next_power_of_2(most),
        OF_CHOSEN=of_chosen,
        ROUNDED=rounded,
        SCALED=scales is not None,
        PDL=programmatic_launch,
        num_warps=min(8, max(1, block_t * block_k // 16)),
        launch_pdl=programmatic_launch,
    )
    return ExpertTiles(chosen, order, tiles, tile_rows, top_k), weights


def choose_experts(
    logits: torch.Tensor,
    top_k: int,
    *,
    of_chosen: bool,
    rounded: bool,
    scales: torch.Tensor | None = None,
    programmatic_launch: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `top_k` experts of each token. logits: `[tokens, experts]`, contiguous -> experts
    int32 `[tokens, top_k]`, those of the largest logits first, of equal ones that of the lowest
    number; and their weights, float32.

    A weight is the softmax's of all logits; of_chosen: of those of the chosen alone. rounded: to
    the logits' dtype. scales: float32 `[experts]`, which multiply weights at last; None = nothing
    does. Logits that are not finite choose any experts. One kernel.
    """
    tokens, experts = logits.shape
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    if tokens:
        _choose_kernel[(tokens,)](
            logits,
            chosen,
            weights,
            logits if scales is None else scales,
            EXPERTS=experts,
            TOP_K=top_k,
            BLOCK_E=triton.next_power_of_2(experts),
            BLOCK_K=triton.next_power_of_2(top_k),
            OF_CHOSEN=of_chosen,
            ROUNDED=rounded,
            SCALED=scales is not None,
            PDL=programmatic_launch,
            num_warps=1,
            launch_pdl=programmatic_launch,
        )
    return chosen, weights


@triton.jit
def _choose_kernel(
    logits_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    ROUNDED: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program takes a token."""
    follow(PDL)
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    chosen, weights = _chosen(
        logits_ptr, scales_ptr, token,
        EXPERTS, TOP_K, BLOCK_E, BLOCK_K, OF_CHOSEN, ROUNDED, SCALED,
    )  # fmt: skip
    k = tl.arange(0, BLOCK_K)[None, :]
    at = token[:, None] * TOP_K + k
    tl.store(chosen_ptr + at, chosen, mask=k < TOP_K)
    tl.store(weights_ptr + at, weights, mask=k < TOP_K)


@triton.jit(do_not_specialize=["tokens", "most_tiles"])
def _assign_kernel(
    logits_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    tokens: tl.tensor,
    most_tiles: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    ROUNDED: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program takes all tokens. A row's place is the number of rows before it."""
    follow(PDL)
    token, k = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)[None, :]
    there = tl.minimum(token, tokens - 1)
    chosen, weights = _chosen(
        logits_ptr, scales_ptr, there,
        EXPERTS, TOP_K, BLOCK_E, BLOCK_K, OF_CHOSEN, ROUNDED, SCALED,
    )  # fmt: skip
    row = token[:, None] * TOP_K + k
    live = (token < tokens)[:, None] & (k < TOP_K)
    tl.store(chosen_ptr + row, chosen, mask=live)
    tl.store(weights_ptr + row, weights, mask=live)
    ROWS: tl.constexpr = BLOCK_T * BLOCK_K
    # Rows that are not there come last, as those of an expert that is not there.
    expert = tl.reshape(tl.where(live, chosen, BLOCK_E), (ROWS,))
    row, live = tl.reshape(row, (ROWS,)), tl.reshape(live, (ROWS,))
    key = expert * ROWS + tl.where(live, row, ROWS - 1)
    before = key[None, :] < key[:, None]
    same = expert[None, :] == expert[:, None]
    place = tl.sum(before.to(tl.int32), axis=1)
    done = tl.sum((before & same).to(tl.int32), axis=1)
    count = tl.sum(same.to(tl.int32), axis=1)
    leads = (live & (done % TILE_ROWS == 0)).to(tl.int32)
    tile = tl.sum(tl.where(before, leads[None, :], 0), axis=1)
    tl.store(order_ptr + place, row, mask=live)
    of_tile = tiles_ptr + tile * 3
    tl.store(of_tile, expert, mask=leads > 0)
    tl.store(of_tile + 1, place, mask=leads > 0)
    tl.store(of_tile + 2, tl.minimum(count - done, TILE_ROWS), mask=leads > 0)
    t = tl.arange(0, BLOCK_TILES)
    unused = (t >= tl.sum(leads, axis=0)) & (t < most_tiles)
    tl.store(tiles_ptr + t * 3 + 2, 0, mask=unused)


@triton.jit
def _chosen(
    logits_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    token: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    ROUNDED: tl.constexpr,
    SCALED: tl.constexpr,
) -> tuple[Any, Any]:
    """token: `[T]` -> experts int32 and weights float32, `[T, BLOCK_K]`. No expert is chosen twice,
    and none that is not there."""
    e, k = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    at = logits_ptr + token[:, None] * EXPERTS + e
    logits = tl.load(at, mask=e < EXPERTS, other=0.0).to(tl.float32)
    # What is not a number is below all numbers, what is chosen or not there below that.
    left = tl.where(logits == logits, tl.minimum(tl.maximum(logits, -1e38), 1e38), -1e38)
    left = tl.where(e < EXPERTS, left, float("-inf"))
    top = tl.max(left, axis=1)
    powers = tl.exp2((left - top[:, None]) * 1.4426950408889634)
    chosen = (token[:, None] + k).to(tl.int32) * 0
    weights = chosen.to(tl.float32)
    for i in tl.static_range(TOP_K):
        largest = tl.max(left, axis=1)
        expert = tl.min(tl.where(left == largest[:, None], e, BLOCK_E), axis=1)
        taken = e == expert[:, None]
        share = tl.sum(tl.where(taken, powers, 0.0), axis=1)
        chosen = tl.where(k == i, expert[:, None], chosen)
        weights = tl.where(k == i, share[:, None], weights)
        left = tl.where(taken, float("-inf"), left)
    total = tl.sum(weights, axis=1) if OF_CHOSEN else tl.sum(powers, axis=1)
    weights = weights / total[:, None]
    if ROUNDED:
        weights = weights.to(logits_ptr.dtype.element_ty).to(tl.float32)
    if SCALED:
        weights *= tl.load(scales_ptr + chosen, mask=k < TOP_K, other=0.0)
    return chosen, weights
