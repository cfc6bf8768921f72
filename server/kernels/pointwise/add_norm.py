"""Residual and RMS norm (arXiv:1910.07467), with what LoRA computed beside the product."""

import torch
import triton
import triton.language as tl

from server.kernels.launch.launch import follow
from server.kernels.lora.pending import PendingDelta, delta_arguments
from server.kernels.lora.record import ranks_at, record_of


def add_norm(
    y: torch.Tensor,
    pending: PendingDelta | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    programmatic_launch: bool,
) -> None:
    """`hidden += y + delta`, then `y = rms_norm(hidden) * weight`; the delta only of rows whose
    adapter touches the site.

    y, hidden, delta: `[rows, features]`, of one dtype, contiguous; weight `[features]`. In float32;
    one kernel, no allocation. Raises ValueError on a mismatch.
    """
    rows, features = y.shape
    for name, other in (("y", y), ("hidden", hidden)):
        if other.shape != y.shape or other.dtype != y.dtype or not other.is_contiguous():
            raise ValueError(f"{name} is {other.dtype} {list(other.shape)}, y {list(y.shape)}")
    if rows == 0:
        return
    _add_norm_kernel[(rows,)](
        y,
        *delta_arguments(y, pending),
        hidden,
        weight,
        epsilon,
        FEATURES=features,
        BLOCK=triton.next_power_of_2(features),
        LORA=pending is not None,
        PDL=programmatic_launch,
        num_warps=8,
        launch_pdl=programmatic_launch,
    )


@triton.jit(
    do_not_specialize=["site", "num_sites", "epsilon"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _add_norm_kernel(
    y_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    hidden_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    epsilon: tl.tensor,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    LORA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < FEATURES
    at = row * FEATURES + n
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    hidden = tl.load(hidden_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + n, mask=inside, other=0.0).to(tl.float32)
    if LORA:
        # Read beside the chain slot -> rank, not after it, and dropped where it means nothing.
        delta = tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)
        slot = tl.load(slots_ptr + row).to(tl.int64)
        rank = tl.load(ranks_at(ints_ptr, record_of(slot, site, num_sites)))
        y += tl.where((slot >= 0) & (rank > 0), delta, 0.0)
    hidden += y
    tl.store(hidden_ptr + at, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)
    factor = tl.rsqrt(tl.sum(hidden * hidden, axis=0) / FEATURES + epsilon)
    tl.store(y_ptr + at, (hidden * factor * weight).to(y_ptr.dtype.element_ty), mask=inside)
