"""Operations by element that every set of ops takes from torch."""

import torch
from torch.nn import functional

from loraplex.server.model.linear.dense import DenseLinear
from loraplex.server.model.spec.model_spec import Activation, AttentionSpec
from loraplex.server.model.weights import LayerNorm, RmsNorm


def layer_norm(x: torch.Tensor, norm: LayerNorm) -> torch.Tensor:
    """LayerNorm over the last dimension: `[..., features]` -> the same."""
    if norm.scales:
        return x * norm.weight
    return functional.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, norm.epsilon)


def layer_normed_heads(qkv: torch.Tensor, norm: LayerNorm) -> torch.Tensor:
    """Norm each head of q and k. qkv: `[tokens, features]`, of q first, then of k; norm: weights
    `[heads, head_dim]` of these heads, perhaps for each token -> the same shape as qkv."""
    count, size = norm.weight.shape[-2:]
    heads = qkv.view(len(qkv), -1, size)
    normed = functional.layer_norm(heads[:, :count], (size,), eps=norm.epsilon) * norm.weight
    normed = normed if norm.bias is None else normed + norm.bias
    return torch.cat((normed, heads[:, count:]), dim=1).flatten(1)


def rms_norm(x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    """RMS norm over the last dimension, in float32: `[..., features]` -> the same."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.epsilon)
    return (norm.weight * scaled.to(norm.weight.dtype)).to(x.dtype)


def activated(
    x: torch.Tensor, activation: Activation, numbers: torch.Tensor | None = None
) -> torch.Tensor:
    """The activation of every element. numbers: of `xielu`."""
    match activation:
        case "silu":
            return functional.silu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "gelu":
            return functional.gelu(x)
        case "quick_gelu":
            return x * torch.sigmoid(1.702 * x)
        case "relu":
            return functional.relu(x)
        case "relu2":
            return functional.relu(x).square()
        case "tanh":
            return torch.tanh(x)
        case "xielu":
            if numbers is None:
                raise TypeError("xIELU needs its numbers")
            return xielu(x, numbers)


def gated(gate_up: torch.Tensor, activation: Activation, factor: float = 1.0) -> torch.Tensor:
    """`activation(factor * gate) * up` of `[tokens, 2 n]`, gate first -> `[tokens, n]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activated(gate if factor == 1.0 else gate * factor, activation) * up


def without_gate(qkv: torch.Tensor, attention: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Part a product of gated attention. qkv: `[tokens, (2 heads + 2 kv_heads) * head_dim]`, q and
    its gate head by head -> the same without gates, and gates `[tokens, heads * head_dim]`."""
    q_and_gate, kv = qkv.split((2 * attention.q_size, 2 * attention.kv_size), dim=1)
    q, gate = q_and_gate.unflatten(1, (-1, 2, attention.head_dim)).unbind(2)
    return torch.cat((q.flatten(1), kv), dim=1), gate.flatten(1)


def with_values(qkv: torch.Tensor, attention: AttentionSpec) -> torch.Tensor:
    """Norm the values of a product, `[tokens, (heads + 2 kv_heads) * head_dim]`; where keys are
    values it has none -> the same width with them."""
    others = attention.q_size + attention.kv_size
    first = attention.q_size if attention.keys_are_values else others
    values = qkv[:, first : first + attention.kv_size].unflatten(1, (-1, attention.head_dim))
    normed = functional.rms_norm(values, (attention.head_dim,), eps=attention.qk_epsilon)
    return torch.cat((qkv[:, :others], normed.flatten(1)), dim=1)


def xielu(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The activation xIELU (arXiv 2411.13010). numbers: float32 `[4]`, the curvature of positive
    and of negative inputs, the slope, and the largest input of the exponential."""
    wide = x.float()
    positive, negative, slope, epsilon = numbers
    below = (torch.expm1(torch.minimum(wide, epsilon)) - wide) * negative
    curved = torch.where(wide > 0, positive * wide * wide, below)
    found: torch.Tensor = (curved + slope * wide).to(x.dtype)
    return found


def wide_logits(x: torch.Tensor, router: DenseLinear) -> torch.Tensor:
    """A router's logits in float32. x: `[tokens, hidden]` -> `[tokens, experts]`."""
    if not x.is_cuda:
        return functional.linear(x.float(), router.weight.float())
    return torch.mm(x, router.weight.T, out_dtype=torch.float32)
