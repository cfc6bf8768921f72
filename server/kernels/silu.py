"""`silu(gate) * up` of a product without LoRA."""

from typing import Any

import torch
import triton
import triton.language as tl

from server.kernels.launch import follow

_BLOCK = 1024


def silu_mul(gate_up: torch.Tensor, *, programmatic_launch: bool) -> torch.Tensor:
    """`[rows, 2 n]`, contiguous, gate first -> `[rows, n]`. In float32; one kernel."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _silu_mul_kernel[(triton.cdiv(inner, _BLOCK), rows)](
            gate_up,
            out,
            INNER=inner,
            BLOCK=_BLOCK,
            PDL=programmatic_launch,
            num_warps=4,
            launch_pdl=programmatic_launch,
        )
    return out


@triton.jit
def _silu_mul_kernel(
    y_ptr: tl.tensor,
    out_ptr: tl.tensor,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    follow(PDL)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    gate = tl.load(y_ptr + row * 2 * INNER + n, mask=n < INNER, other=0.0).to(tl.float32)
    up = tl.load(y_ptr + row * 2 * INNER + INNER + n, mask=n < INNER, other=0.0).to(tl.float32)
    out = silu_times(gate, up)
    tl.store(out_ptr + row * INNER + n, out.to(out_ptr.dtype.element_ty), mask=n < INNER)


@triton.jit
def silu_times(gate: tl.tensor, up: tl.tensor) -> Any:
    return gate / (1.0 + tl.exp(-gate)) * up
