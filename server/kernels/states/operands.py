"""Weights and gates that kernels of states take beside tokens. No kernels."""

from typing import NamedTuple

import torch


class Convolution(NamedTuple):
    """A causal convolution by channel of some features of a product.

    columns: int32 `[channels]`, the features that are convolved. weight: `[channels, kernel]`.
    bias: `[channels]`. factors: int32 `[2, channels]`, the features that each input is multiplied
    with, and those of each result; without them each result goes through SiLU.
    """

    columns: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    factors: torch.Tensor | None = None


class GatedNorm(NamedTuple):
    """An RMS norm of groups of features, and a gate that goes through SiLU.

    weight: `[features]`; None = nothing is normed. size: features of a group, which devices may
    share. gate_first: what is normed is multiplied with the gate before, else behind. factor: of
    the gate.
    """

    weight: torch.Tensor | None
    epsilon: float
    size: int
    gate_first: bool = False
    factor: float = 1.0
