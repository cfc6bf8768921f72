"""LoRA of a product that the kernel after the product finishes."""

from dataclasses import dataclass

import torch

from loraplex.server.kernels.lora.segments import Segments
from loraplex.server.kernels.lora.table import LoraTable
from loraplex.server.kernels.lora.workspace import Workspace


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
    """Arguments of a kernel that adds the delta to y `[rows, out_features]`; else stand-ins.

    Raises ValueError where y is not contiguous, or the delta does not fit it.
    """
    if not y.is_contiguous():
        raise ValueError(f"a product must be contiguous: {list(y.shape)}, {y.stride()}")
    if pending is None:
        return y, y, y, 0, 0
    delta, slots, table = pending.delta, pending.slots, pending.table
    if delta.shape != y.shape or delta.dtype != y.dtype or not delta.is_contiguous():
        raise ValueError(f"delta is {delta.dtype} {list(delta.shape)}, y {list(y.shape)}")
    if slots.shape != y.shape[:1] or slots.dtype != torch.int32:
        raise ValueError(f"slots must be int32 [{len(y)}], got {slots.dtype} {list(slots.shape)}")
    table.check_site(pending.site)
    return delta, slots, table.ints, pending.site, table.num_sites
