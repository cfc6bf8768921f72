"""`x W^T` of few rows, whose time is that of reading W; and of any number of rows by one kernel of
one shape.

A library's kernel begins to read W when the kernel before it has ended, and between two of a step
the memory idles. This one is launched while that one drains (programmatic dependent launch), asks
for the first weights of every program, and then waits for x.

A library takes another kernel for another number of rows, and the bits of a row's sums differ with
its neighbours. In the kernel of one shape each sum goes through the input features in steps of one
size, by the same instructions, in a tile of as many rows, however many of them are real.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.configs import SkinnyConfig
from loraplex.server.kernels.launch.launch import dot_precision, let_next_start, wait

MAX_ROWS = 32

_ROWS, _OUTPUTS, _INPUTS, _WARPS = 64, 128, 128, 4


def skinny_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: SkinnyConfig,
) -> None:
    """Multiply few rows by a matrix: `out = x weight^T + bias` for 1 to MAX_ROWS rows, summed in
    float32.

    x `[rows, in]`, out `[rows, out]`: any row stride; weight `[out, in]`, contiguous, which no
    kernel writes that may still run; bias `[out]` or None; all of one dtype. One kernel, no
    allocation. Raises ValueError on a mismatch.
    """
    check_operands(x, weight, bias, out, MAX_ROWS)
    (rows, features), n = x.shape, len(weight)
    _skinny_kernel[(triton.cdiv(n, config.block_n),)](
        operands(x, weight, bias, out),
        rows,
        n,
        features,
        BLOCK_M=rows_at_once(rows),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        EVEN=n % config.block_n == 0 and features % config.block_k == 0,
        BIAS=bias is not None,
        STAGES=config.num_stages,
        PRECISION=dot_precision(x.dtype),
        PDL=config.programmatic_launch,
        num_warps=config.num_warps,
        launch_pdl=config.programmatic_launch,
    )


def rows_at_once(rows: int) -> int:
    """Rows of a program: all, as the tensor cores take them; one row is multiplied without them."""
    return 1 if rows == 1 else max(8, triton.next_power_of_2(rows))


def operands(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """Arguments of a product's kernel: its tensors, and the strides of x's and out's rows.

    The weight stands in place of a bias that is not there.
    """
    return x, weight, weight if bias is None else bias, out, x.stride(0), out.stride(0)


def check_operands(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    most_rows: int,
) -> None:
    """Check the operands of a product with a plain matrix. Raises ValueError."""
    check_rows(x, weight.shape, bias, out, most_rows)
    if not weight.is_contiguous():
        raise ValueError("weight must be contiguous")
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype}, weight {weight.dtype}")


def check_rows(
    x: torch.Tensor,
    weight: torch.Size,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    most_rows: int,
) -> None:
    """Check that the operands of a product fit. weight: its shape. Raises ValueError where the
    others do not fit it, and each other.
    """
    if not 1 <= len(x) <= most_rows:
        raise ValueError(f"{len(x)} rows, not 1 to {most_rows}")
    if x.dim() != 2 or (len(x), *weight) != (*out.shape, x.shape[1]):
        shapes = [list(of) for of in (x.shape, weight, out.shape)]
        raise ValueError("x {}, weight {} and out {} do not fit".format(*shapes))
    if x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("rows of x and of out must be contiguous")
    if out.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"x is {x.dtype}, out {out.dtype}")
    if bias is not None and (bias.shape != weight[:1] or bias.dtype != x.dtype):
        raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}, for {weight[0]} features")


def shared_out(features: int, step: int, most: int) -> tuple[int, int]:
    """Among how many programs, at most so many, input features are shared out, and how many of
    them, of whole steps, each but the last has."""
    steps = triton.cdiv(features, step)
    of_each = triton.cdiv(steps, most)
    return triton.cdiv(steps, of_each), of_each * step


@triton.jit(do_not_specialize=["rows"])
def _skinny_kernel(
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
    PDL: tl.constexpr,
) -> None:
    """product: as of `operands`."""
    let_next_start(PDL)
    x_ptr, weight_ptr, bias_ptr, out_ptr, stride_x, stride_out = product
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    of_x = (x_ptr + m * stride_x, m < rows, in_features)
    of_out = (weight_ptr, n, out_features, in_features)
    first = load_weights(of_out, tl.arange(0, BLOCK_K), EVEN)
    wait(PDL)
    acc = multiply(
        first, of_out, of_x, 0, in_features,
        Blocks(BLOCK_M, BLOCK_N, BLOCK_K, EVEN, STAGES, PRECISION),
    )  # fmt: skip
    store_product((out_ptr + m * stride_out, m < rows, bias_ptr), acc, n, out_features, BIAS)


# Some output features of a product of few rows. `of_out`: address of the weights, which of their
# rows, where these end, input features. `of_x`: addresses of the rows, which are real, input
# features.


class Blocks(NamedTuple):
    """Form of the product kernel. Constants: rows, output and input features of a step; whether all
    output and input features that are read are real; stages of the loop, precision of float32.
    """

    rows: Any
    outputs: Any
    inputs: Any
    even: Any
    stages: Any
    precision: Any


@triton.jit
def load_weights(of_out: tl.tuple, k: tl.tensor, EVEN: tl.constexpr) -> Any:
    """`[BLOCK_N, BLOCK_K]`. EVEN: all are real."""
    weight_ptr, n, end, in_features = of_out
    at = weight_ptr + n.to(tl.int64)[:, None] * in_features + k[None, :]
    if EVEN:
        return tl.load(at)
    else:
        live = (n < end)[:, None] & (k < in_features)[None, :]
        return tl.load(at, mask=live, other=0.0)


@triton.jit
def multiply(
    first: tl.tensor,
    of_out: tl.tuple,
    of_x: tl.tuple,
    begin: tl.tensor,
    end: tl.tensor,
    blocks: Blocks,
) -> Any:
    """`W x^T` over input features begin .. end, float32 `[outputs, rows]`. first: weights of the
    first step, asked for before x was there."""
    k = begin + tl.arange(0, blocks.inputs)
    if blocks.rows == 1:
        # Multiply and add in registers: a tensor core would idle on 7 of 8 rows.
        parts = tl.zeros((blocks.outputs, blocks.inputs), tl.float32)
        for step in tl.range(blocks.inputs, end - begin, blocks.inputs, num_stages=blocks.stages):
            x = _load_rows(of_x, step + k, blocks.even).to(tl.float32)
            parts += load_weights(of_out, step + k, blocks.even).to(tl.float32) * x
        parts += first.to(tl.float32) * _load_rows(of_x, k, blocks.even).to(tl.float32)
        return tl.sum(parts, axis=1)[:, None]
    else:
        acc = tl.zeros((blocks.outputs, blocks.rows), tl.float32)
        for step in tl.range(blocks.inputs, end - begin, blocks.inputs, num_stages=blocks.stages):
            x = _load_rows(of_x, step + k, blocks.even)
            weights = load_weights(of_out, step + k, blocks.even)
            acc = tl.dot(weights, tl.trans(x), acc, input_precision=blocks.precision)
        x = _load_rows(of_x, k, blocks.even)
        return tl.dot(first, tl.trans(x), acc, input_precision=blocks.precision)


@triton.jit
def _load_rows(of_x: tl.tuple, k: tl.tensor, EVEN: tl.constexpr) -> Any:
    """`[BLOCK_M, BLOCK_K]`."""
    row_ptr, live, in_features = of_x
    known = live[:, None]
    if not EVEN:
        known = known & (k < in_features)[None, :]
    return tl.load(row_ptr[:, None] + k[None, :], mask=known, other=0.0)


@triton.jit
def store_product(
    to_out: tl.tuple, acc: tl.tensor, n: tl.tensor, end: tl.tensor, BIAS: tl.constexpr
) -> None:
    """acc: float32 `[BLOCK_N, BLOCK_M]`. to_out: addresses of the rows, which are real, bias."""
    row_ptr, live, bias_ptr = to_out
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < end, other=0.0).to(tl.float32)[:, None]
    at = row_ptr[None, :] + n[:, None]
    tl.store(at, acc.to(row_ptr.dtype.element_ty), mask=live[None, :] & (n < end)[:, None])


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
