"""Gated DeltaNet by the project's kernels: single tokens and slices of several, in any batch."""

import numpy as np
import torch

from loraplex.server.kernels.states.causal_conv import causal_conv
from loraplex.server.kernels.states.delta_rule import DeltaGates, DeltaHeads, delta_rule
from loraplex.server.kernels.states.gated_norm import gated_norm
from loraplex.server.kernels.states.slices import Runs, Singles, Slices
from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.weights import DeltaNetWeights

StatePlan = tuple[Slices, ...]


def plan_states(layout: StepLayout) -> StatePlan:
    """Plan a step outside graphs: slices of one token, which are its first ones, and others."""
    n, counts, device = layout.num_decodes, layout.num_new, layout.positions.device
    plan = list[Slices]()
    if n:
        rows = to_device(layout.seq_rows[:n].astype(np.int32), device)
        plan.append(Singles(rows, layout.positions[:n]))
    if n < len(counts):
        begins = np.cumsum(counts) - counts
        table = np.stack((layout.seq_rows, begins, counts, layout.starts))[:, n:]
        plan.append(Runs(to_device(table.astype(np.int32), device), int(counts[n:].max())))
    return tuple(plan)


def delta_net(
    plan: StatePlan,
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
