"""Residual sum and RMS norms (arXiv:1910.07467) around it, with what LoRA computed beside the
product."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import follow
from loraplex.server.kernels.linear.round_rows import rounded_arguments, store_rounded
from loraplex.server.kernels.linear.row_form import Rounding
from loraplex.server.kernels.lora.pending import PendingDelta, delta_arguments
from loraplex.server.kernels.lora.tiles import touches

# Weight `[features]` and epsilon.
RmsNorm = tuple[torch.Tensor, float]
_Delta = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]


class ExpertTerms(NamedTuple):
    """Terms of a row, which experts give. results: `[rows * top_k, features]`, contiguous;
    weights: float32 `[rows, top_k]`. beside: `[rows, features]`, contiguous, a term of its own;
    None = none.
    """

    results: torch.Tensor
    weights: torch.Tensor
    beside: torch.Tensor | None = None


def add_norm(
    y: torch.Tensor,
    pending: PendingDelta | None,
    hidden: torch.Tensor,
    norm: RmsNorm | None,
    post: RmsNorm | None = None,
    factors: tuple[float, float] = (1.0, 1.0),
    *,
    rounding: Rounding | None = None,
    programmatic_launch: bool,
) -> None:
    """Add a product to the residual stream, and norm the sum: `hidden = kept * hidden + factor *
    post(y + delta)`, then `y = norm(hidden)`; the delta only of rows whose adapter touches the
    site. factors: factor and kept. Without post the sum is taken as it is; without norm y is not
    written. rounding: takes the normed rows, too.

    y, hidden, delta: `[rows, features]`, of one dtype, contiguous; weights of any. In float32; one
    kernel, no allocation. Raises ValueError on a mismatch.
    """
    check_norms(y, hidden, post, norm)
    delta, lora = delta_arguments(y, pending), pending is not None
    switches = {"ADD": True, "LORA": lora, "PDL": programmatic_launch}
    _launch(y, (y, None, delta, None), hidden, (post, factors, norm), rounding, switches)


def add_experts_norm(
    terms: ExpertTerms,
    hidden: torch.Tensor,
    norm: RmsNorm | None,
    post: RmsNorm | None = None,
    factors: tuple[float, float] = (1.0, 1.0),
    *,
    rounding: Rounding | None = None,
    programmatic_launch: bool,
) -> torch.Tensor:
    """Sum the results of experts, add them to hidden, and norm the sum, as `add_norm` does with y =
    the weighted sum of what a row's experts give, and no delta -> the normed rows, in a tensor
    of their own; without norm hidden itself. The sum is in the order of the weights, what lies
    beside last, so a row's result does not depend on the batch. One kernel.
    """
    y = hidden if norm is None else torch.empty_like(hidden)
    check_norms(y, hidden, post, norm)
    results, weights, beside = terms
    if beside is not None:
        check_norms(beside, hidden)
    if results.shape != (weights.numel(), y.shape[1]) or len(weights) != len(y):
        raise ValueError(f"{list(results.shape)} of {list(weights.shape)} for {list(y.shape)}")
    added = (results, weights, delta_arguments(results, None), beside)
    switches = {"ADD": True, "LORA": False, "PDL": programmatic_launch}
    _launch(y, added, hidden, (post, factors, norm), rounding, switches)
    return y


def rms_norm(
    hidden: torch.Tensor,
    norm: RmsNorm,
    rounding: Rounding | None = None,
    *,
    programmatic_launch: bool,
) -> torch.Tensor:
    """The norm of `[rows, features]`, contiguous, in a tensor of its own; as in `add_norm`."""
    y = torch.empty_like(hidden)
    check_norms(y, hidden, norm)
    terms = (y, None, delta_arguments(y, None), None)
    switches = {"ADD": False, "LORA": False, "PDL": programmatic_launch}
    _launch(y, terms, hidden, (None, (1.0, 1.0), norm), rounding, switches)
    return y


def check_norms(y: torch.Tensor, hidden: torch.Tensor, *norms: RmsNorm | None) -> None:
    """Check that tensors and norms fit each other. Raises ValueError where they do not."""
    for name, other in (("y", y), ("hidden", hidden)):
        if other.shape != y.shape or other.dtype != y.dtype or not other.is_contiguous():
            raise ValueError(f"{name} is {other.dtype} {list(other.shape)}, y {list(y.shape)}")
    for norm in norms:
        if norm is not None and norm[0].shape != y.shape[1:]:
            raise ValueError(f"a norm of {list(norm[0].shape)} features, y {list(y.shape)}")


def _launch(
    out: torch.Tensor,
    terms: tuple[torch.Tensor, torch.Tensor | None, _Delta, torch.Tensor | None],
    hidden: torch.Tensor,
    norms: tuple[RmsNorm | None, tuple[float, float], RmsNorm | None],
    rounding: Rounding | None,
    switches: dict[str, bool],
) -> None:
    """Launch the kernel that adds and norms. terms: what is added, in parts of these weights, its
    delta, and what lies beside. norms: that of the term, the factors, that of the sum.
    """
    rows, features = out.shape
    if rows == 0:
        return
    y, weights, delta, beside = terms
    post, factors, norm = norms
    _add_norm_kernel[(rows,)](
        out,
        y,
        y if weights is None else weights,
        beside,
        *delta,
        hidden,
        *(post or (hidden, 0.0)),
        *factors,
        *(norm or (hidden, 0.0)),
        rows,
        None if rounding is None else rounded_arguments(*rounding),
        FEATURES=features,
        BLOCK=triton.next_power_of_2(features),
        PARTS=0 if weights is None else weights.shape[1],
        POST=post is not None,
        SCALED=factors != (1.0, 1.0),
        NORM=norm is not None,
        ROUND=rounding is not None,
        GROUP=0 if rounding is None else rounding[1].groups,
        num_warps=8,
        launch_pdl=switches["PDL"],
        **switches,
    )


@triton.jit(
    do_not_specialize=["site", "num_sites", "post_epsilon", "factor", "kept", "epsilon", "rows"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _add_norm_kernel(
    out_ptr: tl.tensor,
    y_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    beside_ptr: tl.tensor,
    delta_ptr: tl.tensor,
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
    rows: tl.tensor,
    to_rounded: tl.tuple,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    POST: tl.constexpr,
    SCALED: tl.constexpr,
    NORM: tl.constexpr,
    ROUND: tl.constexpr,
    GROUP: tl.constexpr,
    ADD: tl.constexpr,
    LORA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """PARTS: rows of y that are summed to one, 0 = a row of y is one of the result."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < FEATURES
    at = row * FEATURES + n
    if ADD:
        y = _term(y_ptr, weights_ptr, row, n, inside, FEATURES, PARTS)
        if beside_ptr is not None:
            y += tl.load(beside_ptr + at, mask=inside, other=0.0).to(tl.float32)
    hidden = tl.load(hidden_ptr + at, mask=inside, other=0.0).to(tl.float32)
    norms = load_norms(
        post_ptr + n, post_epsilon, factor, weight_ptr + n, epsilon, inside, POST, NORM
    )
    if LORA:
        # Read beside the chain slot -> rank, not after it, and dropped where it means nothing.
        delta = tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y += tl.where(touches(slots_ptr + row, ints_ptr, site, num_sites, 0), delta, 0.0)
    if ADD:
        if SCALED:
            hidden *= kept
        hidden += branch(y, norms, FEATURES, POST, SCALED)
        tl.store(hidden_ptr + at, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)
    if NORM:
        out = store_normed(out_ptr + at, hidden, norms, inside, FEATURES)
        if ROUND:
            store_rounded(to_rounded, rows, row, out, 0, FEATURES, GROUP)


@triton.jit
def _term(
    y_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    row: tl.tensor,
    n: tl.tensor,
    inside: tl.tensor,
    FEATURES: tl.constexpr,
    PARTS: tl.constexpr,
) -> Any:
    """The term that is added to a row, float32, 0 beyond its features."""
    if PARTS == 0:
        y = tl.load(y_ptr + row * FEATURES + n, mask=inside, other=0.0).to(tl.float32)
    else:
        y = n * 0.0
        for i in tl.static_range(PARTS):
            part = row * PARTS + i
            result = tl.load(y_ptr + part * FEATURES + n, mask=inside, other=0.0)
            y += tl.load(weights_ptr + part) * result.to(tl.float32)
    return y


class Norms(NamedTuple):
    """Norms of a row: that of the term, its factor, and that of the sum.

    Weights `[features]`, float32; what a kernel does not need means nothing.
    """

    post: Any
    post_epsilon: Any
    factor: Any
    weight: Any
    epsilon: Any


@triton.jit
def load_norms(
    post_ptr: tl.tensor,
    post_epsilon: tl.tensor,
    factor: tl.tensor,
    weight_ptr: tl.tensor,
    epsilon: tl.tensor,
    inside: tl.tensor,
    POST: tl.constexpr,
    NORM: tl.constexpr,
) -> Norms:
    """Pointers: `[features]`."""
    weight = tl.load(weight_ptr, mask=inside, other=0.0).to(tl.float32) if NORM else 0.0
    post = tl.load(post_ptr, mask=inside, other=0.0).to(tl.float32) if POST else 0.0
    return Norms(post, post_epsilon, factor, weight, epsilon)


@triton.jit
def branch(
    y: tl.tensor, norms: Norms, FEATURES: tl.constexpr, POST: tl.constexpr, SCALED: tl.constexpr
) -> Any:
    """The addition to the residual, for a row."""
    if POST:
        y = _normed(y, norms.post, norms.post_epsilon, FEATURES)
    if SCALED:
        y *= norms.factor
    return y


@triton.jit
def store_normed(
    out_ptr: tl.tensor,
    hidden: tl.tensor,
    norms: Norms,
    inside: tl.tensor,
    FEATURES: tl.constexpr,
) -> Any:
    """out_ptr: `[features]`, of the row. Returns what it then holds, float32."""
    out = _normed(hidden, norms.weight, norms.epsilon, FEATURES).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr, out, mask=inside)
    return out.to(tl.float32)


@triton.jit
def _normed(x: tl.tensor, weight: tl.tensor, epsilon: tl.tensor, FEATURES: tl.constexpr) -> Any:
    """One row, float32, 0 beyond its features."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / FEATURES + epsilon) * weight
