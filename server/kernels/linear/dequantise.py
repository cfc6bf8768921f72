"""A quantised matrix written out in floating point, for products of many rows."""

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import let_next_start, wait
from loraplex.server.kernels.linear.matrix import PackedMatrix
from loraplex.server.kernels.linear.packed import (
    BITS,
    NATIVE,
    ORDER,
    TABLE,
    ZERO,
    from_fp8,
    load_groups,
    load_numbers,
)

# Output features of a program, and the most input features.
_BLOCK_N, _BLOCK_K = 32, 256


def dequantise(matrix: PackedMatrix, out: torch.Tensor, *, programmatic_launch: bool) -> None:
    """Write a quantised matrix out as plain numbers. out: `[out, in]` of any dtype, contiguous;
    rounded once. One kernel. Raises ValueError on a mismatch.
    """
    if out.shape != matrix.shape or not out.is_contiguous():
        raise ValueError(f"out is {list(out.shape)}, the matrix {list(matrix.shape)}")
    rows, features = out.shape
    inputs = matrix.run or min(_BLOCK_K, matrix.group or _BLOCK_K)
    grid = (triton.cdiv(features, inputs), triton.cdiv(rows, _BLOCK_N))
    scales, zeros, table, order = matrix.tensors
    _dequantise_kernel[grid](
        (matrix.numbers, scales, zeros, table, order),
        out,
        rows,
        features,
        FORM=matrix.form(),
        BLOCK_N=_BLOCK_N,
        INPUTS=inputs,
        PDL=programmatic_launch,
        num_warps=4,
        launch_pdl=programmatic_launch,
    )


@triton.jit
def _dequantise_kernel(
    matrix: tl.tuple,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    in_features: tl.tensor,
    FORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INPUTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """matrix: numbers, scales, zeros, table and order. A program has a run, or inputs of one
    group."""
    let_next_start(PDL)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(0) * INPUTS
    of_out = (matrix[0], n, rows, in_features, matrix[1], matrix[2], matrix[3])
    numbers = load_numbers(of_out, start, FORM, INPUTS, 1, False)
    s0, z0, s1, z1 = load_groups(of_out, start, FORM, INPUTS)
    to_out = (out_ptr + n.to(tl.int64)[:, None] * in_features, (n < rows)[:, None], matrix[4])
    wait(PDL)  # for who reads what lay here before
    if FORM[BITS] == 4:
        k = start + tl.arange(0, INPUTS // 2)
        _store(to_out, numbers & 0x0F, s0, z0, k, of_out, FORM)
        _store(to_out, numbers >> 4, s1, z1, k + INPUTS // 2, of_out, FORM)
    else:
        _store(to_out, numbers, s0, z0, start + tl.arange(0, INPUTS), of_out, FORM)


@triton.jit
def _store(
    to_out: tl.tuple,
    numbers: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    k: tl.tensor,
    of_out: tl.tuple,
    FORM: tl.constexpr,
) -> None:
    """Store the values of columns k. to_out: addresses of rows, which are real, order."""
    if FORM[BITS] == 0:
        values = from_fp8(numbers, FORM[NATIVE])
    elif FORM[TABLE]:
        values = tl.load(of_out[6] + numbers.to(tl.int32))
    elif FORM[ZERO] < 0:
        values = numbers.to(tl.float32) - zeros.to(tl.float32)
    else:
        values = numbers.to(tl.float32) - FORM[ZERO]
    values *= scales.to(tl.float32)
    live = to_out[1] & (k < of_out[3])[None, :]
    if FORM[ORDER]:
        k = tl.load(to_out[2] + k, mask=k < of_out[3], other=0)
    tl.store(to_out[0] + k[None, :], values.to(to_out[0].dtype.element_ty), mask=live)
