"""`x W^T` of few rows and quantised W, whose time is that of reading W.

Where x has eight bits, too, W's rows are the tensor cores' rows and tokens their columns, so that
few tokens leave none of them idle. Tensor cores sum FP8 in fewer bits than float32: some hundred
input features at most.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.configs import PackedConfig
from loraplex.server.kernels.launch.launch import dot_precision, follow, let_next_start, wait
from loraplex.server.kernels.linear.matrix import PackedMatrix
from loraplex.server.kernels.linear.packed import (
    PackedBlocks,
    from_fp8,
    load_numbers,
    multiply_packed,
)
from loraplex.server.kernels.linear.row_form import FP8, INT8, RoundedRows
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


# Rows of a program at most: with more, sums take registers that loads need.
_ROWS_OF_PROGRAM = 128
# Input features that tensor cores sum before float32 does.
_SUMMED = 256


def rounded_product(
    x: RoundedRows,
    matrix: PackedMatrix,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: PackedConfig,
) -> None:
    """Multiply rounded rows by a matrix of their kind: `out = (x matrix^T) + bias`, scales
    included, summed in float32.

    x: of any number of rows, in groups of one row or of the matrix's. out `[rows, out]`, of any row
    stride; bias `[out]` or None. One kernel; memory for sums where programs share input features.
    Products with one matrix must follow each other. Raises ValueError on a mismatch.
    """
    (rows, features), n = x.numbers.shape, matrix.shape[0]
    _check(x, matrix, out)
    whole = x.numbers.dtype == INT8
    native = whole or matrix.form().native
    kind = INT8 if whole else FP8 if native else torch.uint8
    block_m = min(_ROWS_OF_PROGRAM, max(16, int(triton.next_power_of_2(rows))))
    block_k = min(config.block_k, matrix.group or config.block_k)
    row_blocks = triton.cdiv(rows, block_m)
    # Programs that share input features meet at the matrix's counts, of which rows have one set.
    most = config.splits if row_blocks == 1 else 1
    splits, span = shared_out(features, block_k, most)
    sums = out.new_empty(splits, n, block_m, dtype=torch.float32) if splits > 1 else out
    _rounded_kernel[(triton.cdiv(n, config.block_n), splits, row_blocks)](
        (x.numbers.view(kind), x.scales, matrix.numbers.view(kind), matrix.scales, bias, out),
        rows,
        n,
        features,
        out.stride(0),
        (sums, matrix.arrivals, splits, span),
        GROUP=matrix.group,
        ROWS=matrix.rows,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        EVEN=n % config.block_n == 0 and features % block_k == 0,
        SUMMED=min(block_k, _SUMMED),
        STAGES=config.num_stages,
        NATIVE=native,
        SPLIT=splits > 1,
        BIAS=bias is not None,
        PDL=config.programmatic_launch,
        num_warps=config.num_warps,
        launch_pdl=config.programmatic_launch,
    )


def _check(x: RoundedRows, matrix: PackedMatrix, out: torch.Tensor) -> None:
    rows, features = x.numbers.shape
    fits = matrix.rounded_dtype == x.numbers.dtype and out.stride(1) == 1
    if not fits or (rows, *matrix.shape) != (*out.shape, features):
        shapes = [list(of) for of in (x.numbers.shape, matrix.shape, out.shape)]
        raise ValueError("rounded x {}, matrix {} and out {} do not fit".format(*shapes))
    groups = triton.cdiv(features, matrix.group) if matrix.group else 1
    if x.scales.shape != (groups, rows):
        raise ValueError(f"scales of x are {list(x.scales.shape)}, not {[groups, rows]}")


@triton.jit(do_not_specialize=["rows"])
def _rounded_kernel(
    product: tl.tuple,
    rows: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    stride_out: tl.tensor,
    shares: tl.tuple,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    SUMMED: tl.constexpr,
    STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """product: numbers and scales of x, of W; bias and out. shares: as of `_packed_kernel`. A step
    is of one group."""
    x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, bias_ptr, out_ptr = product
    follow(PDL)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row, is_out = m < rows, n < out_features
    begin, end = 0, in_features
    if SPLIT:
        begin = tl.multiple_of(tl.program_id(1) * shares[3], 16)
        end = tl.minimum(begin + shares[3], in_features)
    w_ptr += n.to(tl.int64)[:, None] * in_features + k[None, :]
    x_ptr += m.to(tl.int64)[None, :] * in_features + k[:, None]
    w_scales_ptr += n // ROWS * (tl.cdiv(in_features, GROUP) if GROUP else 1)
    WHOLE: tl.constexpr = w_ptr.dtype.element_ty == tl.int8
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if WHOLE and GROUP == 0 else tl.float32)
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        if EVEN:
            w = tl.load(w_ptr + start, eviction_policy="evict_first")
            x = tl.load(x_ptr + start, mask=is_row[None, :], other=0.0)
        else:
            inside = start + k < end
            w = tl.load(w_ptr + start, mask=is_out[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_ptr + start, mask=is_row[None, :] & inside[:, None], other=0.0)
        if not NATIVE:
            w, x = from_fp8(w, False), from_fp8(x, False)
        if GROUP == 0 and WHOLE:
            acc = tl.dot(w, x, acc, out_dtype=tl.int32)
        elif GROUP == 0:
            acc = tl.dot(w, x, acc, max_num_imprecise_acc=SUMMED)
        else:
            group = start // GROUP
            of_w = tl.load(w_scales_ptr + group, mask=is_out, other=0.0)
            of_x = tl.load(x_scales_ptr + group * rows + m, mask=is_row, other=0.0)
            part = tl.dot(w, x, out_dtype=tl.int32 if WHOLE else tl.float32)
            acc += part.to(tl.float32) * of_w[:, None] * of_x[None, :]
    if GROUP == 0:
        of_w = tl.load(w_scales_ptr, mask=is_out, other=0.0)
        of_x = tl.load(x_scales_ptr + m, mask=is_row, other=0.0)
        acc = acc.to(tl.float32) * of_w[:, None] * of_x[None, :]
    to_out = (out_ptr + m.to(tl.int64) * stride_out, is_row, bias_ptr)
    store_shared(to_out, shares, acc, n, out_features, BIAS, SPLIT)
