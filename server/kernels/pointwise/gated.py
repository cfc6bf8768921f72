"""`activation(gate) * up` of a product, with what LoRA computed beside it."""

from typing import Any, Literal

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import follow
from loraplex.server.kernels.linear.round_rows import rounded_arguments, store_rounded, warps_of_row
from loraplex.server.kernels.linear.row_form import Rounding
from loraplex.server.kernels.lora.pending import PendingDelta, delta_arguments
from loraplex.server.kernels.lora.record import touches

Activation = Literal["silu", "gelu_tanh"]
# `clamped_swiglu`: experts whose gate and up are clamped, see
# `loraplex.server.model.spec.moe_spec`.
GatedActivation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
# `relu2`, the square of what is positive, has no gate.
ExpertActivation = GatedActivation | Literal["relu2"]

_BLOCK = 1024
_ALPHA, _LIMIT = tl.constexpr(1.702), tl.constexpr(7.0)


def gated(
    gate_up: torch.Tensor,
    pending: PendingDelta | None,
    activation: GatedActivation,
    rounding: Rounding | None = None,
    up: torch.Tensor | None = None,
    *,
    programmatic_launch: bool,
) -> torch.Tensor:
    """Apply the gated activation: `[rows, 2 n]`, contiguous, gate first -> `[rows, n]`; pending:
    LoRA of it, of rows and halves that their adapter touches. rounding: takes the result, too,
    `[rows, n]`. up: `[rows, n]`, rows of any stride, beside a gate alone, `[rows, n]`, without
    pending. In float32; one kernel. Raises ValueError on a mismatch.
    """
    rows, inner = gate_up.shape[0], gate_up.shape[1] // (2 if up is None else 1)
    if up is not None and (pending is not None or up.shape != gate_up.shape or up.stride(1) != 1):
        raise ValueError("an activation beside its gate is of one shape, without LoRA")
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    block, warps = _BLOCK, 4
    if rounding is not None and rounding[1].groups == 0:  # a scale needs the whole row
        block = triton.next_power_of_2(inner)
        warps = warps_of_row(block)
    if rows:
        _gated_kernel[(rows * triton.cdiv(inner, block),)](
            gate_up,
            *delta_arguments(gate_up, pending),
            out,
            rows,
            None if rounding is None else rounded_arguments(*rounding),
            up,
            0 if up is None else up.stride(0),
            INNER=inner,
            BLOCK=block,
            ACTIVATION=activation,
            LORA=pending is not None,
            ROUND=rounding is not None,
            GROUP=0 if rounding is None else rounding[1].groups,
            PDL=programmatic_launch,
            num_warps=warps,
            launch_pdl=programmatic_launch,
        )
    return out


@triton.jit(
    do_not_specialize=["site", "num_sites", "rows"], do_not_specialize_on_alignment=["slots_ptr"]
)
def _gated_kernel(
    y_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    to_rounded: tl.tuple,
    up_ptr: tl.tensor,
    stride_up: tl.tensor,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LORA: tl.constexpr,
    ROUND: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    follow(PDL)
    BLOCKS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    first = tl.program_id(0) % BLOCKS * BLOCK
    n = first + tl.arange(0, BLOCK)
    inside = n < INNER
    if up_ptr is None:
        at = row * 2 * INNER + n
        up = tl.load(y_ptr + at + INNER, mask=inside, other=0.0).to(tl.float32)
    else:
        at = row * INNER + n
        up = tl.load(up_ptr + row * stride_up + n, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if LORA:
        # Read beside the chain slot -> rank, not after it, and dropped where it means nothing.
        delta0 = tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)
        delta1 = tl.load(delta_ptr + at + INNER, mask=inside, other=0.0).to(tl.float32)
        slot_ptr = slots_ptr + row
        gate += tl.where(touches(slot_ptr, ints_ptr, site, num_sites, 0), delta0, 0.0)
        up += tl.where(touches(slot_ptr, ints_ptr, site, num_sites, 1), delta1, 0.0)
    out = activated(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * INNER + n, out, mask=inside)
    if ROUND:
        store_rounded(to_rounded, rows, row, out.to(tl.float32), first, INNER, GROUP)


def has_gate(activation: ExpertActivation | None) -> bool:
    """Whether the activation takes the halves of a product, gate and up."""
    return activation is not None and activation != "relu2"


@triton.jit
def activated(gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr) -> Any:
    """`gate / (1 + e^-x) * up`: with x = gate that is silu's, with `x = sqrt(8 / pi) * (gate +
    0.044715 gate^3)` that of gelu by its tanh (arXiv:1606.08415); "clamped_swiglu" clamps both.

    A square root's reciprocal, squared, and a power of 2 are an instruction each on a GPU; division
    and e's power take five, for numbers that do not come.
    """
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, _LIMIT)
        up = tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT) + 1.0
    x = gate
    if ACTIVATION == "clamped_swiglu":
        x = _ALPHA * gate
    elif ACTIVATION == "gelu_tanh":
        x = 1.5957691216057308 * (gate + 0.044715 * (gate * gate * gate))
    else:
        tl.static_assert(ACTIVATION == "silu")
    root = tl.rsqrt(1.0 + tl.exp2(-1.4426950408889634 * x))
    return gate * (root * root) * up


@triton.jit
def activated_alone(x: tl.tensor, ACTIVATION: tl.constexpr) -> Any:
    """The activation of a product without gate."""
    tl.static_assert(ACTIVATION == "relu2")
    positive = tl.maximum(x, 0.0)
    return positive * positive
