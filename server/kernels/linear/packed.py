"""Products of few rows with quantised weights, whose numbers become x's dtype in registers.

Numbers without their scales are exact there, and the scales of a group are applied to the group's
sum in float32. Of codes of 4 bits two lie in a byte, half a run apart: the halves of a run are
multiplied one after the other, since to bring the codes in line would take longer.
"""

from typing import Any

import triton
import triton.language as tl

# Places of `matrix.Form`.
BITS, GROUP, ROWS, RUN, ZERO, TABLE, ORDER, NATIVE, SPLIT = (tl.constexpr(i) for i in range(9))
# FP8 (E4M3) has the exponent's bias 7, float16 15.
_FP8_TO_HALF = tl.constexpr(256.0)
# What `SPLIT_CODES` adds to a code.
_OFFSET = tl.constexpr(128.0)


# `of_out`: address of the numbers, which of their rows, where these end, input features; addresses
# of scales, zeros and table. `of_x`: as of `skinny.multiply`.


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
    acc = tl.zeros((blocks.outputs, blocks.rows), tl.float32)
    acc = _add_step(acc, first, of_out, of_x, begin, blocks, FORM, inputs)
    for start in tl.range(begin + inputs, end, inputs, num_stages=blocks.stages):
        numbers = load_numbers(of_out, start, FORM, blocks.inputs, blocks.even)
        acc = _add_step(acc, numbers, of_out, of_x, start, blocks, FORM, inputs)
    if FORM[GROUP] == 0:
        acc *= of_group(of_out, of_out[4], 0, FORM)[:, None]
    return acc


@triton.constexpr_function
def step_inputs(most: int, form: Any) -> int:
    """Input features of a step: a run of 4-bit codes; else at most so many, and of one group."""
    group = form[1]
    inputs: int = most if group == 0 else min(most, group)
    return int(form[3]) if form[0] == 4 else inputs


@triton.jit
def load_numbers(
    of_out: tl.tuple, start: tl.tensor, FORM: tl.constexpr, INPUTS: tl.constexpr,
    EVEN: tl.constexpr,
) -> Any:  # fmt: skip
    """uint8 `[outputs, bytes of a step]` from input feature `start` on. INPUTS: the most of a step.
    EVEN: all are real."""
    n, in_features = of_out[1], of_out[3]
    inputs: tl.constexpr = step_inputs(INPUTS, FORM)
    if FORM[BITS] == 4:
        at, width = start // 2 + tl.arange(0, inputs // 2), in_features // 2
    else:
        at, width = start + tl.arange(0, inputs), in_features
    address = of_out[0] + n.to(tl.int64)[:, None] * width + at[None, :]
    if EVEN:
        return tl.load(address)
    else:
        return tl.load(address, mask=(n < of_out[2])[:, None] & (at < width)[None, :], other=0)


@triton.jit
def _add_step(
    acc: tl.tensor,
    numbers: tl.tensor,
    of_out: tl.tuple,
    of_x: tl.tuple,
    start: tl.tensor,
    blocks: tl.tuple,
    FORM: tl.constexpr,
    INPUTS: tl.constexpr,
) -> Any:
    """`acc + W x^T` of a step."""
    dtype: tl.constexpr = of_x[0].dtype.element_ty
    at_once: tl.constexpr = FORM[NATIVE] and dtype == tl.bfloat16
    if FORM[BITS] == 4:
        j = tl.arange(0, INPUTS // 2)
        if at_once:
            first, second = _split(numbers, of_out, start, FORM, INPUTS)
        else:
            first = _from_codes(numbers & 0x0F, of_out, start, FORM, dtype)
            second = _from_codes(numbers >> 4, of_out, start + INPUTS // 2, FORM, dtype)
            j = place_in_run(j, FORM)
        acc = _add_dot(acc, first, of_out, of_x, start, j, blocks, FORM)
        acc = _add_dot(acc, second, of_out, of_x, start + INPUTS // 2, j, blocks, FORM)
    else:
        if FORM[BITS] == 8:
            weights = _from_codes(numbers, of_out, start, FORM, dtype)
        else:
            weights = from_fp8(numbers, FORM[NATIVE]).to(dtype)
        acc = _add_dot(acc, weights, of_out, of_x, start, tl.arange(0, INPUTS), blocks, FORM)
    return acc


@triton.jit
def _add_dot(
    acc: tl.tensor,
    weights: tl.tensor,
    of_out: tl.tuple,
    of_x: tl.tuple,
    start: tl.tensor,
    j: tl.tensor,
    blocks: tl.tuple,
    FORM: tl.constexpr,
) -> Any:
    """`acc + scale * weights x^T`. j: the inputs, behind start, of the weights' columns."""
    x = tl.trans(load_inputs(of_x, start + j, FORM, blocks.even))
    if FORM[GROUP] == 0:
        return tl.dot(weights, x, acc, input_precision=blocks.precision)
    else:
        part = tl.dot(weights, x, input_precision=blocks.precision)
        return acc + part * of_group(of_out, of_out[4], start, FORM)[:, None]


@triton.jit
def place_in_run(j: tl.tensor, FORM: tl.constexpr) -> Any:
    """Where byte j of a run's half lies, and what lies there: middle ones of four change places,
    but for codes of a table."""
    if FORM[TABLE]:
        return j
    else:
        return (j & ~3) | ((j & 1) << 1) | ((j >> 1) & 1)


@triton.jit
def load_inputs(of_x: tl.tuple, k: tl.tensor, FORM: tl.constexpr, EVEN: tl.constexpr) -> Any:
    """`[rows, features]`, of the columns k of W. EVEN: all are real."""
    known = of_x[1][:, None]
    if not EVEN:
        known = known & (k < of_x[2])[None, :]
    if FORM[ORDER]:
        k = tl.load(of_x[3] + k, mask=k < of_x[2], other=0)
    return tl.load(of_x[0][:, None] + k[None, :], mask=known, other=0.0)


@triton.jit
def _split(
    numbers: tl.tensor, of_out: tl.tuple, start: tl.tensor, FORM: tl.constexpr, INPUTS: tl.constexpr
) -> Any:
    """Bfloat16 `code - zero`, or `table[code]`, of a run's first half and of its second."""
    first = _zeros_of_half(of_out, start, FORM, numbers)
    second = _zeros_of_half(of_out, start + INPUTS // 2, FORM, numbers)
    return tl.inline_asm_elementwise(
        FORM[SPLIT], "=r,=r,=r,=r,r,r,r,r,r", [numbers, first, second],
        dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _zeros_of_half(
    of_out: tl.tuple, start: tl.tensor, FORM: tl.constexpr, numbers: tl.tensor
) -> Any:
    """What is added to 128 + code."""
    if FORM[ZERO] < 0:
        zeros = -_OFFSET - of_group(of_out, of_out[5], start, FORM)
        return tl.broadcast_to(zeros.to(tl.bfloat16)[:, None], numbers.shape)
    else:
        return tl.full(numbers.shape, -_OFFSET - FORM[ZERO], tl.bfloat16)


@triton.jit
def _from_codes(
    codes: tl.tensor, of_out: tl.tuple, start: tl.tensor, FORM: tl.constexpr, dtype: tl.constexpr
) -> Any:
    if FORM[TABLE]:
        return tl.load(of_out[6] + codes.to(tl.int32)).to(dtype)
    elif FORM[ZERO] < 0:
        zeros = of_group(of_out, of_out[5], start, FORM)
        return (codes.to(tl.float32) - zeros[:, None]).to(dtype)
    else:
        return (codes.to(tl.float32) - FORM[ZERO]).to(dtype)


@triton.jit
def from_fp8(numbers: tl.tensor, NATIVE: tl.constexpr) -> Any:
    """Of bytes. NATIVE: the device converts them itself."""
    if NATIVE:
        return numbers.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # The exponent and mantissa of E4M3 are those of a float16 that is 256 times smaller.
        wide = numbers.to(tl.int16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * _FP8_TO_HALF


@triton.jit
def of_group(of_out: tl.tuple, ptr: tl.tensor, start: tl.tensor, FORM: tl.constexpr) -> Any:
    """Float32 `[outputs]`: scales or zeros of the group that input feature `start` is of."""
    n = of_out[1]
    at = ptr + (n // FORM[ROWS]).to(tl.int64)
    if FORM[GROUP] > 0:
        groups = (of_out[3] + FORM[GROUP] - 1) // FORM[GROUP]
        at = ptr + (n // FORM[ROWS]).to(tl.int64) * groups + start // FORM[GROUP]
    return tl.load(at, mask=n < of_out[2], other=0).to(tl.float32)
