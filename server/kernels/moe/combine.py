"""The weighted sum of what a token's experts give."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def combine_experts(results: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """results: `[tokens * top_k, hidden]`, contiguous; weights: float32 `[tokens, top_k]` ->
    `[tokens, hidden]`, summed in float32 in the order of the weights, so that a token's result does
    not depend on the batch. One kernel."""
    (tokens, top_k), hidden = weights.shape, results.shape[1]
    out = torch.empty(tokens, hidden, dtype=results.dtype, device=results.device)
    if tokens:
        _combine_kernel[(tokens, triton.cdiv(hidden, _BLOCK))](
            results, weights, out, HIDDEN=hidden, TOP_K=top_k, BLOCK=_BLOCK, num_warps=4
        )
    return out


@triton.jit
def _combine_kernel(
    results_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        row = token * TOP_K + i
        result = tl.load(results_ptr + row * HIDDEN + n, mask=n < HIDDEN, other=0.0)
        total += tl.load(weights_ptr + row) * result.to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + n, total.to(out_ptr.dtype.element_ty), mask=n < HIDDEN)
