"""A layer of experts on a GPU: choice, two products with LoRA between, and the weighted sum."""

import torch

from server.kernels.moe.choose import choose_experts
from server.kernels.moe.combine import combine_experts
from server.kernels.moe.expert_lora import ExpertLora, add_expert_lora
from server.kernels.moe.grouped import GroupedShape, grouped_product, grouped_shape
from server.kernels.moe.tiles import ExpertTiles, expert_tiles
from server.kernels.pointwise.gated import gated
from server.model.linear.experts import ExpertsLinear, MoeWeights
from server.model.lora.lora import AdapterTable
from server.model.lora.sites import LayerSites, Site
from server.model.ops.device_lora import DeviceLora
from server.model.ops.products import Products


class Experts:
    """For any layer. A captured step stays valid for any choice, and for any adapters."""

    def __init__(self, products: Products, table: AdapterTable) -> None:
        self._products, self._table = products, table.device_table

    def run(
        self, x: torch.Tensor, weights: MoeWeights, lora: DeviceLora | None, sites: LayerSites
    ) -> torch.Tensor:
        """As `Ops.moe`."""
        spec = weights.spec
        logits = self._products.linear(x, weights.router)
        chosen, shares = choose_experts(
            logits,
            spec.top_k,
            of_chosen=spec.rule != "softmax_top_k",
            rounded=not spec.wide_weights,
        )
        shape = grouped_shape(len(x), spec.top_k, spec.experts)
        tiles = expert_tiles(chosen, spec.experts, shape.tile_rows)
        gate_up, down, activation = weights.gate_up, weights.down, spec.activation
        if lora is None or not lora.expert_sites:
            inner = grouped_product(x, gate_up.weight, gate_up.bias, tiles, shape, activation)
            return combine_experts(
                grouped_product(inner, down.weight, down.bias, tiles, shape), shares
            )
        both = self._adapted(x, gate_up, (tiles, shape), lora, sites.gate_up)
        inner = gated(both, None, activation, programmatic_launch=False)
        return combine_experts(self._adapted(inner, down, (tiles, shape), lora, sites.down), shares)

    def _adapted(
        self,
        x: torch.Tensor,
        linear: ExpertsLinear,
        cut: tuple[ExpertTiles, GroupedShape],
        lora: DeviceLora,
        site: Site,
    ) -> torch.Tensor:
        """The product with its LoRA."""
        y = grouped_product(x, linear.weight, linear.bias, *cut)
        of_site = ExpertLora(self._table, site.number, lora.slots)
        add_expert_lora(x, y, site.out_features, cut[0], of_site)
        return y
