"""Terms that devices that share a model sum together."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SharedTerms:
    """Memory in which each of several devices has its term of a sum: a product, and LoRA's delta.

    y, delta: this device's, `[rows, features]`, contiguous. memories: int64 `[devices]`, addresses
    of each device's y. delta_at: how many elements behind y each device's delta begins. flags:
    int64 `[devices]`, addresses of each device's flags, int32 `[rows or more, devices]`, zeros
    between sums; None = all devices have written their terms. index: this device's.
    """

    y: torch.Tensor
    delta: torch.Tensor
    memories: torch.Tensor
    delta_at: int
    flags: torch.Tensor | None
    index: int
