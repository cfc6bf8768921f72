"""An RMS norm of each head, multiplied with the SiLU of a gate."""

import torch
import triton
import triton.language as tl


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    columns: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
) -> None:
    """Norm x head by head, in place: `weight * norm(x) * silu(gate)`, in float32, the norm rounded
    to x's dtype.

    x: `[tokens, heads * size]`, contiguous. gate: `[tokens, features]`, contiguous. columns: int32
    `[heads * size]`, where each number's gate lies. weight: `[size]`. Raises ValueError on a
    mismatch.
    """
    size = len(weight)
    if x.shape[1] % size or len(columns) != x.shape[1] or columns.dtype != torch.int32:
        raise ValueError(f"{x.shape[1]} numbers in heads of {size}, with {len(columns)} gates")
    if not all(each.is_contiguous() for each in (x, gate, columns, weight)):
        raise ValueError("inputs, gates and weights must be contiguous")
    if not len(x):
        return
    heads = x.shape[1] // size
    _gated_norm_kernel[(len(x), heads)](
        x,
        gate,
        columns,
        weight,
        epsilon,
        FEATURES=gate.shape[1],
        HEADS=heads,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["epsilon"])
def _gated_norm_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    epsilon: tl.tensor,
    FEATURES: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    feature = tl.arange(0, BLOCK)
    inside = feature < SIZE
    place = x_ptr + token * (HEADS * SIZE) + head * SIZE + feature
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    column = tl.load(columns_ptr + head * SIZE + feature, mask=inside, other=0)
    gate = tl.load(gate_ptr + token * FEATURES + column, mask=inside, other=0.0).to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x) / SIZE + epsilon)).to(x_ptr.dtype.element_ty)
    weight = tl.load(weight_ptr + feature, mask=inside, other=0.0)
    scaled = (weight * normed).to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(place, (scaled * gate / (1.0 + tl.exp(-gate))).to(x_ptr.dtype.element_ty), mask=inside)
