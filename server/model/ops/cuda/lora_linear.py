"""A linear of the base with its adapters' LoRA, by the strategy of its site and regime."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, assert_never

import torch

from loraplex.server.kernels.launch.configs import KernelConfigs, Phase
from loraplex.server.kernels.linear.skinny_lora import SkinnyLora, skinny_product_lora
from loraplex.server.kernels.lora.expand import expand
from loraplex.server.kernels.lora.pending import PendingDelta, PendingLora
from loraplex.server.kernels.lora.scale_outputs import scale_outputs
from loraplex.server.kernels.lora.shrink import gather_embedding, shrink
from loraplex.server.kernels.lora.table import LoraTable
from loraplex.server.kernels.lora.workspace import Workspace
from loraplex.server.kernels.pointwise.add_norm import ExpertTerms
from loraplex.server.kernels.pointwise.shared_terms import SharedTerms
from loraplex.server.model.linear.dense import DenseLinear
from loraplex.server.model.linear.linear import Linear
from loraplex.server.model.lora.sites import Site
from loraplex.server.model.ops.cuda.device_lora import DeviceLora
from loraplex.server.model.ops.cuda.lora_strategy import Strategy
from loraplex.server.model.ops.cuda.products import Products
from loraplex.server.model.ops.pointwise import wide_logits


@dataclass(frozen=True, slots=True)
class Ready:
    """Product that is complete. y: `[tokens, out]`, complete."""

    y: torch.Tensor


@dataclass(frozen=True, slots=True)
class WithDelta:
    """Product whose LoRA is still to be added. y: `[tokens, out]` of the base; delta: what its
    consumer adds.
    """

    y: torch.Tensor
    delta: PendingDelta


@dataclass(frozen=True, slots=True)
class Unsummed:
    """Product that is still to be summed over devices. y: `[tokens, out]`, this device's term of a
    sum; delta: as in WithDelta, of all devices; None = LoRA is in y. terms: of all devices,
    which the consumer sums.
    """

    y: torch.Tensor
    delta: PendingDelta | None
    terms: SharedTerms


@dataclass(frozen=True, slots=True)
class Deferred:
    """Product whose LoRA is still to be expanded. y: `[tokens, out]` of the base; lora: what its
    consumer expands, with launch parameters of this phase. shrunk: where the consumer leaves its
    result shrunk for the next site; None = nowhere.
    """

    y: torch.Tensor
    lora: PendingLora
    phase: Phase
    shrunk: Workspace | None = None


@dataclass(frozen=True, slots=True)
class ByExperts:
    """Product of experts that is still to be summed. y, weights, beside: results, weights and
    beside of `ExpertTerms`, which its consumer sums.
    """

    y: torch.Tensor
    weights: torch.Tensor
    beside: torch.Tensor | None = None

    @property
    def terms(self) -> ExpertTerms:
        return ExpertTerms(self.y, self.weights, self.beside)


# What a linear, or a layer's experts, leave to the operation that takes the output.
LinearOutput = Ready | WithDelta | Unsummed | Deferred | ByExperts


class Gemm(NamedTuple):
    """Operands of a product. x: `[tokens, in]`; y: `[tokens, out]`, which the linear of x is
    written to.
    """

    x: torch.Tensor
    linear: Linear
    y: torch.Tensor


class LoraLinear:
    """Compute products with LoRA. Owns the stream on which one runs beside the other."""

    def __init__(
        self, configs: KernelConfigs, table: LoraTable, products: Products, device: torch.device
    ) -> None:
        self._configs, self._table, self._products = configs, table, products
        self._side = torch.cuda.Stream(device)

    def run(
        self, gemm: Gemm, lora: DeviceLora, site: Site, delta: torch.Tensor | None = None
    ) -> LinearOutput:
        """The base's linear, with its LoRA or with what is left of that. delta: where a delta is to
        lie, as gemm.y; None: anywhere."""
        match lora.strategies[site.role]:
            case Strategy.FUSED:
                return self._fused(gemm, lora, site)
            case Strategy.DELTA:
                return self._delta(gemm, lora, site, delta)
            case Strategy.DELTA_OF_SHRUNK:
                return self._delta(gemm, lora, site, None, _down(lora))
            case Strategy.IN_PLACE:
                return self._in_place(gemm, lora, site)
            case Strategy.DEFER:
                return Deferred(gemm.y, self._deferred(gemm, lora, site), lora.phase)
            case Strategy.DEFER_AND_SHRINK_NEXT:
                pending = self._deferred(gemm, lora, site)
                return Deferred(gemm.y, pending, lora.phase, _down(lora))
            case strategy:
                assert_never(strategy)

    def add(self, x: torch.Tensor, y: torch.Tensor, lora: DeviceLora, site: Site) -> None:
        """Shrink and expand in line: `y += scale * B (A x)`, for the head."""
        _scale(y, lora, site)
        self._shrink(x, lora, site, after_input=False)
        self._expand(y, lora, site, lora.workspace, accumulate=True)

    def router(
        self, x: torch.Tensor, router: DenseLinear, lora: DeviceLora, site: Site
    ) -> torch.Tensor:
        """A router's logits with LoRA in float32: `[tokens, in]` -> `[tokens, experts]`."""
        if lora.strategies[site.role] is Strategy.FUSED:
            y = x.new_empty(len(x), router.out_features, dtype=torch.float32)
            return self._fused(Gemm(x, router, y), lora, site).y
        y = wide_logits(x, router)
        found = torch.zeros(y.shape, dtype=x.dtype, device=x.device)
        _scale(y, lora, site)
        self._shrink(x, lora, site, after_input=False)
        self._expand(found, lora, site, lora.workspace, accumulate=True)
        return y + found

    def add_embedding(
        self, token_ids: torch.Tensor, y: torch.Tensor, lora: DeviceLora, site: Site
    ) -> None:
        """Add LoRA to the embedding of token_ids, int `[tokens]`."""
        _scale(y, lora, site)
        ids = token_ids.to(torch.int32)
        gather_embedding(ids, self._table, site.number, lora.segments, lora.workspace)
        self._expand(y, lora, site, lora.workspace, accumulate=True)

    # ---- strategies

    def _fused(self, gemm: Gemm, lora: DeviceLora, site: Site) -> Ready:
        kernel, base = lora.kernel, gemm.linear
        if kernel is None:
            raise TypeError("a batch without a fused kernel")
        if not isinstance(base, DenseLinear):
            raise TypeError("quantised linears have no kernel with LoRA in it")
        low_rank = SkinnyLora(
            self._table, site.number, lora.slots, site.out_features, lora.workspace, kernel.stack
        )
        skinny_product_lora(gemm.x, base.weight, base.bias, gemm.y, kernel.config, low_rank)
        return Ready(gemm.y)

    def _delta(
        self,
        gemm: Gemm,
        lora: DeviceLora,
        site: Site,
        delta: torch.Tensor | None,
        shrunk: Workspace | None = None,
    ) -> WithDelta:
        """shrunk: what the activation before has left; None = shrink comes first."""
        with self._beside(gemm, lora, site):
            if shrunk is None:
                self._shrink(gemm.x, lora, site, after_input=lora.phase != "prefill")
            delta = torch.empty_like(gemm.y) if delta is None else delta
            self._expand(delta, lora, site, shrunk or lora.workspace, accumulate=False)
        return WithDelta(gemm.y, PendingDelta(self._table, site.number, lora.slots, delta))

    def _in_place(self, gemm: Gemm, lora: DeviceLora, site: Site) -> Ready:
        pending = self._deferred(gemm, lora, site)
        self._expand(gemm.y, lora, site, pending.workspace, accumulate=True)
        return Ready(gemm.y)

    def _deferred(self, gemm: Gemm, lora: DeviceLora, site: Site) -> PendingLora:
        """Shrink beside the linear; expand is to come."""
        with self._beside(gemm, lora, site):
            self._shrink(gemm.x, lora, site, after_input=lora.phase != "prefill")
        return PendingLora(self._table, site.number, lora.segments, lora.workspace)

    # ---- kernels and streams

    @contextmanager
    def _beside(self, gemm: Gemm, lora: DeviceLora, site: Site) -> Iterator[None]:
        """Launches the linear beside what the body launches, which comes first. The current stream
        goes on when both are done; also after an error, because the next step must not get memory
        that the other stream still reads.

        In a captured step LoRA has the current stream, so that shrink starts while the kernel that
        wrote x drains. In prefill, which the host launches, the linear has the current stream, so
        that its consumer starts sooner.
        """
        main, side = torch.cuda.current_stream(), self._side
        of_lora, of_linear = (side, main) if lora.phase == "prefill" else (main, side)
        side.wait_stream(main)
        try:
            with torch.cuda.stream(of_lora):
                yield
            with torch.cuda.stream(of_linear):
                self._products.linear(*gemm, beside_lora=True)
                _scale(gemm.y, lora, site)
        finally:
            main.wait_stream(side)

    def _shrink(self, x: torch.Tensor, lora: DeviceLora, site: Site, *, after_input: bool) -> None:
        config = self._configs.shrink(lora.phase, len(x))
        context = (self._table, site.number, lora.segments, lora.workspace, config)
        shrink(x, *context, after_input=after_input)

    def _expand(
        self, y: torch.Tensor, lora: DeviceLora, site: Site, shrunk: Workspace, *, accumulate: bool
    ) -> None:
        """Expand the shrunk rows into y. shrunk: what the site's shrink left."""
        config = self._configs.expand(lora.phase, len(y))
        context = (self._table, site.number, lora.segments, shrunk, config)
        expand(y, site.out_features, *context, accumulate=accumulate, after_gemm=True)


def _scale(y: torch.Tensor, lora: DeviceLora, site: Site) -> None:
    """Apply the adapters' factors and biases to the base's own product y."""
    if lora.vectors is not None:
        scale_outputs(y, lora.slots, lora.vectors, site.number)


def _down(lora: DeviceLora) -> Workspace:
    if lora.down is None:
        raise TypeError("a batch whose activation does not shrink")
    return lora.down
