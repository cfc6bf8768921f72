"""Mixers that keep states, in plain torch, token by token: the definition.

A step computes a token of each of its slices at once, then the next of those that have one. So
results do not depend on where prompts are cut.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.nn import functional

from loraplex.server.kernels.states.operands import Convolution, GatedNorm
from loraplex.server.model.ops.state_steps import Move
from loraplex.server.model.spec.state_spec import DeltaNetSpec
from loraplex.server.model.state_weights import (
    DeltaNetWeights,
    StateWeights,
)

# Under the root of a key's and a query's squares.
_EPSILON = 1e-6


def mix_states(
    moves: Iterable[Move],
    products: Sequence[torch.Tensor],
    weights: StateWeights,
    states: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Compute as `Ops.mix_states` says. states: of the layer, which take the tokens; zeros where a
    sequence begins."""
    conv, mixed = weights.conv, products[0]
    inputs = mixed[:, conv.columns]
    if conv.factors is not None:
        inputs = inputs * mixed[:, conv.factors[0]]
    if isinstance(weights, DeltaNetWeights):
        return _delta_net(moves, inputs, products, weights, states)
    found = torch.empty_like(inputs)
    for tokens, rows in moves:
        found[tokens] = _convolve(inputs[tokens], conv, states[0], rows)
    return found if conv.factors is None else found * mixed[:, conv.factors[1]]


def _convolve(
    inputs: torch.Tensor, conv: Convolution, window: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Convolve a token of each row, but for factors: `[rows, channels]` -> the same."""
    seen = torch.cat((window[rows], inputs.unsqueeze(1)), dim=1)
    window[rows] = seen[:, 1:]
    summed = (seen.float() * conv.weight.T.float()).sum(1)
    if conv.bias is not None:
        summed = summed + conv.bias.float()
    return (functional.silu(summed) if conv.factors is None else summed).to(inputs.dtype)


def _delta_net(
    moves: Iterable[Move],
    inputs: torch.Tensor,
    products: Sequence[torch.Tensor],
    weights: DeltaNetWeights,
    states: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    spec, (mixed, gates), (window, memory) = weights.spec, products, states
    b, a = gates[:, weights.gate_columns].float().chunk(2, dim=1)
    kept = (weights.decay * functional.softplus(a + weights.dt_bias)).exp()
    taken = b.sigmoid()
    found = mixed.new_empty(len(mixed), spec.value_heads, spec.value_dim)
    for tokens, rows in moves:
        convolved = _convolve(inputs[tokens], weights.conv, window, rows)
        q, k, v = _heads(spec, convolved.float())
        state = memory[rows] * kept[tokens, :, None, None]
        known = (state * k.unsqueeze(-1)).sum(-2)
        news = (v - known) * taken[tokens].unsqueeze(-1)
        state += k.unsqueeze(-1) * news.unsqueeze(-2)
        memory[rows] = state
        found[tokens] = (state * q.unsqueeze(-1)).sum(-2).to(found.dtype)
    return gated_norm(found.flatten(1), mixed[:, weights.z_columns], weights.norm)


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


def gated_norm(x: torch.Tensor, gate: torch.Tensor, norm: GatedNorm) -> torch.Tensor:
    """Norm and gate as the kernel of that name says. x, gate: `[tokens, features]` -> the same, of
    gate's dtype."""
    wide, gate, dtype = x.float(), functional.silu(gate.float() * norm.factor), gate.dtype
    if norm.gate_first:
        wide = wide * gate
    if norm.weight is not None:
        grouped = wide.unflatten(1, (-1, norm.size))
        squares = grouped.square().mean(-1, keepdim=True)
        normed = grouped * torch.rsqrt(squares + norm.epsilon)
        wide = norm.weight * normed.flatten(1).to(dtype)
    return wide.to(dtype) if norm.gate_first else (wide * gate).to(dtype)
