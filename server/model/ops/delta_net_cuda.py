"""Gated DeltaNet by the project's kernels: single tokens and slices of several, in any batch."""

from collections.abc import Iterable

import numpy as np
import torch

from loraplex.server.kernels.states.causal_conv import causal_conv
from loraplex.server.kernels.states.delta_rule import DeltaGates, DeltaHeads, delta_rule
from loraplex.server.kernels.states.gated_norm import gated_norm
from loraplex.server.kernels.states.slices import Runs, Singles, Slices
from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.state_steps import Phase, runs_of
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.weights import DeltaNetWeights

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


def delta_net(
    plan: Iterable[Slices],
    mixed: torch.Tensor,
    gates: torch.Tensor,
    weights: DeltaNetWeights,
    states: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Compute as `Ops.delta_net` says. states: of the layer, which take the tokens."""
    spec, norm = weights.spec, weights.norm
    window, memory = states
    heads = DeltaHeads(spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim)
    of_gates = DeltaGates(gates, weights.gate_columns, weights.decay, weights.dt_bias)
    qkv = mixed.new_empty(len(mixed), spec.num_channels)
    found = mixed.new_empty(len(mixed), spec.value_size)
    for slices in plan:
        causal_conv(mixed, weights.channels, weights.conv, window, slices, qkv)
        delta_rule(qkv, heads, of_gates, memory, slices, found)
    gated_norm(found, mixed, weights.z_columns, norm.weight, norm.epsilon)
    return found
