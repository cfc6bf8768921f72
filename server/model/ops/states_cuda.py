"""Mixers that keep states, by the project's kernels: slices of one token and of several."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from loraplex.server.kernels.states.causal_conv import causal_conv
from loraplex.server.kernels.states.delta_rule import DeltaGates, DeltaHeads, delta_rule
from loraplex.server.kernels.states.gated_norm import gated_norm
from loraplex.server.kernels.states.slices import Runs, Singles, Slices
from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.state_steps import Phase, runs_of
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.state_weights import (
    DeltaNetWeights,
    StateWeights,
)

StatePlan = tuple[Phase[Slices], ...]


def plan_states(layout: StepLayout) -> StatePlan:
    """Plan a step outside graphs: slices of one token, which are its first ones, and others."""
    n, device = layout.num_decodes, layout.positions.device
    plan = list[Phase[Slices]]()
    if n:
        rows = to_device(layout.seq_rows[:n].astype(np.int32), device)
        plan.append(Phase(Singles(rows, layout.positions[:n])))
    for table, saves in runs_of(layout):
        runs = Runs(to_device(table.astype(np.int32), device), int(table[2].max()))
        plan.append(Phase(runs, saves))
    return tuple(plan)


def mix_states(
    plan: Iterable[Slices],
    products: Sequence[torch.Tensor],
    weights: StateWeights,
    states: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Compute as `Ops.mix_states` says. states: of the layer, which take the tokens."""
    mixed = products[0]
    convolved = mixed.new_empty(len(mixed), len(weights.conv.columns))
    if isinstance(weights, DeltaNetWeights):
        return _delta_net(plan, convolved, products, weights, states)
    for slices in plan:
        causal_conv(mixed, weights.conv, states[0], slices, convolved)
    return convolved


def _delta_net(
    plan: Iterable[Slices],
    qkv: torch.Tensor,
    products: Sequence[torch.Tensor],
    weights: DeltaNetWeights,
    states: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    spec, (mixed, gates), (window, memory) = weights.spec, products, states
    heads = DeltaHeads(spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim)
    of_gates = DeltaGates(gates, weights.gate_columns, weights.decay, weights.dt_bias)
    found = mixed.new_empty(len(mixed), spec.value_size)
    for slices in plan:
        causal_conv(mixed, weights.conv, window, slices, qkv)
        delta_rule(qkv, heads, of_gates, memory, slices, found)
    gated_norm(found, mixed, weights.z_columns, weights.norm, found)
    return found
