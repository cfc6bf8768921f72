"""An RMS norm of groups of features, and a gate before it or behind it."""

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.states.operands import GatedNorm

# Features for which a warp is enough.
_OF_A_WARP = 512
_MOST_WARPS = 16


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    columns: torch.Tensor,
    norm: GatedNorm,
    out: torch.Tensor,
) -> None:
    """Norm x group by group, and multiply with `silu(factor * gate)`, in float32: what is normed is
    rounded to out's dtype, and so is its product with the weight.

    x: `[tokens, features]`, contiguous; out: as x, of any dtype. gate: `[tokens, more]`,
    contiguous. columns: int32 `[features]`, where each number's gate lies. Raises ValueError on a
    mismatch.
    """
    features, size = x.shape[1], norm.size
    if features % size or len(columns) != features or columns.dtype != torch.int32:
        raise ValueError(f"{features} numbers in groups of {size}, with {len(columns)} gates")
    given = [x, gate, columns, out] + ([] if norm.weight is None else [norm.weight])
    if not all(each.is_contiguous() for each in given) or out.shape != x.shape:
        raise ValueError("inputs, gates and weights must be contiguous, the output as the inputs")
    if not len(x):
        return
    block = triton.next_power_of_2(size)
    _gated_norm_kernel[(len(x), features // size)](
        x,
        gate,
        columns,
        columns if norm.weight is None else norm.weight,
        norm.epsilon,
        norm.factor,
        out,
        GATES=gate.shape[1],
        FEATURES=features,
        SIZE=size,
        BLOCK=block,
        NORM=norm.weight is not None,
        FIRST=norm.gate_first,
        num_warps=min(_MOST_WARPS, max(1, block // _OF_A_WARP)),
    )


@triton.jit(do_not_specialize=["epsilon", "factor"])
def _gated_norm_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    epsilon: tl.tensor,
    factor: tl.tensor,
    out_ptr: tl.tensor,
    GATES: tl.constexpr,
    FEATURES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    FIRST: tl.constexpr,
) -> None:
    token, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    feature, inside = tl.program_id(1) * SIZE + place, place < SIZE
    x = tl.load(x_ptr + token * FEATURES + feature, mask=inside, other=0.0).to(tl.float32)
    column = tl.load(columns_ptr + feature, mask=inside, other=0)
    gate = tl.load(gate_ptr + token * GATES + column, mask=inside, other=0.0).to(tl.float32)
    gate *= factor
    gate = gate / (1.0 + tl.exp(-gate))
    dtype = out_ptr.dtype.element_ty
    if FIRST:
        x *= gate
    if NORM:
        x = (x * tl.rsqrt(tl.sum(x * x) / SIZE + epsilon)).to(dtype)
        weight = tl.load(weight_ptr + feature, mask=inside, other=0.0)
        x = (weight * x).to(dtype).to(tl.float32)
    if not FIRST:
        x *= gate
    tl.store(out_ptr + token * FEATURES + feature, x.to(dtype), mask=inside)
