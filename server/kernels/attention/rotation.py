"""Norm and rotation of q and k, as all kernels share them.

A head is a list of pairs of features, in float32. Those that turn come first. In a cached key, and
in the query beside it, the first features of all pairs lie before the second ones, whatever their
order in the linear's output: scores are the same for every order that both have.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import follow
from loraplex.server.kernels.lora.pending import PendingDelta, delta_arguments
from loraplex.server.kernels.lora.record import touches


@dataclass(frozen=True, slots=True)
class Rotation:
    """How positions turn q and k.

    cos_sin: float32 `[positions, 2 n]`, cosines first, of the n pairs that turn; 0 of them turn
    nothing. interleaved: pairs are neighbours, `x[2 i]` and `x[2 i + 1]`; else halves, `x[i]` and
    `x[i + n]`. q_scale: float32 `[positions]`, a factor of queries, or None.
    """

    cos_sin: torch.Tensor
    interleaved: bool = False
    q_scale: torch.Tensor | None = None

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos_sin and q_scale, or what stands in for it."""
        return self.cos_sin, self.cos_sin if self.q_scale is None else self.q_scale

    def switches(self, head_dim: int) -> dict[str, Any]:
        """Constants of kernels. Raises ValueError where more turns than a head has."""
        pairs = self.cos_sin.shape[1] // 2
        if 2 * pairs > head_dim:
            raise ValueError(f"{2 * pairs} features turn, a head has {head_dim}")
        scaled = self.q_scale is not None
        return {"PAIRS": pairs, "INTERLEAVED": self.interleaved, "SCALED": scaled}


@dataclass(frozen=True, slots=True)
class QkNorm:
    """An RMS norm of q and k before the rotation. weights: `[heads + kv_heads, head_dim]`, or of
    q alone. all_heads: over all heads of q together, and over those of k; else over each head.
    values: over each value, too, without weights; not with all_heads."""

    weights: torch.Tensor
    epsilon: float
    all_heads: bool = False
    values: bool = False


def norm_arguments(
    norm: QkNorm | None, qkv: torch.Tensor, factors: torch.Tensor | None
) -> tuple[torch.Tensor, float, torch.Tensor]:
    """Weights, epsilon and factors, or what stands in for them."""
    weights, epsilon = (qkv, 0.0) if norm is None else (norm.weights, norm.epsilon)
    return weights, epsilon, qkv if factors is None else factors


def norm_switch(norm: QkNorm | None) -> int:
    """The constant NORM of kernels: 0 = without, 1 = of each head, 2 = of all heads, 3 = of each
    head, and of values."""
    if norm is None:
        return 0
    if norm.all_heads:
        return 2
    return 3 if norm.values else 1


def norm_factors(
    qkv: torch.Tensor,
    pending: PendingDelta | None,
    norm: QkNorm | None,
    sizes: tuple[int, int],
    *,
    programmatic_launch: bool,
) -> torch.Tensor | None:
    """Factors of q and k by a norm over all heads, before its weights: float32 `[tokens, 2]`.

    None where there is no such norm. One kernel. qkv: `[tokens, features]`, contiguous; pending:
    LoRA of it. sizes: features of q, and of k.
    """
    if norm is None or not norm.all_heads:
        return None
    tokens, features = qkv.shape
    factors = torch.empty(tokens, 2, dtype=torch.float32, device=qkv.device)
    if tokens:
        _norm_factors_kernel[(tokens, 2)](
            qkv,
            *delta_arguments(qkv, pending),
            factors,
            norm.epsilon,
            FEATURES=features,
            Q=sizes[0],
            K=sizes[1],
            BLOCK=triton.next_power_of_2(max(sizes)),
            LORA=pending is not None,
            PDL=programmatic_launch,
            num_warps=8,
            launch_pdl=programmatic_launch,
        )
    return factors


@triton.jit(
    do_not_specialize=["site", "num_sites", "epsilon"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _norm_factors_kernel(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    factors_ptr: tl.tensor,
    epsilon: tl.tensor,
    FEATURES: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    LORA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program takes q or k of one token."""
    follow(PDL)
    row, projection = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, BLOCK)
    size = tl.where(projection == 0, Q, K)
    at = row * FEATURES + projection * Q + n
    x = tl.load(x_ptr + at, mask=n < size, other=0.0).to(tl.float32)
    if LORA:
        # Read beside the chain slot -> rank, not after it, and dropped where it means nothing.
        delta = tl.load(delta_ptr + at, mask=n < size, other=0.0).to(tl.float32)
        touched = touches(slots_ptr + row, ints_ptr, site, num_sites, projection)
        x += tl.where(touched, delta, 0.0)
    tl.store(factors_ptr + row * 2 + projection, tl.rsqrt(tl.sum(x * x, axis=0) / size + epsilon))


@triton.constexpr_function
def in_halves(pairs: int, interleaved: bool, half: int) -> bool:
    """Whether a head's features lie as cached keys have them."""
    return not interleaved and pairs in (0, half)


@triton.jit
def pair_columns(
    d: tl.tensor,
    turned: tl.tensor,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[Any, Any]:
    """Where in a head the first feature of pair d lies, and how far behind it the second one; where
    not turned, in halves."""
    if in_halves(PAIRS, INTERLEAVED, HALF):
        return d, HALF
    elif INTERLEAVED:
        return tl.where(turned, 2 * d, d), tl.where(turned, 1, HALF)
    else:
        column = tl.where(turned & (d >= PAIRS), d + PAIRS, d)
        return column, tl.where(turned, tl.where(d < PAIRS, PAIRS, HALF - PAIRS), HALF)


@triton.jit
def load_angles(
    tables: tl.tuple,
    position: tl.tensor,
    d: tl.tensor,
    live: tl.tensor,
    is_q: tl.tensor,
    PAIRS: tl.constexpr,
    SCALED: tl.constexpr,
) -> tuple[Any, Any]:
    """Cosine and sine of pairs d. tables: as of `Rotation`."""
    angle = tables[0] + position * (2 * PAIRS) + d
    cos = tl.load(angle, mask=live & (d < PAIRS), other=1.0)
    sin = tl.load(angle + PAIRS, mask=live & (d < PAIRS), other=0.0)
    if SCALED:
        factor = tl.where(is_q, tl.load(tables[1] + position), 1.0)
        cos, sin = cos * factor, sin * factor
    return cos, sin


@triton.jit
def head_factor(first: tl.tensor, second: tl.tensor, epsilon: tl.tensor, HALF: tl.constexpr) -> Any:
    """The factor of each head by an RMS norm, before its weights: `[heads, 1]`."""
    mean = tl.sum(first * first + second * second, axis=1) / (2 * HALF)
    return tl.rsqrt(mean + epsilon)[:, None]


@triton.jit
def norm_and_rotate(
    raw: tl.tuple,
    weight_ptr: tl.tensor,
    apart: tl.tensor,
    norm: tl.tuple,
    angles: tl.tuple,
    rotated: tl.tensor,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
) -> tuple[Any, Any]:
    """The first and the second features of pairs, float32 `[heads or tokens, BLOCK_D]`, 0 beyond
    HALF; where not rotated, as they are, or normed without weights. weight_ptr: where the norm's
    weights of the first ones lie; apart: as of `pair_columns`. norm: which weights there are,
    epsilon, factor. angles: as of `load_angles`."""
    first, second = raw
    cos, sin = angles
    if NORM != 0:
        normed, epsilon, factor = norm
        if NORM != 2:
            factor = head_factor(first, second, epsilon, HALF)
        if NORM == 3:
            raw = (first * factor, second * factor)
        first *= factor * tl.load(weight_ptr, mask=normed, other=0.0).to(tl.float32)
        second *= factor * tl.load(weight_ptr + apart, mask=normed, other=0.0).to(tl.float32)
    new_first = tl.where(rotated, first * cos - second * sin, raw[0])
    new_second = tl.where(rotated, second * cos + first * sin, raw[1])
    return new_first, new_second
