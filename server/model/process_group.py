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
        shared = None if self._sums is None else self._sums.like(x)
        if shared is None or self._sums is None:
            distributed.all_reduce(x)
        elif x.data_ptr() == shared.data_ptr():
            self._sums.sum(shared)
        else:
            shared.copy_(x)
            self._sums.sum(shared)
            x.copy_(shared)
        return x

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        shared = None if self._gathers is None else self._gathers.like(x)
        if shared is not None and self._gathers is not None:
            shared.copy_(x)
            self._gathers.read(len(x), out)
            return out
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

    def like(self, x: torch.Tensor) -> torch.Tensor | None:
        """Room for x `[rows, n]`; None: it does not fit."""
        found = self.rows(len(x))
        fits = found is not None and found.shape == x.shape and found.dtype == x.dtype
        return found if fits else None

    def sum(self, rows: torch.Tensor) -> None:
        """The first rows of all GPUs, in place."""
        torch.ops.symm_mem.two_shot_all_reduce_(rows, "sum", self._group)

    def read(self, rows: int, out: torch.Tensor) -> None:
        """The first rows of all GPUs, side by side."""
        self._all.barrier()
        _side_by_side([tensor[:rows] for tensor in self._tensors], out)
        self._all.barrier()  # nobody writes there before all have read


def _side_by_side(parts: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """As far as out has columns for them."""
    begin = 0
    for part in parts:
        columns = out[:, begin : begin + part.shape[1]]
        columns.copy_(part[:, : columns.shape[1]])
        begin += columns.shape[1]
    return out
