"""Devices that share one model, as one of them sees the others."""

from datetime import timedelta
from typing import Protocol

import torch
from torch import distributed

from adapters.sharding import WHOLE, Shard

# A device that is late waits for no longer: the worker notices sooner that no step ends.
_TIMEOUT = timedelta(minutes=30)


class Group(Protocol):
    """Each call is made by all devices, in the same order. shard: this one's part of the model."""

    @property
    def shard(self) -> Shard: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all devices, bit for bit the same on each. x may be overwritten."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x `[...]` of every device: `[devices, ...]`."""
        ...

    def least(self, number: int) -> int:
        """The smallest that a device has; on the host."""
        ...


class Alone:
    """A device that has the whole model."""

    shard = WHOLE

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)

    def least(self, number: int) -> int:
        return number


class ProcessGroup:
    """One process a device, on one host. Products on a GPU are summed by NCCL, others by gloo."""

    def __init__(self, shard: Shard, meeting: str, device: torch.device) -> None:
        """meeting: path of a file that does not exist yet, the same for all. Waits for all."""
        self.shard = shard
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(
            backend,
            init_method=f"file://{meeting}",
            rank=shard.index,
            world_size=shard.count,
            timeout=_TIMEOUT,
        )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(x)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        found = x.new_empty(self.shard.count, *x.shape)
        distributed.all_gather_into_tensor(found.flatten(0, 1), x)
        return found

    def least(self, number: int) -> int:
        found = torch.tensor(number)
        distributed.all_reduce(found, op=distributed.ReduceOp.MIN)
        return int(found)
