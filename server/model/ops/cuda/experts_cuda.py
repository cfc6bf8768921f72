"""Experts of a layer by the GPU's kernels."""

import torch

from loraplex.server.kernels.launch.configs import KernelConfigs
from loraplex.server.kernels.moe.choose import ChoiceRule, assign_experts
from loraplex.server.kernels.moe.expert_lora import ExpertLora, add_expert_lora
from loraplex.server.kernels.moe.grouped import (
    ExpertTiles,
    GroupedShape,
    grouped_product,
    grouped_shape,
    row_product,
    rows_are_few,
)
from loraplex.server.kernels.moe.row_lora import MOST_ROWS, activated_row_lora, add_row_lora
from loraplex.server.kernels.pointwise.gated import ExpertActivation, gated
from loraplex.server.model.linear.linear import ExpertsLinear, MoeWeights
from loraplex.server.model.lora.lora import AdapterTable
from loraplex.server.model.lora.sites import BranchSites
from loraplex.server.model.ops import products_torch
from loraplex.server.model.ops.cuda.device_lora import DeviceLora
from loraplex.server.model.ops.cuda.lora_linear import ByExperts, Products


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
        chosen: torch.Tensor | None = None,
    ) -> ByExperts:
        """Choose experts by logits `[tokens, experts]`, and compute these, with LoRA, as `Ops.moe`
        says. sites: of the experts. chosen: as of `assign_experts`."""
        spec = weights.spec
        shape = grouped_shape(len(x), spec.top_k, spec.experts)
        rule, early = choice_rule(weights, x.dtype), self._early
        tiles, shares = assign_experts(
            logits, spec.top_k, shape.tile_rows, rule, chosen, programmatic_launch=early
        )
        cut, activation = (tiles, shape), spec.activation
        if lora is None:
            inner = self._product(x, weights.gate_up, cut, activation)
            return ByExperts(self._product(inner, weights.down, cut), shares)
        of_gate_up, of_down = (
            ExpertLora(self._table, site.number, site.out_features, lora.slots) for site in sites
        )
        inner = self._activated_adapted(x, weights.gate_up, cut, of_gate_up, activation)
        return ByExperts(self._adapted(inner, weights.down, cut, of_down), shares)

    def _product(
        self,
        x: torch.Tensor,
        linear: ExpertsLinear,
        cut: tuple[ExpertTiles, GroupedShape],
        activation: ExpertActivation | None = None,
    ) -> torch.Tensor:
        weight, early, tiles = linear.weight, self._early, cut[0]
        if isinstance(weight, torch.Tensor) and rows_are_few(
            len(tiles.order) // tiles.top_k, tiles.top_k, len(weight)
        ):
            return row_product(
                x, weight, linear.bias, tiles.experts, activation, programmatic_launch=early
            )
        return grouped_product(x, weight, linear.bias, *cut, activation, programmatic_launch=early)

    def _activated_adapted(
        self,
        x: torch.Tensor,
        linear: ExpertsLinear,
        cut: tuple[ExpertTiles, GroupedShape],
        lora: ExpertLora,
        activation: ExpertActivation,
    ) -> torch.Tensor:
        """The activation of the product of gate and up, or of up alone, with its LoRA."""
        y, early = self._product(x, linear, cut), self._early
        if len(y) <= MOST_ROWS:
            return activated_row_lora(x, y, cut[0], lora, activation, programmatic_launch=early)
        add_expert_lora(x, y, cut[0], lora, programmatic_launch=early)
        if activation == "relu2":
            return products_torch.activated(y, activation)
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


def choice_rule(weights: MoeWeights, dtype: torch.dtype) -> ChoiceRule:
    """The rule of a layer's router. dtype: of the model."""
    spec = weights.spec
    return ChoiceRule(
        of_chosen=spec.rule == "top_k_softmax" or spec.is_normed,
        rounded=None if spec.wide_weights else dtype,
        sigmoid=spec.by_sigmoid,
        floor=spec.norm_floor,
        added=spec.norm_added,
        factor=spec.factor,
        groups=spec.groups,
        of_group=spec.best_of_group,
        correction=weights.correction,
        scales=weights.scales,
    )
