"""`x W^T` of any number of rows by one kernel of one shape.

A library takes another kernel for another number of rows, and the bits of a row's sums differ with
its neighbours. Here each sum goes through the input features in steps of one size, by the same
instructions, in a tile of as many rows, however many of them are real.
"""

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import dot_precision
from loraplex.server.kernels.linear.skinny import check_operands, operands

_ROWS, _OUTPUTS, _INPUTS, _WARPS = 64, 128, 128, 4


def stages_of(capability: tuple[int, int]) -> int:
    """Steps whose operands, of 48 KiB, a multiprocessor of this compute capability has room for.
    They change when operands are loaded, not how they are summed."""
    if (9, 0) <= capability < (12, 0):
        return 4
    return 3 if capability == (8, 0) else 2


def fixed_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    num_stages: int,
) -> None:
    """Multiply rows by a matrix: `out = x weight^T + bias`, summed in float32, so that no bit of a
    row depends on the others or on their number.

    x `[rows, in]`, out `[rows, out]`: any row stride; weight `[out, in]`, contiguous; bias `[out]`
    or None; all of one dtype. num_stages: of the loop, as
    `stages_of` says. One kernel, no allocation. Raises ValueError on a mismatch.
    """
    if not len(x):
        return
    check_operands(x, weight, bias, out, len(x))
    (rows, features), n = x.shape, len(weight)
    _fixed_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(n, _OUTPUTS))](
        operands(x, weight, bias, out),
        rows,
        n,
        features,
        BLOCK_M=_ROWS,
        BLOCK_N=_OUTPUTS,
        BLOCK_K=_INPUTS,
        EVEN=features % _INPUTS == 0,
        BIAS=bias is not None,
        STAGES=num_stages,
        PRECISION=dot_precision(x.dtype),
        num_warps=_WARPS,
    )


@triton.jit(do_not_specialize=["rows"])
def _fixed_kernel(
    product: tl.tuple,
    rows: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """product: as of `operands`. Programs with the same weights follow each other."""
    x_ptr, weight_ptr, bias_ptr, out_ptr, stride_x, stride_out = product
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    real, known = (m < rows)[:, None], (n < out_features)[:, None]
    x_at = x_ptr + m[:, None] * stride_x + k[None, :]
    weight_at = weight_ptr + n[:, None] * in_features + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, in_features, BLOCK_K, num_stages=STAGES):
        if EVEN:
            x = tl.load(x_at + step, mask=real, other=0.0)
            weights = tl.load(weight_at + step, mask=known, other=0.0)
        else:
            inside = (step + k < in_features)[None, :]
            x = tl.load(x_at + step, mask=real & inside, other=0.0)
            weights = tl.load(weight_at + step, mask=known & inside, other=0.0)
        acc = tl.dot(x, tl.trans(weights), acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < out_features, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + m[:, None] * stride_out + n[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=real & (n < out_features)[None, :])
