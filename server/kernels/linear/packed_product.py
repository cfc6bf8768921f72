"""`x W^T` of few rows and quantised W, whose time is that of reading W."""

from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.configs import PackedConfig
from loraplex.server.kernels.launch.launch import dot_precision, let_next_start, wait
from loraplex.server.kernels.linear.matrix import PackedMatrix
from loraplex.server.kernels.linear.packed import PackedBlocks, load_numbers, multiply_packed
from loraplex.server.kernels.linear.skinny import check_rows, shared_out, store_product

MAX_ROWS = 128
_LEAST_ROWS = 8  # of tensor cores


def packed_product(
    x: torch.Tensor,
    matrix: PackedMatrix,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: PackedConfig,
) -> None:
    """Multiply few rows by a quantised matrix: `out = x matrix^T + bias` for 1 to MAX_ROWS rows,
    summed in float32.

    x `[rows, in]`, out `[rows, out]`: any row stride; bias `[out]` or None; all of one dtype. One
    kernel; memory for sums where programs share input features. Products with one matrix must
    follow each other. Raises ValueError on a mismatch.
    """
    check_rows(x, matrix.shape, bias, out, MAX_ROWS)
    (rows, features), n = x.shape, matrix.shape[0]
    block_m = max(_LEAST_ROWS, int(triton.next_power_of_2(rows)))
    step = max(config.block_k, matrix.run) * config.parts
    splits, span = shared_out(features, step, config.splits)
    sums = x.new_empty(splits, n, block_m, dtype=torch.float32) if splits > 1 else out
    # It starts when the kernel before it has ended: its programs are so small that all would go
    # where that one leaves room, many to one processor and none to another.
    _packed_kernel[(triton.cdiv(n, config.block_n), splits)](
        (x, matrix.numbers, x if bias is None else bias, out, x.stride(0), out.stride(0)),
        matrix.tensors,
        rows,
        n,
        features,
        (sums, matrix.arrivals, splits, span),
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        EVEN=n % config.block_n == 0 and features % step == 0,
        BIAS=bias is not None,
        STAGES=config.num_stages,
        PRECISION=dot_precision(x.dtype),
        PARTS=config.parts,
        FORM=matrix.form(),
        SPLIT=splits > 1,
        PDL=config.programmatic_launch,
        num_warps=config.num_warps,
    )


@triton.jit(do_not_specialize=["rows"])
def _packed_kernel(
    product: tl.tuple,
    matrix: tl.tuple,
    rows: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    shares: tl.tuple,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    FORM: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """product: x, numbers, bias and out, strides of x and out. matrix: scales, zeros, table and
    order. shares: sums of each share; of each block of output features, how many shares have left
    theirs; shares, and input features of each."""
    let_next_start(PDL)
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    of_x = (product[0] + m * product[4], m < rows, in_features, matrix[3])
    of_out = (product[1], n, out_features, in_features, matrix[0], matrix[1], matrix[2])
    begin, end = 0, in_features
    if SPLIT:
        begin = tl.multiple_of(tl.program_id(1) * shares[3], 128)
        end = tl.minimum(begin + shares[3], in_features)
    first = load_numbers(of_out, begin, FORM, BLOCK_K, PARTS, EVEN)
    wait(PDL)
    acc = multiply_packed(
        first, of_out, of_x, begin, end,
        PackedBlocks(BLOCK_M, BLOCK_N, BLOCK_K, EVEN, STAGES, PRECISION, PARTS), FORM,
    )  # fmt: skip
    to_out = (product[3] + m * product[5], m < rows, product[2])
    store_shared(to_out, shares, acc, n, out_features, BIAS, SPLIT)


@triton.jit
def store_shared(
    to_out: tl.tuple,
    shares: tl.tuple,
    acc: tl.tensor,
    n: tl.tensor,
    end: tl.tensor,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """As `skinny.store_product`. SPLIT: acc is one of `shares` that the last of them adds up, as
    `_packed_kernel` has them."""
    if SPLIT:
        if _is_last(shares, acc, n, end):
            store_product(to_out, _sum_shares(shares, acc, n, end), n, end, BIAS)
    else:
        store_product(to_out, acc, n, end, BIAS)


@triton.jit
def _sums(
    shares: tl.tuple, number: tl.tensor, n: tl.tensor, end: tl.tensor, BLOCK_M: tl.constexpr
) -> Any:
    """Addresses `[outputs, rows]` of one share."""
    at = (number * end + n).to(tl.int64)
    return shares[0] + at[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]


@triton.jit
def _is_last(shares: tl.tuple, acc: tl.tensor, n: tl.tensor, end: tl.tensor) -> Any:
    """Leaves the sums of this share. Whether those of all others are there."""
    tl.store(_sums(shares, tl.program_id(1), n, end, acc.shape[1]), acc, mask=(n < end)[:, None])
    tl.debug_barrier()  # of all threads' stores, before one of them tells
    return tl.atomic_add(shares[1] + tl.program_id(0), 1, sem="acq_rel") == shares[2] - 1


@triton.jit
def _sum_shares(shares: tl.tuple, acc: tl.tensor, n: tl.tensor, end: tl.tensor) -> Any:
    """In the order of the shares, whichever came last."""
    acc = tl.zeros(acc.shape, tl.float32)
    for number in range(shares[2]):
        at = _sums(shares, number, n, end, acc.shape[1])
        acc += tl.load(at, mask=(n < end)[:, None], other=0.0, cache_modifier=".cg")
    tl.store(shares[1] + tl.program_id(0), 0)  # for the next product
    return acc
