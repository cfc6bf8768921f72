"""LoRA of a product that the kernel after the product finishes."""

from dataclasses import dataclass

import torch

from server.kernels.segments import Segments
from server.kernels.table import LoraTable
from server.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class PendingLora:
    """The site's shrink ran, into the workspace; expand is to come."""

    table: LoraTable
    site: int
    segments: Segments
    workspace: Workspace


@dataclass(frozen=True, slots=True)
class PendingDelta:
    """The site's expand ran too, into delta `[rows, out_features]`, beside the product; it holds
    anything where no adapter wrote. slots: int32 `[rows]`, -1 = no adapter."""

    table: LoraTable
    site: int
    slots: torch.Tensor
    delta: torch.Tensor


def delta_arguments(
    y: torch.Tensor, pending: PendingDelta | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """What a kernel that adds the delta to y reads; where there is none, stand-ins."""
    if pending is None:
        return y, y, y, 0, 0
    table = pending.table
    return pending.delta, pending.slots, table.ints, pending.site, table.num_sites
