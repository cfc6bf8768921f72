"""Mixers that keep states, by the project's kernels: slices of one token and of several."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from loraplex.server.kernels.states.causal_conv import Runs, Singles, Slices, Walks, causal_conv
from loraplex.server.kernels.states.recurrence import delta_rule, gated_norm, state_space
from loraplex.server.model.devices.group import DeviceSum
from loraplex.server.model.ops import ops_torch
from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.row_states import (
    StatePhase,
    StateSteps,
    kept_places,
    runs_of,
    walks_of,
)
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.weight_source import ShortConvWeights, StateWeights

StatePlan = StateSteps[Slices]
NO_STATES: StatePlan = StateSteps(())


def plan_states(layout: StepLayout, scratch: int, depth: int) -> StatePlan:
    """Plan a step outside graphs: slices of one token, which are its first ones, and others.
    scratch: the row of padding. depth: tokens of a draft at most."""
    n, device = layout.num_decodes, layout.positions.device
    plan, keep = list[StatePhase[Slices]](), None
    if n:
        rows = layout.seq_rows[:n]
        replays = np.zeros(n, np.int64) if layout.replays is None else layout.replays[:n]
        columns = np.concatenate((rows[None], walk_columns(rows, replays, scratch, depth)))
        of_rows, *of_walks = to_device(columns.astype(np.int32), device)
        singles, keep = walks(of_rows, layout.positions[:n], of_walks, depth)
        plan.append(StatePhase(singles))
    for table, saves in runs_of(layout):
        runs = Runs(to_device(table.astype(np.int32), device), int(table[2].max()))
        plan.append(StatePhase(runs, saves))
    return StateSteps(tuple(plan), keep)


def walk_columns(rows: np.ndarray, replays: np.ndarray, scratch: int, depth: int) -> np.ndarray:
    """Columns that `walks` needs beside rows of slices of one token: int64 `[3, n]`; without drafts
    `[0, n]`."""
    if not depth:
        return np.zeros((0, len(rows)), dtype=np.int64)
    lengths, behind = walks_of(rows, scratch)
    return np.stack((lengths, replays, kept_places(rows, behind, scratch, depth)))


def walks(
    rows: torch.Tensor, positions: torch.Tensor, columns: Sequence[torch.Tensor], depth: int
) -> tuple[Singles | Walks, torch.Tensor | None]:
    """Slices of one token, and where their inputs are kept. columns: int32, as of
    `walk_columns`."""
    if not depth:
        return Singles(rows, positions), None
    lengths, replays, keep = columns
    return Walks(rows, positions, lengths, replays, depth), keep.long()


def mix_states(
    plan: Iterable[Slices],
    products: Sequence[torch.Tensor],
    weights: StateWeights,
    states: tuple[torch.Tensor, ...],
    kept: tuple[torch.Tensor, ...],
    over_devices: DeviceSum | None = None,
) -> torch.Tensor:
    """Compute as `Ops.mix_states` says. states: of the layer, which take the tokens. kept: inputs
    of its drafts (`RowStates.inputs`). over_devices: as of `ShardedOps.mix_states`."""
    mixed = products[0]
    convolved = _convolved(plan, mixed, weights, states[0], kept[0])
    if isinstance(weights, ShortConvWeights):
        found = mixed.new_empty(0, len(weights.conv.columns))
        for _, each in convolved:
            found = each
        return found[: len(mixed)]
    is_delta, heads = weights.is_delta, weights.heads
    rule, dtype = (delta_rule, mixed.dtype) if is_delta else (state_space, torch.float32)
    read = mixed.new_empty(len(mixed), heads.values * heads.value_dim, dtype=dtype)
    for slices, each in convolved:
        rule(each, heads, products[-1], weights.gates, states[1], slices, read, kept[-1])
    norm, columns = weights.norm, weights.z_columns
    of_z = products[-1 if weights.gates_z else 0]
    if norm.size > read.shape[1]:
        return ops_torch.gated_norm(read, of_z[:, columns], norm, over_devices)
    out = read if is_delta else torch.empty_like(read, dtype=mixed.dtype)
    gated_norm(read, of_z, columns, norm, out)
    return out


def _convolved(
    plan: Iterable[Slices],
    mixed: torch.Tensor,
    weights: StateWeights,
    window: torch.Tensor,
    kept: torch.Tensor,
) -> Iterator[tuple[Slices, torch.Tensor]]:
    """Slices in turn once they are convolved, and all that was convolved so far: a line for each
    token, and behind those for replays."""
    found = None
    for slices in plan:
        if found is None:  # what has replays comes first
            more = slices.depth * slices.num_slices if isinstance(slices, Walks) else 0
            found = mixed.new_empty(len(mixed) + more, len(weights.conv.columns))
        causal_conv(mixed, weights.conv, window, slices, found, kept)
        yield slices, found
