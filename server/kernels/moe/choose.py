"""From a router's logits to each token's experts and their weights, in one kernel."""

import torch
import triton
import triton.language as tl


def choose_experts(
    logits: torch.Tensor, top_k: int, *, of_chosen: bool, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: `[tokens, experts]`, contiguous -> experts int32 `[tokens, top_k]`, those of the
    largest logits first, of equal ones that of the lowest number; and their weights, float32.

    A weight is the softmax's of all logits; of_chosen: of those of the chosen alone. rounded: to
    the logits' dtype. Logits that are not finite choose any experts.
    """
    tokens, experts = logits.shape
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    if tokens:
        _choose_kernel[(tokens,)](
            logits,
            chosen,
            weights,
            EXPERTS=experts,
            TOP_K=top_k,
            BLOCK_E=triton.next_power_of_2(experts),
            BLOCK_K=triton.next_power_of_2(top_k),
            OF_CHOSEN=of_chosen,
            ROUNDED=rounded,
            num_warps=1,
        )
    return chosen, weights


@triton.jit
def _choose_kernel(
    logits_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    ROUNDED: tl.constexpr,
) -> None:
    """A program takes a token. No expert is chosen twice, and none that is not there."""
    token = tl.program_id(0).to(tl.int64)
    e, k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    logits = tl.load(logits_ptr + token * EXPERTS + e, mask=e < EXPERTS, other=0.0).to(tl.float32)
    # What is not a number is below all numbers, what is chosen or not there below that.
    left = tl.where(logits == logits, tl.minimum(tl.maximum(logits, -1e38), 1e38), -1e38)
    left = tl.where(e < EXPERTS, left, float("-inf"))
    top = tl.max(left, axis=0)
    powers = tl.exp2((left - top) * 1.4426950408889634)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    for i in tl.static_range(TOP_K):
        largest = tl.max(left, axis=0)
        expert = tl.min(tl.where(left == largest, e, BLOCK_E), axis=0)
        chosen = tl.where(k == i, expert, chosen)
        weights = tl.where(k == i, tl.sum(tl.where(e == expert, powers, 0.0), axis=0), weights)
        left = tl.where(e == expert, float("-inf"), left)
    total = tl.sum(weights, axis=0) if OF_CHOSEN else tl.sum(powers, axis=0)
    weights = weights / total
    if ROUNDED:
        weights = weights.to(logits_ptr.dtype.element_ty).to(tl.float32)
    tl.store(chosen_ptr + token * TOP_K + k, chosen, mask=k < TOP_K)
    tl.store(weights_ptr + token * TOP_K + k, weights, mask=k < TOP_K)
