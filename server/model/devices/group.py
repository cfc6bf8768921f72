"""Devices that share one model, as one of them sees the others: processes of one host, a device
each."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed

from loraplex.adapters.base import WHOLE, Shard
from loraplex.server.config import set_unset_variables
from loraplex.server.kernels.pointwise.shared_terms import SharedTerms

# As `Group.sum`.
DeviceSum = Callable[[torch.Tensor], torch.Tensor]
# Rows of other devices that a device reads itself.
_ROWS_READ = 256

# The worker notices sooner that no step ends.
_TIMEOUT = timedelta(minutes=30)
# All are on one host. Multicast among GPUs is not used.
_SETTINGS = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


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


class ProcessGroup:
    """GPUs exchange tensors through memory that all of them read and write, which graphs can
    capture. CPUs exchange them by gloo, which also starts the group."""

    def __init__(self, shard: Shard, meeting: str, device: str) -> None:
        """Join the group of processes. meeting: path of a file that does not exist yet, the same
        for all. Waits for all.
        """
        self.shard = shard
        self._sums: _SharedMemory | None = None
        self._gathers: _SharedMemory | None = None
        self._terms: _TermsMemory | None = None
        set_unset_variables(_SETTINGS)
        self._on_gpu = device == "cuda"
        if self._on_gpu:
            torch.cuda.set_device(shard.index)
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=shard.index,
            world_size=shard.count,
            timeout=_TIMEOUT,
        )

    @property
    def term_rows(self) -> int:
        return term_rows(self.shard.count) if self._on_gpu else 0

    def reserve(self, sums: tuple[int, int], gathers: tuple[int, int], dtype: torch.dtype) -> None:
        if not self._on_gpu:
            return
        self._sums, self._gathers = _SharedMemory(sums, dtype), _SharedMemory(gathers, dtype)
        if self.term_rows:
            shape = (self.term_rows, sums[1])
            self._terms = _TermsMemory(shape, dtype, self.shard)

    def terms(self, rows: int, turn: int) -> SharedTerms | None:
        if self._terms is None or rows > self.term_rows:
            return None
        return self._terms.of(rows, turn)

    def place(self, rows: int) -> torch.Tensor | None:
        return None if self._sums is None else self._sums.rows(rows)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if self._sums is None:
            distributed.all_reduce(x)
        else:
            self._sums.sum(x)
        return x

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self._gathers is not None:
            return self._gathers.gather(x, out)
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.shard.count)]
        distributed.all_gather(parts, x)
        return _side_by_side(parts, out)

    def least(self, number: int) -> int:
        found = torch.tensor(number)
        distributed.all_reduce(found, op=distributed.ReduceOp.MIN)
        return int(found)

    def close(self) -> None:
        self._sums = self._gathers = self._terms = None
        distributed.destroy_process_group()


class _SharedMemory:
    """Bytes on each GPU that the others read and write. Made by all at once.

    Torch counts the meetings of a process, not of a group: one group of a process has such memory.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        """Allocate memory that all GPUs of the group reach. shape, dtype: of the largest tensor."""
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

    def rows(self, count: int) -> torch.Tensor:
        return self._own[:count]

    def addresses(self, row: int) -> torch.Tensor:
        """Return the addresses, int64 `[devices]`, where a row begins on each device."""
        found = [tensor[row].data_ptr() for tensor in self._tensors]
        return torch.tensor(found, device=self._own.device)

    def clear(self) -> None:
        """Zero the memory on all GPUs, before anybody goes on."""
        self._own.zero_()
        self._all.barrier()

    def sum(self, x: torch.Tensor) -> None:
        """Sum x over all GPUs, in place; quicker where x lies in this memory already."""
        shared = _like(self._own, x)
        is_here = x.data_ptr() == shared.data_ptr()
        if not is_here:
            shared.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self._group)
        if not is_here:
            x.copy_(shared)

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Gather x of all GPUs side by side, as many rows at a time as have room."""
        for some, into in zip(x.split(len(self._own)), out.split(len(self._own)), strict=True):
            _like(self._own, some).copy_(some)
            self._all.barrier()
            _side_by_side([_like(tensor, some) for tensor in self._tensors], into)
            self._all.barrier()  # nobody writes there before all have read
        return out


class _TermsMemory:
    """Memory of products and deltas that the next kernel sums, for two sums in turn."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, shard: Shard) -> None:
        """Share memory for the terms of sums. shape: of the largest term."""
        self._rows, width = shape
        self._delta_at, self._index = self._rows * width, shard.index
        self._memory = _SharedMemory((4 * self._rows, width), dtype)
        self._flags = _SharedMemory((2 * self._rows, shard.count), torch.int32)
        self._flags.clear()
        self._of_turns = [
            (self._memory.addresses(2 * first), self._flags.addresses(first))
            for first in (0, self._rows)
        ]

    def of(self, rows: int, turn: int) -> SharedTerms:
        first = 2 * turn * self._rows
        memory, (addresses, flags) = self._memory.rows(4 * self._rows), self._of_turns[turn]
        y, delta = (memory[each : each + rows] for each in (first, first + self._rows))
        return SharedTerms(y, delta, addresses, self._delta_at, flags, self._index)


def _like(memory: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The beginning of memory, in the shape and dtype of x, which has room there."""
    return memory.view(-1).view(x.dtype)[: x.numel()].view(x.shape)


def _side_by_side(parts: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Write parts side by side to out, as far as out has columns for them."""
    begin = 0
    for part in parts:
        columns = out[:, begin : begin + part.shape[1]]
        columns.copy_(part[:, : columns.shape[1]])
        begin += columns.shape[1]
    return out
