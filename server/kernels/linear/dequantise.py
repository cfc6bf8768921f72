"""A quantised matrix written out in floating point, for products of many rows."""

from typing import Any

import torch
import triton
import triton.language as tl

from server.kernels.launch.launch import let_next_start, wait
from server.kernels.linear.matrix import PackedMatrix
from server.kernels.linear.packed import (
    BITS,
    GROUP,
    NATIVE,
    ORDER,
    ROWS,
    RUN,
    TABLE,
    ZERO,
    from_fp8,
    place_in_run,
)

_BLOCK_N, _BLOCK_K = 16, 256


def dequantise(matrix: PackedMatrix, out: torch.Tensor, *, programmatic_launch: bool) -> None:
    """out: `[out, in]` of any dtype, contiguous; rounded once. One kernel. Raises ValueError on a
    mismatch."""
    if out.shape != matrix.shape or not out.is_contiguous():
        raise ValueError(f"out is {list(out.shape)}, the matrix {list(matrix.shape)}")
    rows, features = out.shape
    grid = (triton.cdiv(features, _BLOCK_K), triton.cdiv(rows, _BLOCK_N))
    scales, zeros, table, order = matrix.tensors
    _dequantise_kernel[grid](
        (matrix.numbers, scales, zeros, table, order),
        out,
        rows,
        features,
        FORM=matrix.form(),
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
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
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """matrix: numbers, scales, zeros, table and order."""
    let_next_start(PDL)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = (n < rows)[:, None] & (k < in_features)[None, :]
    values = _values(matrix, n, k, live, in_features, FORM)
    if FORM[ORDER]:
        k = tl.load(matrix[4] + k, mask=k < in_features, other=0)
    wait(PDL)  # for who reads what lay here before
    at = out_ptr + n.to(tl.int64)[:, None] * in_features + k[None, :]
    tl.store(at, values.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _values(
    matrix: tl.tuple, n: tl.tensor, k: tl.tensor, live: tl.tensor, in_features: tl.tensor,
    FORM: tl.constexpr,
) -> Any:  # fmt: skip
    """Float32 `[rows, features]`."""
    row = n.to(tl.int64)[:, None]
    if FORM[BITS] == 4:
        half: tl.constexpr = FORM[RUN] // 2
        at = k // FORM[RUN] * half + place_in_run(k % half, FORM)
        pair = tl.load(matrix[0] + row * (in_features // 2) + at[None, :], mask=live, other=0)
        numbers = (pair >> (k // half % 2 * 4).to(tl.uint8)[None, :]) & 0x0F
    else:
        numbers = tl.load(matrix[0] + row * in_features + k[None, :], mask=live, other=0)
    groups, group = 1, k * 0
    if FORM[GROUP] > 0:
        groups, group = (in_features + FORM[GROUP] - 1) // FORM[GROUP], k // FORM[GROUP]
    at = (row // FORM[ROWS]) * groups + group[None, :]
    if FORM[BITS] == 0:
        values = from_fp8(numbers, FORM[NATIVE])
    elif FORM[TABLE]:
        values = tl.load(matrix[3] + numbers.to(tl.int32))
    elif FORM[ZERO] < 0:
        zeros = tl.load(matrix[2] + at, mask=live, other=0).to(tl.float32)
        values = numbers.to(tl.float32) - zeros
    else:
        values = numbers.to(tl.float32) - FORM[ZERO]
    return values * tl.load(matrix[1] + at, mask=live, other=0.0).to(tl.float32)
