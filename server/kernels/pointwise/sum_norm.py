"""The sum of what several devices computed, with the residual sum and RMS norms around it: one
kernel, in which each device reads the others' memory.

All devices read all terms (one-shot all-reduce). So a row's result is the same bit for bit on each.
"""

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import follow
from loraplex.server.kernels.lora.pending import PendingDelta, delta_arguments
from loraplex.server.kernels.lora.tiles import touches
from loraplex.server.kernels.pointwise.add_norm import (
    RmsNorm,
    branch,
    check_norms,
    load_norms,
    store_normed,
)
from loraplex.server.kernels.pointwise.shared_terms import SharedTerms


def sum_norm(
    terms: SharedTerms,
    pending: PendingDelta | None,
    hidden: torch.Tensor,
    norm: RmsNorm | None,
    post: RmsNorm | None = None,
    factors: tuple[float, float] = (1.0, 1.0),
    *,
    programmatic_launch: bool,
) -> torch.Tensor:
    """Sum products over devices, add them to the residual stream, and norm: `hidden = kept *
    hidden + factor * post(y + delta, summed over devices)` -> `norm(hidden)` in a tensor of its
    own; without norm, hidden. As `add_norm` else.

    pending: of `terms.delta`; None = no device has a delta. All devices call it, each with its
    terms written by the kernels before on this stream. Programs of one row meet by flags, and none
    waits for the end: the same memory and flags are for use again once all devices have met
    elsewhere. Raises ValueError on a mismatch.
    """
    check_norms(terms.y, hidden, post, norm)
    rows, features = hidden.shape
    out = hidden if norm is None else torch.empty_like(hidden)
    if rows == 0:
        return out
    _, *delta = delta_arguments(terms.y, pending)
    flags = terms.flags
    _sum_norm_kernel[(rows,)](
        out,
        terms.memories,
        terms.memories if flags is None else flags,
        terms.index,
        terms.delta_at,
        *delta,
        hidden,
        *(post or (hidden, 0.0)),
        *factors,
        *(norm or (hidden, 0.0)),
        FEATURES=features,
        BLOCK=triton.next_power_of_2(features),
        DEVICES=len(terms.memories),
        MEET=flags is not None,
        LORA=pending is not None,
        POST=post is not None,
        SCALED=factors != (1.0, 1.0),
        NORM=norm is not None,
        PDL=programmatic_launch,
        num_warps=8,
        launch_pdl=programmatic_launch,
    )
    return out


@triton.jit(
    do_not_specialize=["index", "site", "num_sites", "post_epsilon", "factor", "kept", "epsilon"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _sum_norm_kernel(
    out_ptr: tl.tensor,
    memories_ptr: tl.tensor,
    flags_ptr: tl.tensor,
    index: tl.tensor,
    delta_at: tl.tensor,
    slots_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    hidden_ptr: tl.tensor,
    post_ptr: tl.tensor,
    post_epsilon: tl.tensor,
    factor: tl.tensor,
    kept: tl.tensor,
    weight_ptr: tl.tensor,
    epsilon: tl.tensor,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    DEVICES: tl.constexpr,
    MEET: tl.constexpr,
    LORA: tl.constexpr,
    POST: tl.constexpr,
    SCALED: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Sum terms of all devices, and norm. This device's own term is read while the flags travel."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    if MEET:
        _tell_others(flags_ptr, row, index, DEVICES)
    n = tl.arange(0, BLOCK)
    inside = n < FEATURES
    at = row * FEATURES + n
    hidden = tl.load(hidden_ptr + at, mask=inside, other=0.0).to(tl.float32)
    norms = load_norms(
        post_ptr + n, post_epsilon, factor, weight_ptr + n, epsilon, inside, POST, NORM
    )
    has_delta = touches(slots_ptr + row, ints_ptr, site, num_sites, 0) if LORA else False
    if MEET:
        _wait_for_others(flags_ptr, row, index, DEVICES)
    y = n * 0.0
    for device in tl.static_range(DEVICES):
        address = tl.load(memories_ptr + device).to(tl.pointer_type(hidden_ptr.dtype.element_ty))
        y += _term(tl.multiple_of(address, 16) + at, delta_at, has_delta, inside, LORA)
    if SCALED:
        hidden *= kept
    hidden += branch(y, norms, FEATURES, POST, SCALED)
    tl.store(hidden_ptr + at, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)
    if NORM:
        store_normed(out_ptr + at, hidden, norms, inside, FEATURES)


@triton.jit
def _term(
    y_ptr: tl.tensor,
    delta_at: tl.tensor,
    has_delta: tl.tensor,
    inside: tl.tensor,
    LORA: tl.constexpr,
) -> tl.tensor:
    """The term of one device, float32."""
    y = tl.load(y_ptr, mask=inside, other=0.0).to(tl.float32)
    if LORA:
        # Read beside the product, and dropped where it means nothing.
        delta = tl.load(y_ptr + delta_at, mask=inside, other=0.0).to(tl.float32)
        y += tl.where(has_delta, delta, 0.0)
    return y


@triton.jit
def _tell_others(
    flags_ptr: tl.tensor, row: tl.tensor, index: tl.tensor, DEVICES: tl.constexpr
) -> None:
    """That this device's terms of the row can be read."""
    for device in tl.static_range(DEVICES):
        if device != index:
            flag = _flags(flags_ptr + device, row, DEVICES) + index
            tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@triton.jit
def _wait_for_others(
    flags_ptr: tl.tensor, row: tl.tensor, index: tl.tensor, DEVICES: tl.constexpr
) -> None:
    """Until their terms can be read. Takes this device's flags down."""
    flags = _flags(flags_ptr + index, row, DEVICES)
    for device in tl.static_range(DEVICES):
        if device != index:
            while tl.atomic_cas(flags + device, 1, 0, sem="acquire", scope="sys") != 1:
                pass


@triton.jit
def _flags(address_ptr: tl.tensor, row: tl.tensor, DEVICES: tl.constexpr) -> tl.tensor:
    """One device's, of a row."""
    return tl.load(address_ptr).to(tl.pointer_type(tl.int32)) + row * DEVICES
