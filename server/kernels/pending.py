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
