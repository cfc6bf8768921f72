"""Processes of one host that share a model, a device each."""

from datetime import timedelta
from typing import Any

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


# Under the name that torch has for it.
_gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)


class ProcessGroup:
    """One process a device, on one host. Sums on a GPU are made in memory that the others read and
    write, those that find no room there by NCCL; on a CPU by gloo."""

    def __init__(self, shard: Shard, meeting: str, device: str) -> None:
        """meeting: path of a file that does not exist yet, the same for all. Waits for all."""
        self.shard = shard
        self._on_gpu = device == "cuda"
        self._shared: torch.Tensor | None = None
        set_unset_variables(_SETTINGS)
        backend = "gloo"
        if self._on_gpu:
            backend = "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(shard.index)
        distributed.init_process_group(
            backend,
            init_method=f"file://{meeting}",
            rank=shard.index,
            world_size=shard.count,
            timeout=_TIMEOUT,
        )
        world: Any = distributed.group.WORLD
        self._name = world.group_name

    def close(self) -> None:
        distributed.destroy_process_group()

    def reserve(self, rows: int, width: int, dtype: torch.dtype) -> None:
        if self._on_gpu:
            # Not at the top: builds without CUDA lack it.
            from torch.distributed import _symmetric_memory as symmetric

            self._shared = symmetric.empty((rows, width), dtype=dtype, device=torch.device("cuda"))
            symmetric.rendezvous(self._shared, self._name)

    def place(self, rows: int) -> torch.Tensor | None:
        if self._shared is None or rows > len(self._shared):
            return None
        return self._shared[:rows]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.place(len(x))
        if shared is None or x.shape != shared.shape or x.dtype != shared.dtype:
            distributed.all_reduce(x)
        elif x.data_ptr() == shared.data_ptr():
            self._sum_shared(shared)
        else:
            shared.copy_(x)
            self._sum_shared(shared)
            x.copy_(shared)
        return x

    def _sum_shared(self, shared: torch.Tensor) -> None:
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self._name)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        found = x.new_empty(self.shard.count, *x.shape)
        _gather(found.flatten(0, 1), x)
        return found

    def least(self, number: int) -> int:
        found = torch.tensor(number)
        distributed.all_reduce(found, op=distributed.ReduceOp.MIN)
        return int(found)
