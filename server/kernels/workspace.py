"""Scratch memory between shrink and expand; allocated once, before any graph is captured."""

from dataclasses import dataclass

import torch

from server.kernels.table import MAX_PROJECTIONS, MAX_RANK

BRIDGE_WIDTH = MAX_PROJECTIONS * MAX_RANK


@dataclass(frozen=True, slots=True)
class Workspace:
    """What one shrink leaves for its expands. Two sites that run at once need one each.

    bridge `[rows, 768]`: `x A^T` of each row at its sorted position, in the model's dtype.
    planes `[max_split, rows, 768]` float32: partial sums of a split K.
    counters `[rows]` int32: splits that arrived, by tile; zero between launches.
    """

    bridge: torch.Tensor
    planes: torch.Tensor
    counters: torch.Tensor

    @property
    def rows(self) -> int:
        return self.bridge.shape[0]

    @property
    def max_split(self) -> int:
        return self.planes.shape[0]


def allocate_workspace(
    rows: int, dtype: torch.dtype, device: torch.device | str, max_split: int
) -> Workspace:
    """For batches of up to `rows` rows and shrinks with `split_k` up to `max_split`.

    A `max_split` of 1 (prefill) needs no planes.
    """
    planes = 0 if max_split == 1 else rows
    return Workspace(
        torch.zeros(rows, BRIDGE_WIDTH, dtype=dtype, device=device),
        torch.zeros(max_split, planes, BRIDGE_WIDTH, dtype=torch.float32, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
    )
