"""Rows made FP8: beside what a norm or an activation writes, or in a kernel of their own."""

from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import follow
from loraplex.server.kernels.linear.fp8_form import FP8_MOST, Fp8Rows, RowForm, allocate_rows

# Room for rows in FP8, and their form.
ToFp8 = tuple[Fp8Rows, RowForm]
_MOST = tl.constexpr(FP8_MOST)


def quantise_rows(x: torch.Tensor, form: RowForm, *, programmatic_launch: bool) -> Fp8Rows:
    """Make rows FP8. x: `[rows, in_features]`, contiguous rows. One kernel."""
    found = allocate_rows(x, form)
    rows, features = x.shape
    if rows:
        block = triton.next_power_of_2(features)
        _quantise_kernel[(rows,)](
            x,
            x.stride(0),
            rows,
            fp8_arguments(found, form),
            FEATURES=features,
            BLOCK=block,
            GROUP=form.groups,
            PDL=programmatic_launch,
            num_warps=warps_of_row(block),
            launch_pdl=programmatic_launch,
        )
    return found


def fp8_arguments(rows: Fp8Rows, form: RowForm) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Arguments of a kernel that stores FP8: numbers, scales and `RowForm.limit`."""
    return rows.numbers, rows.scales, form.limit


def warps_of_row(block: int) -> int:
    """Warps of a program that has a row of `block` numbers."""
    return min(32, max(4, block // 512))


@triton.jit(do_not_specialize=["stride", "rows"])
def _quantise_kernel(
    x_ptr: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    to_fp8: tl.tuple,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + n, mask=n < FEATURES, other=0.0).to(tl.float32)
    store_fp8(to_fp8, rows, row, x, 0, FEATURES, GROUP)


@triton.jit
def store_fp8(
    to_fp8: tl.tuple,
    rows: tl.tensor,
    row: tl.tensor,
    x: tl.tensor,
    first: tl.tensor,
    FEATURES: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Store part of a row in FP8. x: float32 `[BLOCK]`, from column `first` on, 0 beyond the row.
    rows: those that there are. to_fp8: of `fp8_arguments`. GROUP: of `RowForm.groups`; the part is
    of whole groups, or the row.
    """
    numbers_ptr, scales_ptr, limit = to_fp8
    BLOCK: tl.constexpr = x.shape[0]
    if GROUP > 0 and GROUP < BLOCK:
        parts = tl.reshape(x, (BLOCK // GROUP, GROUP))
        scales = _scale(tl.max(tl.abs(parts), axis=1), limit)
        group = first // GROUP + tl.arange(0, BLOCK // GROUP)
        inside = group < (FEATURES + GROUP - 1) // GROUP
        tl.store(scales_ptr + group.to(tl.int64) * rows + row, scales, mask=inside)
        x = tl.reshape(parts / scales[:, None], (BLOCK,))
    else:
        scale = limit
        if GROUP >= 0:
            scale = _scale(tl.max(tl.abs(x), axis=0), limit)
        tl.store(scales_ptr + row, scale)
        x = x / scale
    n = first + tl.arange(0, BLOCK)
    numbers = tl.minimum(tl.maximum(x, -_MOST), _MOST).to(numbers_ptr.dtype.element_ty)
    tl.store(numbers_ptr + row * FEATURES + n, numbers, mask=n < FEATURES)


@triton.jit
def _scale(largest: tl.tensor, limit: tl.tensor) -> Any:
    largest = tl.minimum(largest, limit)
    return tl.where(largest > 0.0, largest / _MOST, 1.0)
