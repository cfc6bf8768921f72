"""Experts of a layer by the GPU's kernels."""

import torch

from loraplex.server.kernels.launch.configs import KernelConfigs
from loraplex.server.kernels.moe.choose import assign_experts
from loraplex.server.kernels.moe.expert_lora import ExpertLora, add_expert_lora
from loraplex.server.kernels.moe.grouped import GroupedShape, grouped_product, grouped_shape
from loraplex.server.kernels.moe.row_lora import MOST_ROWS, add_row_lora, gated_row_lora
from loraplex.server.kernels.moe.row_product import row_product, rows_are_few
from loraplex.server.kernels.moe.tiles import ExpertTiles
from loraplex.server.kernels.pointwise.gated import GatedActivation, gated
from loraplex.server.model.linear.experts import ExpertsLinear, MoeWeights
from loraplex.server.model.lora.lora import AdapterTable
from loraplex.server.model.lora.sites import BranchSites, Site
from loraplex.server.model.ops.device_lora import DeviceLora
from loraplex.server.model.ops.lora_linear import ByExperts
from loraplex.server.model.ops.products import Products


class Experts:
    """Compute the experts of any layer. A captured step stays valid for any choice, and for any
    adapters.
    """

    def __init__(self, configs: KernelConfigs, products: Products, table: AdapterTable) -> None:
        self._products, self._table = products, table.device_table
        self._early = configs.programmatic_launch

    def run(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        weights: MoeWeights,
        lora: DeviceLora | None,
        sites: BranchSites,
    ) -> ByExperts:
        """Choose experts by logits `[tokens, experts]`, and compute these, with LoRA, as `Ops.moe`
        says. sites: of the experts."""
        spec = weights.spec
        shape = grouped_shape(len(x), spec.top_k, spec.experts)
        tiles, shares = assign_experts(
            logits,
            spec.top_k,
            shape.tile_rows,
            of_chosen=spec.rule != "softmax_top_k",
            rounded=not spec.wide_weights,
            scales=weights.scales,
            programmatic_launch=self._early,
        )
        cut, activation = (tiles, shape), spec.activation
        if activation == "relu2":
            raise TypeError("no kernel computes experts without gate")
        if lora is None:
            inner = self._product(x, weights.gate_up, cut, activation)
            return ByExperts(self._product(inner, weights.down, cut), shares)
        of_gate_up, of_down = (self._lora_at(site, lora) for site in sites)
        inner = self._gated_adapted(x, weights.gate_up, cut, of_gate_up, activation)
        return ByExperts(self._adapted(inner, weights.down, cut, of_down), shares)

    def _lora_at(self, site: Site, lora: DeviceLora) -> ExpertLora:
        return ExpertLora(self._table, site.number, site.out_features, lora.slots)

    def _product(
        self,
        x: torch.Tensor,
        linear: ExpertsLinear,
        cut: tuple[ExpertTiles, GroupedShape],
        activation: GatedActivation | None = None,
    ) -> torch.Tensor:
        weight, early, tiles = linear.weight, self._early, cut[0]
        if isinstance(weight, torch.Tensor) and rows_are_few(
            len(tiles.order) // tiles.top_k, tiles.top_k, len(weight)
        ):
            return row_product(
                x, weight, linear.bias, tiles.experts, activation, programmatic_launch=early
            )
        return grouped_product(x, weight, linear.bias, *cut, activation, programmatic_launch=early)

    def _gated_adapted(
        self,
        x: torch.Tensor,
        linear: ExpertsLinear,
        cut: tuple[ExpertTiles, GroupedShape],
        lora: ExpertLora,
        activation: GatedActivation,
    ) -> torch.Tensor:
        """The activation of the product of gate and up with its LoRA."""
        y, early = self._product(x, linear, cut), self._early
        if len(y) <= MOST_ROWS:
            return gated_row_lora(x, y, cut[0], lora, activation, programmatic_launch=early)
        add_expert_lora(x, y, cut[0], lora, programmatic_launch=early)
        return gated(y, None, activation, programmatic_launch=early)

    def _adapted(
        self,
        x: torch.Tensor,
        linear: ExpertsLinear,
        cut: tuple[ExpertTiles, GroupedShape],
        lora: ExpertLora,
    ) -> torch.Tensor:
        """The product with its LoRA."""
        y = self._product(x, linear, cut)
        add = add_row_lora if len(y) <= MOST_ROWS else add_expert_lora
        add(x, y, cut[0], lora, programmatic_launch=self._early)
        return y
