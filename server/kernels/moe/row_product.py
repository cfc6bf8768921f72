"""The product of each of a few rows with its expert's matrix, without tensor cores.

Few rows seldom share an expert. Small programs keep more reads of the matrices under way than the
tiles of `grouped.py` do.
"""

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import follow
from loraplex.server.kernels.pointwise.gated import (
    ExpertActivation,
    activated,
    activated_alone,
    has_gate,
)

# With more rows, or where rows share experts, tiles read less.
_MOST_ROWS = 16
_BLOCK_N, _BLOCK_K = 4, 2048


def rows_are_few(tokens: int, top_k: int, experts: int) -> bool:
    """Say whether `row_product` reads the matrices sooner than `grouped_product`."""
    rows = tokens * top_k
    return tokens == 1 or rows <= min(_MOST_ROWS, experts // 2)


def row_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    experts: torch.Tensor,
    activation: ExpertActivation | None = None,
    *,
    programmatic_launch: bool,
) -> torch.Tensor:
    """Multiply each row by the matrix of its expert, as `grouped_product` does. x: `[tokens, in]`,
    or `[rows, in]`, contiguous; weight: `[experts, out, in]`, contiguous; bias: `[experts, out]`;
    experts: int32 `[rows]` -> `[rows, out]`, or of a gated activation `[rows, out / 2]`. float32
    inside. One kernel.
    """
    rows, (_, out, features) = len(experts), weight.shape
    width = out // 2 if has_gate(activation) else out
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _row_kernel[(rows * triton.cdiv(width, _BLOCK_N),)](
        x,
        weight,
        x if bias is None else bias,
        y,
        experts,
        SHARE=rows // len(x),
        WIDTH=width,
        IN=features,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K if features % _BLOCK_K == 0 else _BLOCK_K // 2,
        BIAS=bias is not None,
        ACTIVATION=activation,
        HALVES=2 if has_gate(activation) else 1,
        PDL=programmatic_launch,
        num_warps=4,
        launch_pdl=programmatic_launch,
    )
    return y


@triton.jit(do_not_specialize_on_alignment=["experts_ptr"])
def _row_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    SHARE: tl.constexpr,
    WIDTH: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HALVES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program takes some output features of a row, with a gate those of gate and up.
    SHARE: rows with the same input."""
    follow(PDL)
    BLOCKS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    n = tl.program_id(0) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(experts_ptr + row).to(tl.int64)
    # Behind the last feature the last one is computed again.
    feature = expert * (HALVES * WIDTH) + tl.minimum(n, WIDTH - 1)
    of_weight = weight_ptr + feature[:, None] * IN
    x_ptr += row // SHARE * IN
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = gate
    for step in tl.range(0, IN, BLOCK_K):
        k = step + tl.arange(0, BLOCK_K)
        live = k < IN
        w = tl.load(of_weight + k[None, :], mask=live[None, :], other=0.0)
        x = tl.load(x_ptr + k, mask=live, other=0.0).to(tl.float32)[None, :]
        if HALVES == 2:
            second = of_weight + (WIDTH * IN + k)[None, :]
            w_up = tl.load(second, mask=live[None, :], other=0.0)
            up += w_up.to(tl.float32) * x
        gate += w.to(tl.float32) * x
    result = tl.sum(gate, axis=1)
    if BIAS:
        result += tl.load(bias_ptr + feature).to(tl.float32)
    if HALVES == 2:
        of_up = tl.sum(up, axis=1)
        if BIAS:
            of_up += tl.load(bias_ptr + feature + WIDTH).to(tl.float32)
        result = activated(result, of_up, ACTIVATION)
    elif ACTIVATION is not None:
        result = activated_alone(result, ACTIVATION)
    tl.store(y_ptr + row * WIDTH + n, result.to(y_ptr.dtype.element_ty), mask=n < WIDTH)
