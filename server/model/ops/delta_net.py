"""Gated DeltaNet in plain torch, token by token: the definition.

A step computes a token of each of its slices at once, then the next of those that have one. So
results do not depend on where prompts are cut.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.spec.state_spec import DeltaNetSpec
from loraplex.server.model.weights import DeltaNetWeights

# Under the root of a key's and a query's squares.
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class TokenSteps:
    """The order in which states take a step's tokens. begun: int64 `[n]`, rows whose state begins
    here. moves: tokens of the batch and their rows, int64 `[m]` each; each row at most once."""

    begun: torch.Tensor
    moves: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @classmethod
    def of(cls, layout: StepLayout) -> "TokenSteps":
        device, counts = layout.positions.device, layout.num_new
        begins = np.cumsum(counts) - counts
        begun = to_device(layout.seq_rows[layout.starts == 0], device)
        moves = []
        for move in range(int(counts.max(initial=0))):
            active = counts > move
            packed = to_device(np.stack((begins[active] + move, layout.seq_rows[active])), device)
            moves.append((packed[0], packed[1]))
        return cls(begun, tuple(moves))


def delta_net(
    steps: TokenSteps,
    mixed: torch.Tensor,
    gates: torch.Tensor,
    weights: DeltaNetWeights,
    states: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Compute as `Ops.delta_net` says. states: of the layer, which take the tokens."""
    spec = weights.spec
    window, memory = states
    for state in states:
        state.index_fill_(0, steps.begun, 0)
    inputs, z = mixed[:, weights.channels], mixed[:, weights.z_columns]
    b, a = gates[:, weights.gate_columns].float().chunk(2, dim=1)
    kept = (weights.decay * functional.softplus(a + weights.dt_bias)).exp()
    taken = b.sigmoid()
    found = mixed.new_empty(len(mixed), spec.value_heads, spec.value_dim)
    for tokens, rows in steps.moves:
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
