"""LoRA on experts of few rows: each row alone reads its adapter's matrices of its expert.

Few rows of a decode step share adapter and expert, so tensor cores would have one row each.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import follow
from loraplex.server.kernels.lora.table import MAX_RANK
from loraplex.server.kernels.lora.tiles import (
    a_at,
    b_at,
    ranks_at,
    record_of,
    scales_at,
    total_rank_at,
)
from loraplex.server.kernels.moe.expert_lora import ExpertLora, check_expert_lora
from loraplex.server.kernels.moe.grouped import ExpertTiles
from loraplex.server.kernels.pointwise.gated import (
    ExpertActivation,
    activated,
    activated_alone,
    has_gate,
)

# Beyond this many rows tiles of rows read the matrices less often (`expert_lora.py`).
MOST_ROWS = 2048
_RANKS = tl.constexpr(8)
# Programs that share the ranks of A.
_RANK_SPLITS = 4
_BLOCK_N, _BLOCK_K = 256, 2048


def add_row_lora(
    x: torch.Tensor,
    y: torch.Tensor,
    tiles: ExpertTiles,
    lora: ExpertLora,
    *,
    programmatic_launch: bool,
) -> None:
    """Add LoRA of one projection to experts' outputs, as `add_expert_lora`, in two kernels."""
    check_expert_lora(y, tiles, lora)
    if len(lora.widths) > 1:
        raise ValueError(f"more than one projection: {lora.widths}")
    bridge = _shrink(x, tiles, lora, PDL=programmatic_launch)
    _expand(bridge, y, y, tiles, lora, None, PDL=programmatic_launch)


def activated_row_lora(
    x: torch.Tensor,
    y: torch.Tensor,
    tiles: ExpertTiles,
    lora: ExpertLora,
    activation: ExpertActivation,
    *,
    programmatic_launch: bool,
) -> torch.Tensor:
    """Add LoRA to gate and up of experts, as `add_expert_lora` does, and apply the activation to
    y's halves, gate first -> `[rows, sum(widths) / 2]`; without gate to all of y. widths: of the
    halves, or of both in one. Two kernels; y stays as it is.
    """
    check_expert_lora(y, tiles, lora)
    if len(set(lora.widths)) > 1:
        raise ValueError(f"gate and up must be as wide as each other: {lora.widths}")
    inner = y.shape[1] // 2 if has_gate(activation) else y.shape[1]
    out = torch.empty(len(y), inner, dtype=y.dtype, device=y.device)
    bridge = _shrink(x, tiles, lora, PDL=programmatic_launch)
    _expand(bridge, y, out, tiles, lora, activation, PDL=programmatic_launch)
    return out


def _shrink(x: torch.Tensor, tiles: ExpertTiles, lora: ExpertLora, *, PDL: bool) -> torch.Tensor:
    """Compute `A x` of each row, float32 `[rows, len(lora.widths) * MAX_RANK]`."""
    rows, table = len(tiles.order), lora.table
    stride = len(lora.widths) * MAX_RANK
    bridge = torch.empty(rows, stride, dtype=torch.float32, device=x.device)
    _shrink_rows_kernel[(rows, _RANK_SPLITS)](
        x,
        bridge,
        (table.words, table.ints),
        lora.site,
        table.num_sites,
        lora.slots,
        tiles.experts,
        TOP_K=tiles.top_k,
        STRIDE=stride,
        SHARE=rows // len(x),
        IN=x.shape[1],
        BLOCK_K=min(_BLOCK_K, triton.next_power_of_2(x.shape[1])),
        PDL=PDL,
        num_warps=4,
        launch_pdl=PDL,
    )
    return bridge


def _expand(
    bridge: torch.Tensor,
    y: torch.Tensor,
    out: torch.Tensor,
    tiles: ExpertTiles,
    lora: ExpertLora,
    activation: ExpertActivation | None,
    *,
    PDL: bool,
) -> None:
    rows, table = len(y), lora.table
    _expand_rows_kernel[(rows, triton.cdiv(out.shape[1], _BLOCK_N))](
        bridge,
        y,
        out,
        (table.words, table.ints, table.floats),
        lora.site,
        table.num_sites,
        lora.slots,
        tiles.experts,
        TOP_K=tiles.top_k,
        STRIDE=bridge.shape[1],
        FIRST=lora.widths[0],
        SECOND=sum(lora.widths[1:]),
        BLOCK_N=_BLOCK_N,
        ACTIVATION=activation,
        GATED=has_gate(activation),
        PDL=PDL,
        num_warps=4,
        launch_pdl=PDL,
    )


@triton.jit(do_not_specialize=["site", "num_sites"], do_not_specialize_on_alignment=["slots_ptr"])
def _shrink_rows_kernel(
    x_ptr: tl.tensor,
    bridge_ptr: tl.tensor,
    table: tl.tuple,
    site: tl.tensor,
    num_sites: tl.tensor,
    slots_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    TOP_K: tl.constexpr,
    STRIDE: tl.constexpr,
    SHARE: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program takes a row, and every so many ranks of its adapter."""
    follow(PDL)
    words_ptr, ints_ptr = table
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row // TOP_K).to(tl.int64)
    if slot >= 0:
        expert = tl.load(experts_ptr + row).to(tl.int64)
        record = record_of(slot, site, num_sites)
        total = tl.load(total_rank_at(ints_ptr, record))
        address = tl.load(a_at(words_ptr, record)).to(tl.pointer_type(x_ptr.dtype.element_ty))
        a_ptr = tl.multiple_of(address, 16) + expert * total * IN
        x_ptr += row // SHARE * IN
        for first in range(tl.program_id(1) * _RANKS, total, tl.num_programs(1) * _RANKS):
            r = first + tl.arange(0, _RANKS)
            acc = tl.zeros((_RANKS, BLOCK_K), tl.float32)
            for step in range(0, IN, BLOCK_K):
                k = step + tl.arange(0, BLOCK_K)
                x = tl.load(x_ptr + k, mask=k < IN, other=0.0).to(tl.float32)
                of_a = a_ptr + r.to(tl.int64)[:, None] * IN + k[None, :]
                live = (r < total)[:, None] & (k < IN)[None, :]
                acc += tl.load(of_a, mask=live, other=0.0).to(tl.float32) * x[None, :]
            tl.store(bridge_ptr + row * STRIDE + r, tl.sum(acc, axis=1), mask=r < total)


@triton.jit(do_not_specialize=["site", "num_sites"], do_not_specialize_on_alignment=["slots_ptr"])
def _expand_rows_kernel(
    bridge_ptr: tl.tensor,
    y_ptr: tl.tensor,
    out_ptr: tl.tensor,
    table: tl.tuple,
    site: tl.tensor,
    num_sites: tl.tensor,
    slots_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    TOP_K: tl.constexpr,
    STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program takes some features of a row. Without an activation a row that nothing is added to
    is not written."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.load(slots_ptr + row // TOP_K)
    record = record_of(slot, site, num_sites)
    of = (table, record, tl.load(experts_ptr + row).to(tl.int64), bridge_ptr + row * STRIDE)
    if ACTIVATION is None:
        if slot >= 0:
            inside, at = n < FIRST, row * FIRST + n
            y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
            y += _delta(of, y_ptr, n, inside, FIRST, 0)
            tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)
    elif not GATED:
        inside, at = n < FIRST, row * FIRST + n
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if slot >= 0:
            y += _delta(of, y_ptr, n, inside, FIRST, 0)
        inner = activated_alone(y, ACTIVATION).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, inner, mask=inside)
    else:
        HALF: tl.constexpr = (FIRST + SECOND) // 2
        inside, at = n < HALF, row * (2 * HALF) + n
        gate = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(y_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
        if slot >= 0:
            gate += _delta(of, y_ptr, n, inside, FIRST, 0)
            if SECOND == 0:
                up += _delta(of, y_ptr, n + HALF, inside, FIRST, 0)
            else:
                up += _delta(of, y_ptr, n, inside, SECOND, 1)
        inner = activated(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * HALF + n, inner, mask=inside)


@triton.jit
def _delta(
    of: tl.tuple,
    y_ptr: tl.tensor,
    n: tl.tensor,
    inside: tl.tensor,
    WIDTH: tl.constexpr,
    PROJECTION: tl.constexpr,
) -> Any:
    """`scale * B v` of the features n of a projection so wide. of: the table, the record, the
    expert, and where the row's `A x` lies."""
    table, record, expert, v_ptr = of
    words_ptr, ints_ptr, floats_ptr = table
    ranks_ptr = ranks_at(ints_ptr, record)
    rank = tl.load(ranks_ptr + PROJECTION)
    if PROJECTION == 1:
        # Where both read the same rows of A there are fewer than ranks.
        first_rank = tl.load(ranks_ptr)
        apart = tl.load(total_rank_at(ints_ptr, record)) >= first_rank + rank
        v_ptr += tl.where(apart, first_rank, 0)
    address = tl.load(b_at(words_ptr, record) + PROJECTION)
    b_ptr = address.to(tl.pointer_type(y_ptr.dtype.element_ty)) + expert * WIDTH * rank
    delta = n * 0.0
    for first in range(0, rank, _RANKS):
        r = first + tl.arange(0, _RANKS)
        v = tl.load(v_ptr + r, mask=r < rank, other=0.0)
        of_b = b_ptr + n.to(tl.int64)[:, None] * rank + r[None, :]
        b = tl.load(of_b, mask=inside[:, None] & (r < rank)[None, :], other=0.0)
        delta += tl.sum(b.to(tl.float32) * v[None, :], axis=1)
    return delta * tl.load(scales_at(floats_ptr, record) + PROJECTION)
