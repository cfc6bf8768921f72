"""`x W^T` of few rows, whose time is that of reading W, with their LoRA on the way.

A library's kernel begins to read W when the kernel before it has ended, and between two of a step
the memory idles. This one is launched while that one drains (programmatic dependent launch), asks
for the first weights of every program, and then waits for x. So would it wait for kernels of LoRA:
instead its first programs shrink, A's rows being weights like W's, and each of the others, when it
has its columns, waits for those and expands.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from server.kernels.checks import padded_widths
from server.kernels.configs import SkinnyConfig
from server.kernels.launch import let_next_start, wait
from server.kernels.skinny_block import load_weights, weigh
from server.kernels.skinny_lora_block import (
    add_low_rank,
    load_first_b,
    load_projections,
    shrink_all,
)
from server.kernels.table import LoraTable
from server.kernels.workspace import Workspace

MAX_ROWS = 32


@dataclass(frozen=True, slots=True)
class SkinnyLora:
    """What a product adds to each row: `scale B (A x)` of its adapter at a site.

    slots: int32 `[rows]`, -1 = no adapter. widths: output features of the site's projections.
    workspace: its first plane takes `A x`, by batch row. arrivals: int32 `[table.num_sites]`, of
    which the site's is 0 before the launch and not after it: by it the product's programs know that
    `A x` is there.
    """

    table: LoraTable
    site: int
    slots: torch.Tensor
    widths: tuple[int, ...]
    workspace: Workspace
    arrivals: torch.Tensor


def skinny_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: SkinnyConfig,
    lora: SkinnyLora | None = None,
) -> None:
    """`out = x weight^T + bias`, and LoRA, for 1 to MAX_ROWS rows, summed in float32.

    x `[rows, in]`, out `[rows, out]`: any row stride; weight `[out, in]`, contiguous, which no
    kernel writes that may still run; bias `[out]` or None; all of one dtype. Table and slots were
    complete when the kernel before began. One kernel, no allocation. Raises ValueError on a
    mismatch.
    """
    _check(x, weight, bias, out)
    (rows, features), n = x.shape, len(weight)
    widths = (n, 0, 0) if lora is None else _checked_widths(x, lora, n)
    programs = 0 if lora is None else config.lora_programs
    if lora is not None and programs < 1:
        raise ValueError("a configuration without programs that shrink")
    even = features % config.block_k == 0
    _skinny_kernel[(programs + sum(triton.cdiv(w, config.block_n) for w in widths),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        n,
        features,
        x.stride(0),
        out.stride(0),
        *_lora_arguments(x, lora),
        *widths,
        programs,
        BLOCK_M=1 if rows == 1 else max(8, triton.next_power_of_2(rows)),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        EVEN=even and all(w % config.block_n == 0 for w in widths),
        EVEN_K=even,
        BIAS=bias is not None,
        LORA=lora is not None,
        STAGES=config.num_stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        PDL=config.programmatic_launch,
        num_warps=config.num_warps,
        launch_pdl=config.programmatic_launch,
    )


def _check(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    if not 1 <= len(x) <= MAX_ROWS:
        raise ValueError(f"{len(x)} rows, not 1 to {MAX_ROWS}")
    if x.dim() != 2 or (len(x), *weight.shape) != (*out.shape, x.shape[1]):
        shapes = [list(of.shape) for of in (x, weight, out)]
        raise ValueError("x {}, weight {} and out {} do not fit".format(*shapes))
    if not weight.is_contiguous() or x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("weight, and rows of x and of out, must be contiguous")
    if not x.dtype == weight.dtype == out.dtype:
        raise ValueError(f"x is {x.dtype}, weight {weight.dtype}, out {out.dtype}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}, for {len(weight)} features")


def _checked_widths(x: torch.Tensor, lora: SkinnyLora, features: int) -> tuple[int, int, int]:
    lora.table.check_site(lora.site)
    if lora.slots.shape != x.shape[:1] or lora.slots.dtype != torch.int32:
        raise ValueError(f"slots are {lora.slots.dtype} {list(lora.slots.shape)}, {len(x)} rows")
    if len(x) > lora.workspace.rows or x.dtype != lora.workspace.dtype:
        of = lora.workspace
        raise ValueError(f"x is {x.dtype} {list(x.shape)}, a workspace of {of.dtype}, {of.rows}")
    if lora.arrivals.shape != (lora.table.num_sites,) or lora.arrivals.dtype != torch.int32:
        raise ValueError(f"arrivals are {lora.arrivals.dtype} {list(lora.arrivals.shape)}")
    return padded_widths(lora.widths, features)


def _lora_arguments(x: torch.Tensor, lora: SkinnyLora | None) -> tuple[Any, ...]:
    """As the kernel takes them; where there is no LoRA, stand-ins."""
    if lora is None:
        return x, x, x, (x, x, x), 0, 0, 0
    table, low = lora.table, lora.workspace.planes[0]
    words = (table.words, table.ints, table.floats)
    return lora.slots, low, lora.arrivals, words, lora.site, table.num_sites, low.stride(0)


@triton.jit(
    do_not_specialize=["rows", "site", "num_sites", "stride_low", "w0", "w1", "w2", "programs"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _skinny_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    stride_x: tl.tensor,
    stride_out: tl.tensor,
    slots_ptr: tl.tensor,
    low_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    table: tl.tuple,
    site: tl.tensor,
    num_sites: tl.tensor,
    stride_low: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    programs: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
    LORA: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """programs: how many shrink: the first, so that they run when others wait for them."""
    let_next_start(PDL)
    m = tl.arange(0, BLOCK_M)
    of_x = (x_ptr + m * stride_x, m < rows, in_features)
    to_out = (out_ptr + m * stride_out, m < rows, bias_ptr)
    if not LORA:
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        of_out = (weight_ptr, n, out_features, in_features)
        first = load_weights(of_out, tl.arange(0, BLOCK_K), EVEN)
        wait(PDL)
        acc = weigh(first, of_out, of_x, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, STAGES, PRECISION)
        _store(to_out, acc, n, out_features, BIAS)
    else:
        slots = tl.load(slots_ptr + m, mask=m < rows, other=-1)
        low = (low_ptr + m * stride_low, arrivals_ptr + site)
        if tl.program_id(0) < programs:
            shrink_all(
                of_x, slots, (table, site, num_sites), low, programs,
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, STAGES, PRECISION, PDL,
            )  # fmt: skip
        else:
            block = tl.program_id(0) - programs
            p, col, begin, width = _projection(block, w0, w1, w2, BLOCK_N)
            of_out = (weight_ptr, begin + col, begin + width, in_features)
            first = load_weights(of_out, tl.arange(0, BLOCK_K), EVEN)
            b = load_projections(slots, (table, site, num_sites), p, weight_ptr)
            first_b = load_first_b(b, col, width)
            wait(PDL)
            acc = weigh(first, of_out, of_x, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, STAGES, PRECISION)
            acc = add_low_rank(acc, b, first_b, low, col, width, programs)
            _store(to_out, acc, begin + col, begin + width, BIAS)


@triton.jit
def _projection(
    block: tl.tensor, w0: tl.tensor, w1: tl.tensor, w2: tl.tensor, BLOCK_N: tl.constexpr
) -> tuple[Any, Any, Any, Any]:
    """Of a block of columns: its projection, columns in that, its first column and its width."""
    n0, n1 = tl.cdiv(w0, BLOCK_N), tl.cdiv(w1, BLOCK_N)
    p = (block >= n0).to(tl.int32) + (block >= n0 + n1).to(tl.int32)
    before = tl.where(p == 0, 0, tl.where(p == 1, n0, n0 + n1))
    begin = tl.where(p == 0, 0, tl.where(p == 1, w0, w0 + w1))
    width = tl.where(p == 0, w0, tl.where(p == 1, w1, w2))
    return p, (block - before) * BLOCK_N + tl.arange(0, BLOCK_N), begin, width


@triton.jit
def _store(
    to_out: tl.tuple, acc: tl.tensor, n: tl.tensor, end: tl.tensor, BIAS: tl.constexpr
) -> None:
    """acc: float32 `[BLOCK_N, BLOCK_M]`."""
    row_ptr, live, bias_ptr = to_out
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < end, other=0.0).to(tl.float32)[:, None]
    at = row_ptr[None, :] + n[:, None]
    tl.store(at, acc.to(row_ptr.dtype.element_ty), mask=live[None, :] & (n < end)[:, None])
