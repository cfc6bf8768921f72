"""Mixers that keep states, in plain torch, token by token: the definition.

A step computes a token of each of its slices at once, then the next of those that have one. So
results do not depend on where prompts are cut.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.nn import functional

from loraplex.server.kernels.states.operands import Convolution, GatedNorm
from loraplex.server.model.devices.group import DeviceSum
from loraplex.server.model.ops.state_steps import Move
from loraplex.server.model.state_weights import RecurrentWeights, ShortConvWeights, StateWeights

# Under the root of a key's and a query's squares.
_EPSILON = 1e-6


def mix_states(
    moves: Iterable[Move],
    products: Sequence[torch.Tensor],
    weights: StateWeights,
    states: tuple[torch.Tensor, ...],
    over_devices: DeviceSum | None = None,
) -> torch.Tensor:
    """Compute as `Ops.mix_states` says. states: of the layer, which take the tokens; zeros where a
    sequence begins. over_devices: as of `ShardedOps.mix_states`."""
    conv, mixed = weights.conv, products[0]
    inputs = mixed[:, conv.columns]
    if conv.factors is not None:
        inputs = inputs * mixed[:, conv.factors[0]]
    if not isinstance(weights, ShortConvWeights):
        found = _recur(moves, inputs, products[-1], weights, states)
        z = products[-1 if weights.gates_z else 0][:, weights.z_columns]
        return gated_norm(found, z, weights.norm, over_devices)
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


def _recur(
    moves: Iterable[Move],
    inputs: torch.Tensor,
    product: torch.Tensor,
    weights: RecurrentWeights,
    states: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Compute as `delta_rule` says, or `state_space`, of what is convolved: `[tokens, values *
    value_dim]`, the delta rule's of the inputs' dtype. product: which has the gates' inputs."""
    gates, (window, memory) = weights.gates, states
    is_delta, of_gates = weights.is_delta, product[:, gates.columns].float()
    b, a = of_gates.chunk(2, dim=1) if is_delta else (None, of_gates)
    dt = functional.softplus(a * gates.factor + gates.bias).clamp(*gates.limits)
    kept, taken = (gates.decay * dt).exp(), dt if b is None else b.sigmoid() * gates.beta
    dtype = inputs.dtype if is_delta else torch.float32
    found = inputs.new_empty(len(inputs), *memory.shape[1::2], dtype=dtype)
    for tokens, rows in moves:
        convolved = _convolve(inputs[tokens], weights.conv, window, rows)
        q, k, v = _heads(weights, convolved.float())
        state, news = memory[rows] * kept[tokens, :, None, None], v
        if is_delta:
            news = v - (state * k.unsqueeze(-1)).sum(-2)
        state += k.unsqueeze(-1) * (news * taken[tokens].unsqueeze(-1)).unsqueeze(-2)
        memory[rows] = state
        read = (state * q.unsqueeze(-1)).sum(-2)
        if gates.skip is not None:
            read = read + gates.skip.unsqueeze(-1) * v
        found[tokens] = read.to(dtype)
    return found.flatten(1)


def _heads(
    weights: RecurrentWeights, convolved: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k of each head of v, and v. In the delta rule q and k have length 1, and q is divided
    by the root of its size.

    convolved: float32 `[n, channels]` -> `[n, values, key_dim]` twice, `[n, values, value_dim]`.
    """
    keys, values, key_dim, value_dim = weights.heads
    sizes = [keys * key_dim] * 2
    if weights.is_delta:
        q, k, v = convolved.split((*sizes, values * value_dim), dim=1)
    else:
        v, k, q = convolved.split((values * value_dim, *sizes), dim=1)
    qk = torch.stack((q, k)).unflatten(-1, (keys, key_dim))
    if weights.is_delta:
        qk = qk * torch.rsqrt(qk.square().sum(-1, keepdim=True) + _EPSILON)
        qk[0] *= key_dim**-0.5
    q, k = qk.repeat_interleave(values // keys, dim=2)
    return q, k, v.unflatten(-1, (values, value_dim))


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, norm: GatedNorm, over_devices: DeviceSum | None
) -> torch.Tensor:
    """Norm and gate as the kernel of that name says. x, gate: `[tokens, features]` -> the same, of
    gate's dtype. over_devices: sums over devices that norm together."""
    wide, gate, dtype = x.float(), functional.silu(gate.float() * norm.factor), gate.dtype
    if norm.gate_first:
        wide = wide * gate
    if norm.weight is not None:
        grouped = wide.unflatten(1, (-1, min(norm.size, wide.shape[1])))
        squares = grouped.square().sum(-1, keepdim=True)
        if norm.size > wide.shape[1] and over_devices is not None:
            squares = over_devices(squares)
        normed = grouped * torch.rsqrt(squares / norm.size + norm.epsilon)
        wide = norm.weight * normed.flatten(1).to(dtype)
    return wide.to(dtype) if norm.gate_first else (wide * gate).to(dtype)
