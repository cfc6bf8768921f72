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


class StateGates(NamedTuple):
    """How much of a head's state stays at a token, `exp(decay * dt)`, and how much is written: dt,
    which is `softplus(factor * input + bias)` within limits.

    columns: int32, which features of a product `[tokens, features]` have the inputs. In the delta
    rule they are b of each head, then the inputs: it writes `beta * sigmoid(b)` in place of dt.
    decay, bias: float32 `[heads]`. skip: float32 `[heads]`, of what is written, which is added to
    what is read; None = nothing is.
    """

    columns: torch.Tensor
    decay: torch.Tensor
    bias: torch.Tensor
    skip: torch.Tensor | None = None
    limits: tuple[float, float] = (0.0, float("inf"))
    factor: float = 1.0
    beta: int = 1


class StateHeads(NamedTuple):
    """Sizes of a layer. values: heads, a multiple of `keys`."""

    keys: int
    values: int
    key_dim: int
    value_dim: int
