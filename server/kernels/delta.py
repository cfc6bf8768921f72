"""`out = y + delta`: how the kernel after a base GEMM takes up what LoRA computed beside it."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from server.kernels.checks import padded_widths
from server.kernels.table import LoraTable

_BLOCK = 1024


def add_delta(
    y: torch.Tensor,
    delta: torch.Tensor | None,
    out: torch.Tensor,
    widths: Sequence[int],
    slots: torch.Tensor,
    table: LoraTable,
    site: int,
) -> None:
    """`out[i, p] = y[i, p] + delta[i, p]` if row i's adapter touches projection p, else `y[i, p]`.

    y, delta, out: `[rows, sum(widths)]` contiguous, of one dtype; out may be y. slots: `[rows]`
    int32.
    delta: from `expand(..., accumulate=False)`; what it holds where no adapter wrote is ignored.
    None copies y. One kernel, no allocation. Raises ValueError on a mismatch.
    """
    rows, features = y.shape
    for name, other in (("delta", delta), ("out", out)):
        if other is not None and (other.shape != y.shape or other.dtype != y.dtype):
            raise ValueError(f"{name} is {other.dtype} {list(other.shape)}, unlike y")
        if other is not None and not other.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    if slots.shape != (rows,) or slots.dtype != torch.int32 or not y.is_contiguous():
        raise ValueError(f"slots must be int32 [{rows}] and y contiguous, got {slots.dtype}")
    w0, w1, _ = padded_widths(widths, features)
    if rows == 0:
        return
    _add_kernel[(triton.cdiv(features, _BLOCK), rows)](
        y,
        y if delta is None else delta,
        out,
        slots,
        table.ints,
        site,
        table.num_sites,
        FEATURES=features,
        END0=w0,
        END1=w0 + w1,
        HAS_DELTA=delta is not None,
        BLOCK=_BLOCK,
    )


@triton.jit(do_not_specialize=["site", "num_sites"])
def _add_kernel(
    y_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    out_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    FEATURES: tl.constexpr,
    END0: tl.constexpr,
    END1: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < FEATURES
    y = tl.load(y_ptr + row * FEATURES + n, mask=inside, other=0.0)
    if HAS_DELTA:
        # Read beside the chain slot -> rank, not after it, and dropped where it means nothing.
        delta = tl.load(delta_ptr + row * FEATURES + n, mask=inside, other=0.0)
        slot = tl.load(slots_ptr + row).to(tl.int64)
        ranks_ptr = ints_ptr + (tl.maximum(slot, 0) * num_sites + site) * 16 + 8
        rank = tl.where(n < END1, tl.load(ranks_ptr + 1), tl.load(ranks_ptr + 2))
        rank = tl.where(n < END0, tl.load(ranks_ptr), rank)
        y = tl.where((slot >= 0) & (rank > 0), y + delta, y)
    tl.store(out_ptr + row * FEATURES + n, y, mask=inside)
