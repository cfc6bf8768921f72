"""Devices that share a model, as threads of one process that take turns."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from loraplex.adapters.base import Shard
from loraplex.server.engine.executor import (
    AdapterCopy,
    CopyNews,
    CopySums,
    Masks,
    PageCopies,
    PagesCopied,
    PictureCopy,
    PictureIn,
)
from loraplex.server.engine.plan import SliceResult, StepPlan
from loraplex.server.kernels.pointwise import sum_norm
from loraplex.server.kernels.pointwise.shared_terms import SharedTerms
from loraplex.server.model.executor import TorchExecutor
from loraplex.server.model.start import WeightsLoader
from tests.server.model.driver import Driver

_WAIT_S = 240.0
R = TypeVar("R")


class _Table:
    """Where threads meet. One thread computes at a time: Triton's interpreter has one state."""

    def __init__(self, count: int) -> None:
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(count)
        self.laid: list[Any] = [None] * count

    def exchange(self, index: int, value: R) -> list[R]:
        self.laid[index] = value
        self.turn.release()
        try:
            self.barrier.wait(_WAIT_S)
            found = list(self.laid)
            self.barrier.wait(_WAIT_S)
        finally:
            self.turn.acquire()
        return found


@dataclass(frozen=True, slots=True)
class ThreadTerms(SharedTerms):
    """meet: until all devices have written their terms. Kernels of the interpreter cannot wait."""

    meet: Callable[[], None]


def sum_norm_of_threads(terms: ThreadTerms, *context: Any, **options: Any) -> torch.Tensor:
    terms.meet()
    return sum_norm.sum_norm(terms, *context, **options)


class ThreadGroup:
    """Implements `loraplex.server.model.devices.group.Group`."""

    term_rows = 0

    def __init__(self, shard: Shard, table: _Table) -> None:
        self.shard, self._table = shard, table
        self.sums = self.gathers = self.late_sums = 0

    def reserve(self, sums: tuple[int, int], gathers: tuple[int, int], dtype: torch.dtype) -> None:
        self._shared = torch.full(sums, float("nan"), dtype=dtype)
        # For two sums in turn: this device's products and deltas.
        self._terms = torch.full((2, 2, self.term_rows, sums[1]), float("nan"), dtype=dtype)
        starts = torch.tensor([each.data_ptr() for each in self._terms])
        self._memories = torch.stack(self._table.exchange(self.shard.index, starts), 1)

    def terms(self, rows: int, turn: int) -> SharedTerms | None:
        if rows > self.term_rows:
            return None
        y, delta = self._terms[turn]
        return ThreadTerms(
            y[:rows],
            delta[:rows],
            self._memories[turn],
            y.numel(),
            None,
            self.shard.index,
            self._meet,
        )

    def _meet(self) -> None:
        self.late_sums += 1
        self._table.exchange(self.shard.index, None)

    def place(self, rows: int) -> torch.Tensor | None:
        return self._shared[:rows]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        found = self._table.exchange(self.shard.index, x.clone())
        return x.copy_(torch.stack(found).sum(0))

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self.gathers += 1
        found = torch.cat(self._table.exchange(self.shard.index, x.clone()), 1)
        return out.copy_(found[:, : out.shape[1]])

    def close(self) -> None: ...

    def least(self, number: int) -> int:
        return min(self._table.exchange(self.shard.index, number))


class Lockstep:
    """As a TorchExecutor: all devices do the same, and give the same results."""

    def __init__(self, count: int, make: Callable[[ThreadGroup], TorchExecutor]) -> None:
        self._table = _Table(count)
        self._threads = [ThreadPoolExecutor(1) for _ in range(count)]
        self.groups = [ThreadGroup(Shard(i, count), self._table) for i in range(count)]
        self.devices: list[TorchExecutor] = self._all(lambda i: make(self.groups[i]))
        self._offered: list[list[CopySums]] = [[] for _ in range(count)]
        self._pages: dict[int, list[tuple[int, ...]]] = {}
        self.limits, self.stored_pages = self.devices[0].limits, self.devices[0].stored_pages
        self.stored_snapshots = self.devices[0].stored_snapshots
        assert all(device.limits == self.limits for device in self.devices)

    def _all(self, call: Callable[[int], R]) -> list[R]:
        def run(index: int) -> R:
            with self._table.turn:
                try:
                    return call(index)
                except BaseException:
                    self._table.barrier.abort()
                    raise

        jobs = [thread.submit(run, i) for i, thread in enumerate(self._threads)]
        failed = [job.exception() for job in jobs]
        for error in failed:
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [job.result() for job in jobs]

    def launch(self, plan: StepPlan) -> list[Any]:
        return self._all(lambda i: self.devices[i].launch(plan))

    def mask_memory(self, count: int, words: int) -> Any:
        return self.devices[0].mask_memory(count, words)

    def constrain(self, tickets: Sequence[Any], masks: Masks) -> None:
        def one(i: int) -> None:
            bits = self.devices[i].mask_memory(*masks.bits.shape)
            bits[:] = masks.bits
            self.devices[i].constrain(tickets[i], Masks(masks.slices, bits))

        self._all(one)

    def collect(self, tickets: Sequence[Any]) -> list[SliceResult]:
        results = self._all(lambda i: self.devices[i].collect(tickets[i]))
        assert all(each == results[0] for each in results)
        return results[0]

    def start_copy(self, copy: AdapterCopy) -> None:
        self._all(lambda i: self.devices[i].start_copy(copy))

    def copy_pages(self, copies: PageCopies) -> None:
        self._all(lambda i: self.devices[i].copy_pages(copies))

    def poll_copies(self) -> list[CopyNews]:
        """Of the first device. What the devices offer is added up as by a GroupExecutor, and what
        failed in one of them failed."""
        each = self._all(lambda i: self.devices[i].poll_copies())
        news: list[CopyNews] = [item for item in each[0] if not isinstance(item, PagesCopied)]
        for item in (item for found in each for item in found if isinstance(item, PagesCopied)):
            ends = self._pages.setdefault(item.number, [])
            ends.append(item.failed)
            if len(ends) == len(self.devices):
                failed = set[int]().union(*self._pages.pop(item.number))
                news.append(PagesCopied(item.number, tuple(sorted(failed))))
        for index, sums in enumerate(self._all(lambda i: self.devices[i].sums_offered())):
            self._offered[index] += sums
        if all(self._offered):
            offered = [sums.pop(0) for sums in self._offered]
            assert len({each.digest for each in offered}) == 1
            numbers = sum(np.frombuffer(each.numbers, np.float32) for each in offered)
            added = CopySums(offered[0].digest, np.asarray(numbers, np.float32).tobytes())
            self._all(lambda i: self.devices[i].add_sums(added))
        return news

    def start_picture(self, copy: PictureCopy) -> None:
        self._all(lambda i: self.devices[i].start_picture(copy))

    def poll_pictures(self) -> list[PictureIn]:
        return self._all(lambda i: self.devices[i].poll_pictures())[0]

    def encode(self, pictures: int) -> Any:
        return self._all(lambda i: self.devices[i].encode(pictures))[0]

    def close(self) -> None:
        self._all(lambda i: self.devices[i].close())
        for thread in self._threads:
            thread.shutdown()


class ShardedDriver(Driver):
    """A Driver of several devices."""

    def __init__(self, folder: Path, shards: int, **changes: Any) -> None:
        self.shards = shards
        super().__init__(folder, shards=shards, **changes)

    def devices(self) -> list[TorchExecutor]:
        group: Any = self.executor
        return list(group.devices)

    def make_executor(self, weights: WeightsLoader | None) -> Any:
        arena = memoryview(self.arena)
        return Lockstep(
            self.shards,
            lambda group: TorchExecutor(self.config, arena, group=group, weights=weights),
        )
