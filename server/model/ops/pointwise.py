"""Operations by element that every set of ops takes from torch."""

import torch
from torch.nn import functional

from loraplex.server.model.spec.model_spec import Activation
from loraplex.server.model.weights import LayerNorm


def layer_norm(x: torch.Tensor, norm: LayerNorm) -> torch.Tensor:
    """LayerNorm over the last dimension: `[..., features]` -> the same."""
    return functional.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, norm.epsilon)


def activated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation of every element."""
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh")
