"""The weights of a norm."""

from typing import NamedTuple

import torch


class RmsNorm(NamedTuple):
    """An RMS norm. weight: `[features]`, as it is multiplied; float32 where the spec adds to it."""

    weight: torch.Tensor
    epsilon: float


class LayerNorm(NamedTuple):
    """A LayerNorm. weight, bias: `[features]`. scales: features are multiplied with the weight
    alone, and nothing is normed."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    epsilon: float
    scales: bool = False


Norm = RmsNorm | LayerNorm
