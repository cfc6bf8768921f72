"""Scratch memory between shrink and expand; allocated once, before any graph is captured."""

from dataclasses import dataclass

import torch

from loraplex.server.kernels.lora.table import MAX_PROJECTIONS, MAX_RANK

PLANE_WIDTH = MAX_PROJECTIONS * MAX_RANK


@dataclass(frozen=True, slots=True)
class Workspace:
    """The results of one shrink for the expand of its site. Sites that run at once need one each.

    planes `[max_split, rows, width]` float32: partial sums of `x A^T` of each row at its sorted
    position, one plane for each split of K; expand adds them up in order. splits `[1]` int32: how
    many planes the last shrink wrote. dtype: of activations and adapters.
    """

    planes: torch.Tensor
    splits: torch.Tensor
    dtype: torch.dtype

    @property
    def max_split(self) -> int:
        return self.planes.shape[0]

    @property
    def rows(self) -> int:
        return self.planes.shape[1]

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Planes, splits, and the strides of a plane's rows and of planes, as kernels take them."""
        return self.planes, self.splits, self.planes.stride(1), self.planes.stride(0)

    @property
    def width(self) -> int:
        return self.planes.shape[2]


def allocate_workspace(
    rows: int,
    dtype: torch.dtype,
    device: torch.device | str,
    max_split: int,
    width: int = PLANE_WIDTH,
) -> Workspace:
    """Allocate a workspace for batches of up to `rows` rows. It is for configurations with
    `max_split` up to this one, and ranks that add up to `width` at most.
    """
    return Workspace(
        torch.zeros(max_split, rows, width, dtype=torch.float32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        dtype,
    )
