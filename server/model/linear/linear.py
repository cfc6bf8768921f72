"""A matrix of the base, or those of a layer of experts, as stored on the device."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from loraplex.server.kernels.linear.matrix import PackedMatrix
from loraplex.server.model.linear.dense import DenseLinear, Product
from loraplex.server.model.linear.norm import Norm
from loraplex.server.model.linear.quantised import QuantisedLinear, RoundedLinear
from loraplex.server.model.spec.moe_spec import MoeSpec

Linear = DenseLinear | QuantisedLinear | RoundedLinear


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsLinear(Product):
    """Product with the matrices of experts: `x W^T + bias` of one expert or another. weight:
    `[experts, out_features, in_features]`, or as many quantised matrices, the rows of gate
    before those of up; bias: `[experts, out_features]`.
    """

    weight: torch.Tensor | PackedMatrix
    bias: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        matrices = self.weight.matrices if isinstance(self.weight, PackedMatrix) else 1
        return self.weight.shape[-2] // matrices

    def run(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """The product of one expert: x `[rows, in_features]` -> `[rows, out_features]`."""
        bias = None if self.bias is None else self.bias[expert]
        if isinstance(self.weight, PackedMatrix):
            return QuantisedLinear(self.weight.matrix(expert), bias, x.dtype).run(x)
        return functional.linear(x, self.weight[expert], bias)


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Weights of a layer of experts, as `spec` says. router: its product are the
    experts' logits. correction, scales: float32 `[experts]`. router_norm, latent: see
    `MoeSpec`.
    """

    spec: MoeSpec
    router: DenseLinear
    gate_up: ExpertsLinear
    down: ExpertsLinear
    correction: torch.Tensor | None = None
    router_norm: Norm | None = None
    scales: torch.Tensor | None = None
    latent: tuple[Linear, ...] = ()

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that every token is multiplied with."""
        return (self.router, *self.latent)
