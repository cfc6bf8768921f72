"""Processes of one host that share a model, a device each."""

from datetime import timedelta

import torch
from torch import distributed

from adapters.sharding import Shard
from server.config import set_unset_variables

# The worker notices sooner that no step ends.
_TIMEOUT = timedelta(minutes=30)
# All are on one host. Multicast among GPUs is not used.
_SETTINGS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


class ProcessGroup:
    """One process a device, on one host. Products on a GPU are summed by NCCL, others by gloo."""

    def __init__(self, shard: Shard, meeting: str, device: str) -> None:
        """meeting: path of a file that does not exist yet, the same for all. Waits for all."""
        self.shard = shard
        set_unset_variables(_SETTINGS)
        backend = "gloo"
        if device == "cuda":
            backend = "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(shard.index)
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
