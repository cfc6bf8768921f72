"""Weights of attention to latents."""

from dataclasses import dataclass

import torch

from loraplex.server.model.linear.dense import DenseLinear
from loraplex.server.model.linear.linear import Linear
from loraplex.server.model.linear.norm import Norm, RmsNorm
from loraplex.server.model.spec.latent_spec import LatentSpec
from loraplex.server.model.weight_source import WeightSource


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Weights of the device's part, as `spec` says. q_a, q_norm: None where `q_b` reads the layer's
    input. kv_b: in floating point, since its halves are multiplied with apart.
    """

    spec: LatentSpec
    q_a: Linear | None
    kv_a: Linear
    q_b: Linear
    kv_b: DenseLinear
    o: Linear
    q_norm: Norm | None
    latent_norm: RmsNorm

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that every token is multiplied with."""
        first = () if self.q_a is None else (self.q_a,)
        return *first, self.kv_a, self.q_b, self.kv_b, self.o

    @property
    def keys(self) -> torch.Tensor:
        """From latents to each head's key, a view `[heads, nope, latent]`."""
        return self._by_head[:, : self.spec.nope]

    @property
    def values(self) -> torch.Tensor:
        """From latents to each head's value, a view `[heads, value_dim, latent]`."""
        return self._by_head[:, self.spec.nope :]

    @property
    def _by_head(self) -> torch.Tensor:
        return self.kv_b.weight.view(-1, self.spec.nope + self.spec.value_dim, self.spec.latent)


def load_latents(
    source: WeightSource, whole: LatentSpec, layer: int, q_norm: Norm | None, latent_norm: Norm
) -> LatentWeights:
    """Read the device's part of the matrices. whole: of the model."""
    q_a = None if whole.q_a is None else source.linear(whole.q_a, layer)
    kv_a, q_b, kv_b, o = (source.linear(linear, layer) for linear in whole.linears[-4:])
    assert isinstance(latent_norm, RmsNorm)
    dense = DenseLinear(kv_b.dequantised())
    return LatentWeights(whole, q_a, kv_a, q_b, dense, o, q_norm, latent_norm)
