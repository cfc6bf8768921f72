"""Rows rounded to eight bits: beside what a norm writes, or in a kernel of their own."""

from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import follow
from loraplex.server.kernels.linear.row_form import (
    FP8_MOST,
    INT8_MOST,
    RoundedRows,
    RowForm,
    allocate_rows,
)

_FP8_MOST, _INT8_MOST = tl.constexpr(FP8_MOST), tl.constexpr(INT8_MOST)
# Added and taken away again, it rounds a small float32 to a whole number, halves to even.
_WHOLE = tl.constexpr(1.5 * 2**23)


def quantise_rows(x: torch.Tensor, form: RowForm, *, programmatic_launch: bool) -> RoundedRows:
    """Round rows to eight bits. x: `[rows, in_features]`, contiguous rows. One kernel."""
    found = allocate_rows(x, form)
    rows, features = x.shape
    if rows:
        block = triton.next_power_of_2(features)
        _quantise_kernel[(rows,)](
            x,
            x.stride(0),
            rows,
            rounded_arguments(found, form),
            FEATURES=features,
            BLOCK=block,
            GROUP=form.groups,
            PDL=programmatic_launch,
            num_warps=warps_of_row(block),
            launch_pdl=programmatic_launch,
        )
    return found


def rounded_arguments(rows: RoundedRows, form: RowForm) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Arguments of a kernel that stores rounded rows: numbers, scales and `RowForm.limit`."""
    return rows.numbers, rows.scales, form.limit


def warps_of_row(block: int) -> int:
    """Warps of a program that has a row of `block` numbers."""
    return min(32, max(4, block // 512))


@triton.jit(do_not_specialize=["stride", "rows"])
def _quantise_kernel(
    x_ptr: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    to_rounded: tl.tuple,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + n, mask=n < FEATURES, other=0.0).to(tl.float32)
    store_rounded(to_rounded, rows, row, x, 0, FEATURES, GROUP)


@triton.jit
def store_rounded(
    to_rounded: tl.tuple,
    rows: tl.tensor,
    row: tl.tensor,
    x: tl.tensor,
    first: tl.tensor,
    FEATURES: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Store part of a row in eight bits. x: float32 `[BLOCK]`, from column `first` on, 0 beyond the
    row. rows: those that there are. to_rounded: of `rounded_arguments`. GROUP: of `RowForm.groups`;
    the part is of whole groups, or the row.
    """
    numbers_ptr, scales_ptr, limit = to_rounded
    IS_INT: tl.constexpr = numbers_ptr.dtype.element_ty == tl.int8
    LARGEST: tl.constexpr = _INT8_MOST if IS_INT else _FP8_MOST
    BLOCK: tl.constexpr = x.shape[0]
    if GROUP > 0 and GROUP < BLOCK:
        parts = tl.reshape(x, (BLOCK // GROUP, GROUP))
        scales = _scale(tl.max(tl.abs(parts), axis=1), limit, LARGEST)
        group = first // GROUP + tl.arange(0, BLOCK // GROUP)
        inside = group < (FEATURES + GROUP - 1) // GROUP
        tl.store(scales_ptr + group.to(tl.int64) * rows + row, scales, mask=inside)
        x = tl.reshape(parts / scales[:, None], (BLOCK,))
    else:
        scale = limit
        if GROUP >= 0:
            scale = _scale(tl.max(tl.abs(x), axis=0), limit, LARGEST)
        tl.store(scales_ptr + row, scale)
        x = x / scale
    n = first + tl.arange(0, BLOCK)
    x = tl.minimum(tl.maximum(whole(x), -128.0), 127.0) if IS_INT else within_fp8(x)
    numbers = x.to(numbers_ptr.dtype.element_ty)
    tl.store(numbers_ptr + row * FEATURES + n, numbers, mask=n < FEATURES)


@triton.jit
def whole(x: tl.tensor) -> Any:
    """A small float32, rounded to a whole number, halves to even."""
    return (x + _WHOLE) - _WHOLE


@triton.jit
def within_fp8(x: tl.tensor) -> Any:
    """float32, with the largest that FP8 has in place of larger ones."""
    return tl.minimum(tl.maximum(x, -_FP8_MOST), _FP8_MOST)


@triton.jit
def _scale(largest: tl.tensor, limit: tl.tensor, LARGEST: tl.constexpr) -> Any:
    largest = tl.minimum(largest, limit)
    return tl.where(largest > 0.0, largest / LARGEST, 1.0)
