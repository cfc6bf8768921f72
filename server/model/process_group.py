"""Processes of one host that share a model, a device each."""

import threading
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from adapters.sharding import Shard
from server.config import set_unset_variables

# The worker notices sooner that no step ends.
_TIMEOUT = timedelta(minutes=30)
_LEAVE_S = 10.0
# All are on one host. Multicast among GPUs is not used.
_SETTINGS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


class ProcessGroup:
    """On GPUs what is reserved is exchanged through memory that all of them read and write, which
    graphs can capture; the rest goes by NCCL. On a CPU all goes by gloo."""

    def __init__(self, shard: Shard, meeting: str, device: str) -> None:
        """meeting: path of a file that does not exist yet, the same for all. Waits for all."""
        self.shard = shard
        self._sums: _SharedMemory | None = None
        self._gathers: _SharedMemory | None = None
        set_unset_variables(_SETTINGS)
        self._on_gpu = device == "cuda"
        if self._on_gpu:
            torch.cuda.set_device(shard.index)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if self._on_gpu else "gloo",
            init_method=f"file://{meeting}",
            rank=shard.index,
            world_size=shard.count,
            timeout=_TIMEOUT,
        )

    def reserve(self, sums: tuple[int, int], gathers: tuple[int, int], dtype: torch.dtype) -> None:
        if self._on_gpu:
            self._sums = _SharedMemory(sums, dtype)
            self._gathers = _SharedMemory(gathers, dtype)

    def place(self, rows: int) -> torch.Tensor | None:
        return None if self._sums is None else self._sums.rows(rows)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if self._sums is not None and self._sums.holds(x):
            self._sums.sum(x)
        else:
            distributed.all_reduce(x)
        return x

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self._gathers is not None and self._gathers.holds(x):
            return self._gathers.gather(x, out)
        parts = [torch.empty_like(x) for _ in range(self.shard.count)]
        distributed.all_gather(parts, x.contiguous())
        return _side_by_side(parts, out)

    def least(self, number: int) -> int:
        found = torch.tensor(number)
        distributed.all_reduce(found, op=distributed.ReduceOp.MIN)
        return int(found)

    def close(self) -> None:
        """NCCL waits for the other devices; for one that is lost no longer than _LEAVE_S."""
        self._sums = self._gathers = None
        leaving = threading.Thread(target=distributed.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(_LEAVE_S)


class _SharedMemory:
    """A tensor on each GPU that the others read and write. Made by all at once."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        # Not at the top: builds without CUDA lack it.
        from torch.distributed import _symmetric_memory as symmetric

        world: Any = distributed.group.WORLD
        self._group: str = world.group_name
        here = torch.device("cuda", torch.cuda.current_device())
        self._own: torch.Tensor = symmetric.empty(*shape, dtype=dtype, device=here)
        self._all: Any = symmetric.rendezvous(self._own, self._group)
        self._tensors = [
            self._all.get_buffer(index, shape, dtype) for index in range(self._all.world_size)
        ]

    def rows(self, count: int) -> torch.Tensor | None:
        """The first ones; None: there are fewer."""
        return self._own[:count] if count <= len(self._own) else None

    def holds(self, x: torch.Tensor) -> bool:
        """Whether x `[rows, n]` has room here."""
        own = self._own
        return len(x) <= len(own) and x.shape[1:] == own.shape[1:] and x.dtype == own.dtype

    def sum(self, x: torch.Tensor) -> None:
        """In place, over all GPUs; quicker where x lies here already."""
        shared = self._own[: len(x)]
        is_here = x.data_ptr() == shared.data_ptr()
        if not is_here:
            shared.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self._group)
        if not is_here:
            x.copy_(shared)

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """x of all GPUs, side by side."""
        self._own[: len(x)].copy_(x)
        self._all.barrier()
        _side_by_side([tensor[: len(x)] for tensor in self._tensors], out)
        self._all.barrier()  # nobody writes there before all have read
        return out


def _side_by_side(parts: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """As far as out has columns for them."""
    begin = 0
    for part in parts:
        columns = out[:, begin : begin + part.shape[1]]
        columns.copy_(part[:, : columns.shape[1]])
        begin += columns.shape[1]
    return out
