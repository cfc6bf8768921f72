"""States of every row on the device, beside its pages, their snapshots, and the order in which
states take a step's tokens."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from loraplex.server.engine.plan import StateCopy
from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.state_spec import StateForm

T = TypeVar("T")
# Tokens of the batch and their rows, int64 `[n]` each; each row at most once.
Move = tuple[torch.Tensor, torch.Tensor]


class StatePhase(NamedTuple, Generic[T]):
    """Tokens that states take together, in the form that operations want. saves: int64 `[2, n]` on
    the device, rows and the snapshots that their states then go to; None = none."""

    tokens: T
    saves: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StateSteps(Generic[T]):
    """Work of states in a step. phases: in turn. drafts: tokens behind those, which leave no trace
    in the states of their rows, `drafted`, int64 `[n]`. keep: int64 `[n]`, where inputs of the
    first n tokens are kept (`RowStates.keep`); None = nowhere."""

    phases: tuple[StatePhase[T], ...]
    keep: torch.Tensor | None = None
    drafts: tuple[T, ...] = ()
    drafted: torch.Tensor | None = None


def walks_of(rows: np.ndarray, scratch: int) -> tuple[np.ndarray, np.ndarray]:
    """Slices of one token as walks: neighbours of one row, which are a draft behind its first
    token. Returns tokens of the walk that a slice begins, 0 = it begins none, and how many tokens
    of the walk lie before it; int64 `[n]` each. rows: int64 `[n]`."""
    begins_one = np.ones(len(rows), dtype=bool)
    begins_one[1:] = (rows[1:] != rows[:-1]) | (rows[1:] == scratch)
    begins = np.flatnonzero(begins_one)
    lengths = np.zeros(len(rows), dtype=np.int64)
    lengths[begins] = np.diff(begins, append=len(rows))
    return lengths, np.arange(len(rows)) - np.repeat(begins, lengths[begins])


@dataclass(frozen=True, slots=True)
class TokenSteps:
    """A token of each slice at once, then the next of those that have one. begun: int64 `[n]`, rows
    whose state begins here. replayed: int64 `[m]`, places of kept inputs, which come before the
    step's own: tokens of moves are counted so."""

    begun: torch.Tensor
    replayed: torch.Tensor
    steps: StateSteps[Move]

    @classmethod
    def of(cls, layout: StepLayout, scratch: int, depth: int) -> "TokenSteps":
        """scratch: the row of padding. depth: tokens of a draft at most."""
        rows, counts, n = layout.seq_rows, layout.num_new, layout.num_decodes
        device, behind = layout.positions.device, np.zeros_like(counts)
        behind[:n] = walks_of(rows[:n], scratch)[1] if depth else 0
        replays = behind * 0 if layout.replays is None else layout.replays
        old, new = _within(replays), _within(counts)
        tokens = np.arange(len(old), len(old) + len(new))
        order = new + np.repeat(np.where(behind > 0, behind - 1, replays), counts)
        is_draft, of_tokens = np.repeat(behind > 0, counts), np.repeat(rows, counts)
        own = ~is_draft
        moves = _moves(
            np.concatenate((np.arange(len(old)), tokens[own])),
            np.concatenate((np.repeat(rows, replays), of_tokens[own])),
            np.concatenate((old, order[own])),
            device,
        )
        places, positions, _ = layout.saves.T
        last = positions - layout.starts[places] - 1
        phases = tuple(
            StatePhase(move, _saves(layout, layout.saves[last == number]))
            for number, move in enumerate(moves)
        )
        steps = StateSteps(
            phases,
            to_device(kept_places(rows[:n], behind[:n], scratch, depth), device) if depth else None,
            tuple(_moves(tokens[is_draft], of_tokens[is_draft], order[is_draft], device)),
            to_device(np.unique(of_tokens[is_draft]), device),
        )
        replayed = to_device(np.repeat(rows * depth, replays) + old, device)
        return cls(to_device(rows[layout.starts == 0], device), replayed, steps)


def kept_places(rows: np.ndarray, behind: np.ndarray, scratch: int, depth: int) -> np.ndarray:
    """Places where inputs of slices of one token are kept: a draft's on its row, the others' on the
    scratch row. behind: as `walks_of` says."""
    places: np.ndarray = np.where(behind > 0, rows * depth + behind - 1, scratch * depth)
    return places


def _within(counts: np.ndarray) -> np.ndarray:
    """0, 1, … of each count."""
    places: np.ndarray = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return places


def _moves(
    tokens: np.ndarray, rows: np.ndarray, order: np.ndarray, device: torch.device
) -> list[Move]:
    moves = list[Move]()
    for number in range(order.max(initial=-1) + 1):
        at = order == number
        packed = to_device(np.stack((tokens[at], rows[at])), device)
        moves.append((packed[0], packed[1]))
    return moves


def runs_of(layout: StepLayout) -> Iterator[StatePhase[np.ndarray]]:
    """Slices of several tokens, cut where their states are saved: int64 `[4, n]`, row, first token
    in the batch, tokens, and position of the first."""
    places = np.arange(layout.num_decodes, len(layout.num_new))
    begins = np.cumsum(layout.num_new) - layout.num_new - layout.starts
    starts, saves = layout.starts, layout.saves
    while len(places):
        cut, first = np.unique(saves[:, 0], return_index=True)
        ends = layout.starts + layout.num_new
        ends[cut] = saves[first, 1]
        of_each = (layout.seq_rows, begins + starts, ends - starts, starts)
        table = np.stack([column[places] for column in of_each])
        yield StatePhase(table, _saves(layout, saves[first]))
        places, starts, saves = cut, ends, np.delete(saves, first, axis=0)


def _saves(layout: StepLayout, saves: np.ndarray) -> torch.Tensor | None:
    if not len(saves):
        return None
    rows = layout.seq_rows[saves[:, 0]]
    return to_device(np.stack((rows, saves[:, 2])), layout.positions.device)


class RowStates:
    """A state for each row, and for the scratch row, in each layer that has states.

    A sequence's state begins with its first token: who computes that takes zeros for what lies
    there, which an earlier sequence of the row has left. So nothing is cleared between sequences.

    States of one form lie together, layer by layer, so that a copy of a row's whole state is one
    operation a form. Copies are in the order of the device's stream.

    A draft's tokens change no state, since they may be wrong. What states took of them is kept: the
    inputs of the latest draft of each row, `depth` tokens at most. The next step replays those that
    were right.
    """

    def __init__(
        self,
        model: ModelSpec,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        snapshots: int = 0,
        depth: int = 0,
    ) -> None:
        """Allocate the states of so many rows, and so many snapshots. dtype: of the model. depth:
        tokens of a draft at most."""
        counts = defaultdict[StateForm, int](int)
        places: dict[int, list[tuple[StateForm, int]]] = {}
        for layer, forms in model.states.items():
            places[layer] = []
            for form in forms:
                places[layer].append((form, counts[form]))
                counts[form] += 1

        def made(form: StateForm, slots: int) -> torch.Tensor:
            kind = torch.float32 if form.wide else dtype
            return torch.zeros((counts[form], slots, *form.shape), dtype=kind, device=device)

        self._of_rows = {form: made(form, rows + 1) for form in counts}
        self._kept = {form: made(form, snapshots) for form in counts}
        self._places, self.scratch, self.depth = places, rows, depth
        self._inputs = {
            layer: tuple(
                torch.zeros((rows + 1) * depth, width, dtype=dtype, device=device)
                for width in widths
            )
            for layer, widths in model.state_inputs.items()
        }

    def __bool__(self) -> bool:
        return bool(self._places)

    def of(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The tensors of one layer, `[rows + 1, ...]` of each `StateForm`."""
        return tuple(self._of_rows[form][place] for form, place in self._places[layer])

    def snapshots(self) -> list[torch.Tensor]:
        """Return what is kept in snapshots, `[snapshots, numbers]` of each layer and form."""
        return [of_layer.flatten(1) for kept in self._kept.values() for of_layer in kept]

    def save(self, copies: Iterable[StateCopy]) -> None:
        """Copy whole states of rows into snapshots, one after the other."""
        for copy in copies:
            for form, of_rows in self._of_rows.items():
                self._kept[form][:, copy.snapshot].copy_(of_rows[:, copy.seq_row])

    def restore(self, copies: Iterable[StateCopy]) -> None:
        """Copy snapshots into the states of rows."""
        for copy in copies:
            for form, of_rows in self._of_rows.items():
                of_rows[:, copy.seq_row].copy_(self._kept[form][:, copy.snapshot])

    def inputs(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Kept inputs of one layer's drafts, `[(rows + 1) * depth, features]` of each product."""
        return self._inputs[layer]

    def keep(
        self, layer: int, places: torch.Tensor | None, products: Iterable[torch.Tensor]
    ) -> None:
        """Keep the inputs of the first tokens, as `StateSteps.keep` says."""
        if places is not None:
            for kept, product in zip(self._inputs[layer], products, strict=True):
                kept.index_copy_(0, places, product[: len(places)])

    def walk(self, layer: int, steps: StateSteps[T]) -> Iterator[T]:
        """Tokens that a layer's states take, in turn. The states are saved as a phase says when
        the next one is asked for."""
        for phase in steps.phases:
            yield phase.tokens
            if phase.saves is not None:
                rows, snapshots = phase.saves
                for form, place in self._places[layer]:
                    taken = self._of_rows[form][place].index_select(0, rows)
                    self._kept[form][place].index_copy_(0, snapshots, taken)
        if steps.drafts:
            held = [state[steps.drafted] for state in self.of(layer)]
            yield from steps.drafts
            for state, before in zip(self.of(layer), held, strict=True):
                state[steps.drafted] = before
