"""Copies of adapters from the host arena to the device's, in a thread beside the steps."""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import NamedTuple

import torch

from server.engine.executor import COPY_FAILED, AdapterCopy, CopyDone
from server.model.lora import Adapter, AdapterTable

log = logging.getLogger(__name__)

# A copy in pieces lets the steps have the memory bus in between.
_PIECE_BYTES = 4 << 20


class _Finished(NamedTuple):
    """copy_s: seconds from the copy's turn to its end."""

    copy: AdapterCopy
    adapter: Adapter | None
    error: str | None
    copy_s: float = 0.0


class AdapterCopies:
    """One thread, in order of arrival. A slot can be used once `finished` reported it."""

    def __init__(self, table: AdapterTable, host_arena: memoryview) -> None:
        self.table = table
        self._host = torch.frombuffer(host_arena, dtype=torch.uint8) if host_arena else None
        self._stream = torch.cuda.Stream() if table.arena.is_cuda else None
        self._pinned = self._stream is not None and self._host is not None and _pin(self._host)
        self._pending: queue.SimpleQueue[AdapterCopy | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[_Finished] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="adapter-copies", daemon=True)
        self._thread.start()

    def start(self, copy: AdapterCopy) -> None:
        self._pending.put(copy)

    def finished(self) -> list[CopyDone]:
        """Bind the slots whose copies are over, between steps; never blocks.

        Raises what CUDA says when it is the device that fails them all.
        """
        done = []
        while not self._finished.empty():
            copy, adapter, error, copy_s = self._finished.get()
            if error == COPY_FAILED and self._stream is not None:
                self._stream.synchronize()
            if adapter is not None:
                self.table.bind(copy.adapter_slot, adapter)
            done.append(CopyDone(copy.adapter_slot, copy.layout.digest, error, copy_s))
        return done

    def close(self) -> None:
        """Ends the thread after the copy that it is at."""
        with suppress(queue.Empty):  # the thread may take the last one
            while True:
                self._pending.get_nowait()
        self._pending.put(None)
        self._thread.join()
        if self._pinned and self._host is not None:
            torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr())
        self._host = None

    def _run(self) -> None:
        stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.inference_mode(), stream:
            while (copy := self._pending.get()) is not None:
                started = time.perf_counter()
                try:
                    self._copy(copy)
                    adapter = self.table.prepare(
                        copy.adapter_slot, copy.layout, copy.device_extents
                    )
                    if self._stream is not None:
                        self._stream.synchronize()
                except ValueError as error:
                    self._finished.put(_Finished(copy, None, str(error)))
                except Exception as error:  # the device's; later copies must still be answered
                    log.error("a copy failed", exc_info=error)
                    self._finished.put(_Finished(copy, None, COPY_FAILED))
                else:
                    copy_s = time.perf_counter() - started
                    self._finished.put(_Finished(copy, adapter, None, copy_s))

    def _copy(self, copy: AdapterCopy) -> None:
        layout = copy.layout
        if layout.extent_bytes != self.table.extent_bytes:
            raise ValueError(
                f"the slab has extents of {layout.extent_bytes} bytes, the arena of"
                f" {self.table.extent_bytes}"
            )
        if not len(layout.runs) == len(copy.host_extents) == len(copy.device_extents):
            raise ValueError("a run of extents lacks a place in the host or the device arena")
        size = layout.extent_bytes
        for run, source, target in coalesce(layout.runs, copy.host_extents, copy.device_extents):
            self._copy_run(source * size, target * size, run * size)

    def _copy_run(self, source: int, target: int, nbytes: int) -> None:
        host, device = self._host, self.table.arena
        host_bytes = 0 if host is None else host.numel()
        inside = 0 <= source <= host_bytes - nbytes and 0 <= target <= device.numel() - nbytes
        if host is None or not inside:
            raise ValueError("a run of extents lies outside an arena")
        for offset in range(0, nbytes, _PIECE_BYTES):
            end = min(offset + _PIECE_BYTES, nbytes)
            device[target + offset : target + end].copy_(
                host[source + offset : source + end], non_blocking=True
            )


def coalesce(
    runs: Sequence[int], sources: Sequence[int], targets: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(length, source, target) of the fewest copies that move these runs, all in extents.

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


def _pin(host: torch.Tensor) -> bool:
    """Once at start: copies from pinned memory run at the bus's speed and beside the host."""
    status = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0))
    if status:
        log.warning("the host arena cannot be pinned (CUDA error %d): loads are slower", status)
        # The runtime keeps the error, and the next kernel would be blamed for it.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return status == 0
