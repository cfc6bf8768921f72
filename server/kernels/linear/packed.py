"""Products of few rows with quantised weights, whose numbers become x's dtype in registers; for
many rows the matrix is written out in floating point.

Numbers without their scales are exact there, and the scales of a group are applied to the group's
sum in float32. Of codes of 4 bits two lie in a byte, half a run apart: the halves of a run are
multiplied one after the other, since to bring the codes in line would take longer.

The warps of a program share its input features out (`blocks.parts`): with few output features a
processor would else have too few warps to hide how long a step takes one of them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import let_next_start, wait
from loraplex.server.kernels.linear.matrix import PackedMatrix

# Places of `matrix.Form`.
BITS, GROUP, ROWS, RUN, ZERO, TABLE, ORDER, NATIVE, SPLIT = (tl.constexpr(i) for i in range(9))
# FP8 (E4M3) has the exponent's bias 7, float16 15.
_FP8_TO_HALF = tl.constexpr(256.0)

# Output features of a program, and the most input features.
_BLOCK_N, _BLOCK_K = 32, 256


class PackedBlocks(NamedTuple):
    """Constants of the kernel for quantised weights: those of `skinny.Blocks`, and parts. parts: in
    so many the warps of a program share its input features out.
    """

    rows: Any
    outputs: Any
    inputs: Any
    even: Any
    stages: Any
    precision: Any
    parts: Any


# `of_out`: address of the numbers, which of their rows, where these end, input features; addresses
# of scales, zeros and table. `of_x`: as of `skinny.multiply`, and the address of the input that
# each column of W stands for. With several parts tensors have one dimension more, in front; what
# has none is broadcast.


@triton.jit
def multiply_packed(
    first: tl.tensor,
    of_out: tl.tuple,
    of_x: tl.tuple,
    begin: tl.tensor,
    end: tl.tensor,
    blocks: tl.tuple,
    FORM: tl.constexpr,
) -> Any:
    """As `skinny.multiply`. first: of `load_numbers`."""
    inputs: tl.constexpr = step_inputs(blocks.inputs, FORM)
    step: tl.constexpr = inputs * blocks.parts
    if blocks.parts == 1:
        acc = tl.zeros((blocks.outputs, blocks.rows), tl.float32)
    else:
        acc = tl.zeros((blocks.parts, blocks.outputs, blocks.rows), tl.float32)
    at = _of_parts(begin, inputs, blocks.parts)
    groups = load_groups(of_out, at, FORM, inputs)
    # Asked for a step ahead: they are too few bytes for the loop's own copies.
    s0, z0, s1, z1 = load_groups(of_out, at + step, FORM, inputs)
    acc = _add_step(acc, first, groups, of_out, of_x, at, blocks, FORM, inputs)
    for start in tl.range(begin + step, end, step, num_stages=blocks.stages):
        numbers = load_numbers(of_out, start, FORM, blocks.inputs, blocks.parts, blocks.even)
        at = _of_parts(start, inputs, blocks.parts)
        groups = s0, z0, s1, z1
        s0, z0, s1, z1 = load_groups(of_out, at + step, FORM, inputs)
        acc = _add_step(acc, numbers, groups, of_out, of_x, at, blocks, FORM, inputs)
    if blocks.parts > 1:
        acc = tl.sum(acc, axis=0)
    if FORM[GROUP] == 0:
        acc *= _of_group(of_out, of_out[4], 0, FORM).to(tl.float32)
    return acc


@triton.constexpr_function
def step_inputs(most: int, form: Any) -> int:
    """Input features of a part's step: a run of 4-bit codes; else at most so many, and of one
    group."""
    group = form[1]
    inputs: int = most if group == 0 else min(most, group)
    return int(form[3]) if form[0] == 4 else inputs


@triton.jit
def _of_parts(start: tl.tensor, INPUTS: tl.constexpr, PARTS: tl.constexpr) -> Any:
    """Where each part's step begins, if the first one's does at `start`."""
    if PARTS == 1:
        return start
    else:
        return start + (tl.arange(0, PARTS) * INPUTS)[:, None, None]


@triton.jit
def load_numbers(
    of_out: tl.tuple, start: tl.tensor, FORM: tl.constexpr, INPUTS: tl.constexpr,
    PARTS: tl.constexpr, EVEN: tl.constexpr,
) -> Any:  # fmt: skip
    """uint8 `[outputs, bytes of a part's step]`, from input feature `start` on. INPUTS: the most of
    a step. EVEN: all are real."""
    n, in_features = of_out[1], of_out[3]
    inputs: tl.constexpr = step_inputs(INPUTS, FORM)
    at = _of_parts(start, inputs, PARTS)
    if FORM[BITS] == 4:
        at, width = at // 2 + tl.arange(0, inputs // 2), in_features // 2
    else:
        at, width = at + tl.arange(0, inputs), in_features
    address = of_out[0] + (n.to(tl.int64)[:, None] * width + at)
    if EVEN:
        return tl.load(address)
    else:
        return tl.load(address, mask=(n < of_out[2])[:, None] & (at < width), other=0)


@triton.jit
def _add_step(
    acc: tl.tensor,
    numbers: tl.tensor,
    groups: tl.tuple,
    of_out: tl.tuple,
    of_x: tl.tuple,
    start: tl.tensor,
    blocks: tl.tuple,
    FORM: tl.constexpr,
    INPUTS: tl.constexpr,
) -> Any:
    """`acc + W x^T` of a step. groups: of `load_groups`."""
    dtype: tl.constexpr = of_x[0].dtype.element_ty
    s0, z0, s1, z1 = groups
    part, sums = _begin(acc, FORM)
    if FORM[BITS] == 4:
        if FORM[NATIVE] and dtype == tl.bfloat16:
            first, second = _split(numbers, FORM)
        else:
            first = _from_codes(numbers & 0x0F, of_out, FORM, dtype)
            second = _from_codes(numbers >> 4, of_out, FORM, dtype)
        k = start + tl.arange(0, INPUTS // 2)
        part, sums = _add_dot(part, sums, first, numbers, of_x, k, blocks, FORM)
        if FORM[GROUP] > 0 and FORM[GROUP] < INPUTS:
            acc = _end(acc, part, sums, s0, z0, FORM)
            part, sums = _begin(acc, FORM)
        k += INPUTS // 2
        part, sums = _add_dot(part, sums, second, numbers, of_x, k, blocks, FORM)
    else:
        if FORM[BITS] == 8:
            weights = _from_codes(numbers, of_out, FORM, dtype)
        else:
            weights = from_fp8(numbers, FORM[NATIVE]).to(dtype)
        k = start + tl.arange(0, INPUTS)
        part, sums = _add_dot(part, sums, weights, numbers, of_x, k, blocks, FORM)
    return _end(acc, part, sums, s1, z1, FORM)


# Of a group: products of its numbers, and sums of x where it has a zero of its own.


@triton.jit
def _begin(acc: tl.tensor, FORM: tl.constexpr) -> Any:
    """acc: products of all groups before."""
    nothing = tl.zeros(acc.shape, tl.float32)
    if FORM[GROUP] == 0 and FORM[ZERO] >= 0:
        return acc, nothing
    else:
        return nothing, nothing


@triton.jit
def _add_dot(
    part: tl.tensor,
    sums: tl.tensor,
    weights: tl.tensor,
    numbers: tl.tensor,
    of_x: tl.tuple,
    k: tl.tensor,
    blocks: tl.tuple,
    FORM: tl.constexpr,
) -> Any:
    """numbers: which the weights were. k: the inputs of the weights' columns."""
    x = _load_inputs(of_x, k, FORM, blocks.even)
    x = tl.trans(x) if blocks.parts == 1 else tl.permute(x, (0, 2, 1))
    part = tl.dot(weights, x, part, input_precision=blocks.precision)
    if FORM[ZERO] < 0:  # tensor cores are free for it
        ones = _ones(numbers, weights.dtype, FORM)
        sums = tl.dot(ones, x, sums, input_precision=blocks.precision)
    return part, sums


@triton.jit
def _end(
    acc: tl.tensor,
    part: tl.tensor,
    sums: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    FORM: tl.constexpr,
) -> Any:
    """acc with the group, `scale * (products - zero * sums)`."""
    if FORM[ZERO] < 0:
        part += sums * (_middle(FORM) - zeros.to(tl.float32))
    if FORM[GROUP] > 0:
        part *= scales.to(tl.float32)
    if FORM[GROUP] == 0 and FORM[ZERO] >= 0:
        return part
    else:
        return acc + part


@triton.constexpr_function
def _middle(form: Any) -> float:
    """The number that is taken from each code."""
    return float(1 << form[0] - 1 if form[4] < 0 else form[4])


@triton.jit
def _load_inputs(of_x: tl.tuple, k: tl.tensor, FORM: tl.constexpr, EVEN: tl.constexpr) -> Any:
    """`[rows, features]`, of the columns k of W. EVEN: all are real."""
    known = of_x[1][:, None]
    if not EVEN:
        known = known & (k < of_x[2])
    if FORM[ORDER]:
        k = tl.load(of_x[3] + k, mask=k < of_x[2], other=0)
    return tl.load(of_x[0][:, None] + k, mask=known, other=0.0)


@triton.jit
def _split(numbers: tl.tensor, FORM: tl.constexpr) -> Any:
    """Bfloat16 `code - middle`, or `table[code]`, of a run's first half and of its second."""
    return tl.inline_asm_elementwise(
        FORM[SPLIT], "=r,=r,=r,=r,r", [numbers],
        dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _ones(numbers: tl.tensor, dtype: tl.constexpr, FORM: tl.constexpr) -> Any:
    """As many. From the numbers, so that the registers of x serve both products."""
    if FORM[NATIVE] and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, 0x3f803f80; mov.b32 $1, 0x3f803f80;", "=r,=r,r", [numbers],
            dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return tl.full(numbers.shape, 1.0, dtype)


@triton.jit
def _from_codes(codes: tl.tensor, of_out: tl.tuple, FORM: tl.constexpr, dtype: tl.constexpr) -> Any:
    if FORM[TABLE]:
        return tl.load(of_out[6] + codes.to(tl.int32)).to(dtype)
    else:
        return (codes.to(tl.float32) - _middle(FORM)).to(dtype)


@triton.jit
def from_fp8(numbers: tl.tensor, NATIVE: tl.constexpr) -> Any:
    """Floats of E4M3 bytes, as float32. NATIVE: the device converts them itself."""
    if NATIVE:
        return numbers.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # The exponent and mantissa of E4M3 are those of a float16 that is 256 times smaller.
        wide = numbers.to(tl.int16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * _FP8_TO_HALF


@triton.jit
def load_groups(
    of_out: tl.tuple, start: tl.tensor, FORM: tl.constexpr, INPUTS: tl.constexpr
) -> Any:
    """Scales and zeros of a step's first half, and of its second, as they are stored."""
    s0 = _of_group(of_out, of_out[4], start, FORM)
    z0 = s0
    if FORM[ZERO] < 0:
        z0 = _of_group(of_out, of_out[5], start, FORM)
    s1, z1 = s0, z0
    if FORM[GROUP] > 0 and FORM[GROUP] < INPUTS:
        s1 = _of_group(of_out, of_out[4], start + INPUTS // 2, FORM)
        z1 = s1
        if FORM[ZERO] < 0:
            z1 = _of_group(of_out, of_out[5], start + INPUTS // 2, FORM)
    return s0, z0, s1, z1


@triton.jit
def _of_group(of_out: tl.tuple, ptr: tl.tensor, start: tl.tensor, FORM: tl.constexpr) -> Any:
    """`[outputs, 1]`: scales or zeros of the group that input feature `start` is of."""
    n, in_features = of_out[1], of_out[3]
    at = (n // FORM[ROWS]).to(tl.int64)[:, None]
    if FORM[GROUP] > 0:
        groups = (in_features + FORM[GROUP] - 1) // FORM[GROUP]
        # Behind the last one is the last once more.
        at = at * groups + tl.minimum(start // FORM[GROUP], groups - 1)
    return tl.load(ptr + at, mask=(n < of_out[2])[:, None], other=0)


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
