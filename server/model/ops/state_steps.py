"""The order in which states take a step's tokens, and where they are saved in between."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.transfers import to_device

T = TypeVar("T")
# Tokens of the batch and their rows, int64 `[n]` each; each row at most once.
Move = tuple[torch.Tensor, torch.Tensor]


class Phase(NamedTuple, Generic[T]):
    """Tokens that states take together, in the form that operations want. saves: int64 `[2, n]` on
    the device, rows and the snapshots that their states then go to; None = none."""

    tokens: T
    saves: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenSteps:
    """A token of each slice at once, then the next of those that have one. begun: int64 `[n]`, rows
    whose state begins here."""

    begun: torch.Tensor
    phases: tuple[Phase[Move], ...]

    @classmethod
    def of(cls, layout: StepLayout) -> "TokenSteps":
        device, counts = layout.positions.device, layout.num_new
        begins = np.cumsum(counts) - counts
        begun = to_device(layout.seq_rows[layout.starts == 0], device)
        places, positions, _ = layout.saves.T
        last = positions - layout.starts[places] - 1
        phases = []
        for move in range(int(counts.max(initial=0))):
            active = counts > move
            packed = to_device(np.stack((begins[active] + move, layout.seq_rows[active])), device)
            saves = _saves(layout, layout.saves[last == move])
            phases.append(Phase((packed[0], packed[1]), saves))
        return cls(begun, tuple(phases))


def runs_of(layout: StepLayout) -> Iterator[Phase[np.ndarray]]:
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
        yield Phase(table, _saves(layout, saves[first]))
        places, starts, saves = cut, ends, np.delete(saves, first, axis=0)


def _saves(layout: StepLayout, saves: np.ndarray) -> torch.Tensor | None:
    if not len(saves):
        return None
    rows = layout.seq_rows[saves[:, 0]]
    return to_device(np.stack((rows, saves[:, 2])), layout.positions.device)
