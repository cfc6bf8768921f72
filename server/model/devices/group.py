"""Devices that share one model, as one of them sees the others."""

from collections.abc import Callable
from typing import Protocol

import torch

from loraplex.adapters.base import WHOLE, Shard
from loraplex.server.kernels.pointwise.shared_terms import SharedTerms

# As `Group.sum`.
DeviceSum = Callable[[torch.Tensor], torch.Tensor]
# Rows of other devices that a device reads itself.
_ROWS_READ = 256


def term_rows(devices: int) -> int:
    """Up to so many rows it costs less that each device reads all terms than that each sums a part
    for the others."""
    return _ROWS_READ // (devices - 1) if devices > 1 else 0


class Group(Protocol):
    """Devices that share a model, and what they compute together. Each call is made by all devices,
    in the same order. shard: this one's part of the model.
    """

    @property
    def shard(self) -> Shard: ...

    @property
    def term_rows(self) -> int:
        """Up to so many rows the consumer of a sum may sum it."""
        ...

    def reserve(self, sums: tuple[int, int], gathers: tuple[int, int], dtype: torch.dtype) -> None:
        """Reserve memory, once, for sums and gathers of up to so many rows and columns."""
        ...

    def terms(self, rows: int, turn: int) -> SharedTerms | None:
        """Return the place for terms of a sum `[rows, width]` that its consumer sums; None: it does
        not. turn: 0 or 1, never the same for two such sums without another sum between them.
        """
        ...

    def place(self, rows: int) -> torch.Tensor | None:
        """Return the best place for `[rows, width]` that will be summed; its content lasts up to
        the next sum. None: anywhere.
        """
        ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all devices, bit for bit the same on each, in x itself."""
        ...

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Gather x `[rows, n]` of all devices side by side, as far as out `[rows, m]` has columns
        for them. Returns out.
        """
        ...

    def least(self, number: int) -> int:
        """The smallest that a device has; on the host."""
        ...

    def close(self) -> None:
        """Close the group. All devices call this at about the same time, after their last call."""
        ...


class Alone:
    """A device that has the whole model."""

    shard = WHOLE
    term_rows = 0

    def reserve(
        self, sums: tuple[int, int], gathers: tuple[int, int], dtype: torch.dtype
    ) -> None: ...

    def terms(self, rows: int, turn: int) -> SharedTerms | None:
        return None

    def place(self, rows: int) -> torch.Tensor | None:
        return None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(x)

    def least(self, number: int) -> int:
        return number

    def close(self) -> None: ...
