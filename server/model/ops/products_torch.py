"""Products, norms and activations of any tokens by plain torch: they need no cache and no plan."""

import torch
from torch.nn import functional

from loraplex.server.kernels.pointwise.shared_terms import SharedTerms
from loraplex.server.model.devices.group import DeviceSum
from loraplex.server.model.linear.experts import MoeWeights
from loraplex.server.model.linear.linear import Linear
from loraplex.server.model.lora.lora import LoraBatch
from loraplex.server.model.lora.own_rows import (
    embed_own,
    forbid_others,
    ids_of_base,
    norm_own,
    own_logits,
    widened,
)
from loraplex.server.model.lora.sites import BranchSites, Site
from loraplex.server.model.ops.experts_torch import run_experts
from loraplex.server.model.ops.pointwise import activated, gated, layer_norm, rms_norm
from loraplex.server.model.routed_experts import ChosenExperts
from loraplex.server.model.spec.model_spec import Activation
from loraplex.server.model.weights import LayerNorm, Norm


class TorchProducts:
    """Implement those of `loraplex.server.model.ops.ops.Ops` that take each token alone, for any
    dtype and device. chosen_experts: None = nobody may ask for these.
    """

    chosen_experts: ChosenExperts | None = None

    def embed(
        self, token_ids: torch.Tensor, weight: torch.Tensor, lora: LoraBatch | None, site: Site
    ) -> torch.Tensor:
        if lora is None:
            return functional.embedding(token_ids, weight)
        y = functional.embedding(ids_of_base(lora.own, site.number, token_ids, len(weight)), weight)
        embed_own(lora.own, site.number, token_ids, y)
        lora.add_embedding(site, token_ids, y)
        return y

    def linear(
        self,
        x: torch.Tensor,
        linear: Linear,
        lora: LoraBatch | None,
        site: Site,
        out: torch.Tensor | None = None,
        delta: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y = linear.run(x, out)
        if lora is not None:
            lora.add(site, x, y)
        return y

    def logits(
        self,
        x: torch.Tensor,
        linear: Linear,
        lora: LoraBatch | None,
        site: Site,
        out: torch.Tensor | None = None,
        width: int | None = None,
    ) -> torch.Tensor:
        y = linear.run(x, out)
        if lora is not None:
            lora.add(site, x, y)
            y = y if width is None else widened(y, width)
            own_logits(lora.own, site.number, x, y)
        return y

    def forbid_others(self, logits: torch.Tensor, lora: LoraBatch, site: Site) -> None:
        forbid_others(lora.own, site.number, logits)

    def reduce(self, y: torch.Tensor, over_devices: DeviceSum | None = None) -> torch.Tensor:
        return y if over_devices is None else over_devices(y)

    def complete(self, y: torch.Tensor) -> torch.Tensor:
        return y

    def completed(self, y: torch.Tensor) -> torch.Tensor:
        return y

    def with_terms(self, y: torch.Tensor, terms: SharedTerms) -> torch.Tensor:
        return y

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if isinstance(norm, LayerNorm):
            return layer_norm(x, norm)
        return rms_norm(x, norm)

    def norm_own(
        self, normed: torch.Tensor, hidden: torch.Tensor, lora: LoraBatch, place: int
    ) -> None:
        norm_own(lora.own, place, hidden, normed, self.norm)

    def add_norm(
        self,
        delta: torch.Tensor,
        hidden: torch.Tensor,
        norm: Norm | None,
        post: Norm | None = None,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if post is not None:
            delta = self.norm(delta, post)
        factor, kept = factors
        hidden = hidden if kept == 1.0 else hidden * kept
        hidden = hidden + (delta if factor == 1.0 else delta * factor)
        return hidden if norm is None else self.norm(hidden, norm), hidden

    def let_through(self, attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return attended * gate.sigmoid()

    def gated(
        self, gate_up: torch.Tensor, activation: Activation, factor: float = 1.0
    ) -> torch.Tensor:
        return gated(gate_up, activation, factor)

    def activated(
        self, up: torch.Tensor, activation: Activation, numbers: torch.Tensor | None
    ) -> torch.Tensor:
        return activated(up, activation, numbers)

    def scaled(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return y * gate.sigmoid()

    def plus(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    def moe(
        self,
        x: torch.Tensor,
        routed_by: torch.Tensor,
        weights: MoeWeights,
        lora: LoraBatch | None,
        sites: BranchSites,
    ) -> torch.Tensor:
        return run_experts(x, routed_by, weights, lora, sites, self.chosen_experts)
