"""Large host memory that is pinned once, and copies of many pieces of it."""

import logging
from collections.abc import Sequence
from contextlib import suppress

import torch

log = logging.getLogger(__name__)


def coalesce(
    runs: Sequence[int], sources: Sequence[int], targets: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(length, source, target) of the fewest copies that move these runs, all in one unit.

    An arena hands out single extents from its end, so that neighbours come in falling order.
    """
    joined: list[tuple[int, int, int]] = []
    for source, target, run in sorted(zip(sources, targets, runs, strict=True)):
        if joined:
            length, first_source, first_target = joined[-1]
            if (first_source + length, first_target + length) == (source, target):
                joined[-1] = (length + run, first_source, first_target)
                continue
        joined.append((run, source, target))
    return joined


def pin(host: torch.Tensor) -> bool:
    """Pin the host memory, once at start: copies from pinned memory run at the bus's speed and
    beside the host. Returns whether that worked.
    """
    status = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0))
    if status:
        text = "host memory cannot be pinned (CUDA error %d): loads are slower, and steps wait"
        log.warning(text, status)
        # The runtime keeps the error, and the next kernel would be blamed for it.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return status == 0


def unpin(host: torch.Tensor) -> None:
    """Undo `pin`, with no copy under way."""
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
