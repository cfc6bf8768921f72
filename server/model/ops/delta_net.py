"""Gated DeltaNet in plain torch, token by token: the definition.

A step computes a token of each of its slices at once, then the next of those that have one. So
results do not depend on where prompts are cut.
"""

from collections.abc import Iterable

import torch
from torch.nn import functional

from loraplex.server.model.ops.state_steps import Move
from loraplex.server.model.spec.state_spec import DeltaNetSpec
from loraplex.server.model.weights import DeltaNetWeights

# Under the root of a key's and a query's squares.
_EPSILON = 1e-6


def delta_net(
    moves: Iterable[Move],
    mixed: torch.Tensor,
    gates: torch.Tensor,
    weights: DeltaNetWeights,
    states: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Compute as `Ops.delta_net` says. states: of the layer, which take the tokens; zeros where a
    sequence begins."""
    spec = weights.spec
    window, memory = states
    inputs, z = mixed[:, weights.channels], mixed[:, weights.z_columns]
    b, a = gates[:, weights.gate_columns].float().chunk(2, dim=1)
    kept = (weights.decay * functional.softplus(a + weights.dt_bias)).exp()
    taken = b.sigmoid()
    found = mixed.new_empty(len(mixed), spec.value_heads, spec.value_dim)
    for tokens, rows in moves:
        seen = torch.cat((window[rows], inputs[tokens].unsqueeze(1)), dim=1)
        window[rows] = seen[:, 1:]
        convolved = functional.silu((seen.float() * weights.conv.T.float()).sum(1))
        q, k, v = _heads(spec, convolved.to(mixed.dtype).float())
        state = memory[rows] * kept[tokens, :, None, None]
        known = (state * k.unsqueeze(-1)).sum(-2)
        news = (v - known) * taken[tokens].unsqueeze(-1)
        state += k.unsqueeze(-1) * news.unsqueeze(-2)
        memory[rows] = state
        found[tokens] = (state * q.unsqueeze(-1)).sum(-2).to(found.dtype)
    return _gated_norm(found, z.view_as(found), weights).flatten(1)


def _heads(
    spec: DeltaNetSpec, convolved: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k of each head of v, of length 1, q divided by the root of its size; and v.

    convolved: float32 `[n, channels]` -> `[n, value_heads, key_dim]` twice, `[n, value_heads,
    value_dim]`.
    """
    q, k, v = convolved.split((spec.key_size, spec.key_size, spec.value_size), dim=1)
    shared = spec.value_heads // spec.key_heads
    qk = torch.stack((q, k)).unflatten(-1, (spec.key_heads, spec.key_dim))
    qk = qk * torch.rsqrt(qk.square().sum(-1, keepdim=True) + _EPSILON)
    q, k = qk.repeat_interleave(shared, dim=2)
    return q * spec.key_dim**-0.5, k, v.unflatten(-1, (spec.value_heads, spec.value_dim))


def _gated_norm(found: torch.Tensor, z: torch.Tensor, weights: DeltaNetWeights) -> torch.Tensor:
    """Norm each head's result and multiply it with `silu(z)`: `[tokens, value_heads, value_dim]`
    -> the same."""
    wide = found.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + weights.norm.epsilon)
    normed = weights.norm.weight * scaled.to(found.dtype)
    return (normed * functional.silu(z.float())).to(found.dtype)
