"""Copies of adapters from the host arena to the device's, in a thread beside the steps."""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import NamedTuple

import torch

from server.engine.executor import COPY_FAILED, AdapterCopy, CopyNews, CopyOver, CopyUsable
from server.model.lora import Adapter, AdapterTable

log = logging.getLogger(__name__)

# A copy in pieces lets the steps have the memory bus in between. Each costs this thread a call, for
# which it wants the interpreter that the step loop may hold.
_PIECE_BYTES = 8 << 20
# A plan is made while the step before it runs. What is left of a copy by then is over before the
# plan's first kernel, if it is no more than this; else the running streams would wait for it.
HIDDEN_COPY_S = 0.002
_POLL_S = 0.0001
_NEWEST = 0.2  # weight of the newest copy in the mean rate


class _Queued(NamedTuple):
    """Will soon be over. event: recorded behind its bytes; None on the CPU: they are there."""

    copy: AdapterCopy
    adapter: Adapter
    event: torch.cuda.Event | None


class AdapterCopies:
    """One thread, in order of arrival. A slot can be used once `poll` reported it.

    All bytes go through one stream: what comes later into the same extents is written later.
    """

    def __init__(self, table: AdapterTable, host_arena: memoryview) -> None:
        self.table = table
        self._host = torch.frombuffer(host_arena, dtype=torch.uint8) if host_arena else None
        self._stream = torch.cuda.Stream() if table.arena.is_cuda else None
        self._pinned = self._stream is not None and self._host is not None and _pin(self._host)
        self._bytes_s = 0.0  # a running mean over copies; 0 = none has been made
        self._pending: queue.SimpleQueue[AdapterCopy | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[_Queued | CopyOver | Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="adapter-copies", daemon=True)
        self._thread.start()

    def start(self, copy: AdapterCopy) -> None:
        self._pending.put(copy)

    def poll(self) -> list[CopyNews]:
        """Bind the slots that have become usable, between steps; never blocks. What is launched
        from now on waits, on the device, for what is left of their copies.

        Raises what CUDA says when the device is lost.
        """
        told: list[CopyNews] = []
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, Exception):
                raise news
            if isinstance(news, CopyOver):
                told.append(news)
                continue
            if news.event is not None:
                torch.cuda.current_stream().wait_event(news.event)
            slot = news.copy.adapter_slot
            self.table.bind(slot, news.adapter)
            told.append(CopyUsable(slot, news.copy.layout.digest))
        return told

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
                try:
                    self._news.put(self._carry_out(copy))
                except Exception as lost:
                    self._news.put(lost)

    def _carry_out(self, copy: AdapterCopy) -> CopyOver:
        """Tells when it is usable, and returns when it is over. Raises if the device is lost."""
        slot, digest = copy.adapter_slot, copy.layout.digest
        started = time.perf_counter()
        try:
            self._queue(copy)
            event = None if self._stream is None else self._stream.record_event()
            # While the bytes are on their way.
            adapter = self.table.prepare(slot, copy.layout, copy.device_extents)
        except Exception as error:  # foreign; later copies must still be answered
            if self._stream is not None:
                self._stream.synchronize()  # pieces may be on their way; raises if it is the device
            if isinstance(error, ValueError):
                return CopyOver(slot, digest, str(error))
            log.error("a copy failed", exc_info=error)
            return CopyOver(slot, digest, COPY_FAILED)
        nbytes = sum(copy.layout.runs) * copy.layout.extent_bytes
        if event is not None:
            self._wait_until_hidden(event, nbytes, started)
        self._news.put(_Queued(copy, adapter, event))
        if event is not None:
            event.synchronize()
        copy_s = time.perf_counter() - started
        rate = nbytes / copy_s
        self._bytes_s += (_NEWEST if self._bytes_s else 1.0) * (rate - self._bytes_s)
        return CopyOver(slot, digest, copy_s=copy_s)

    def _wait_until_hidden(self, event: torch.cuda.Event, nbytes: int, started: float) -> None:
        after_s = hidden_after_s(nbytes, self._bytes_s)
        if after_s is None:
            event.synchronize()
            return
        while time.perf_counter() - started < after_s and not event.query():
            time.sleep(_POLL_S)

    def _queue(self, copy: AdapterCopy) -> None:
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
        pieces = host[source : source + nbytes].split(_PIECE_BYTES)
        places = device[target : target + nbytes].split(_PIECE_BYTES)
        for place, piece in zip(places, pieces, strict=True):
            place.copy_(piece, non_blocking=True)


def hidden_after_s(nbytes: int, bytes_s: float) -> float | None:
    """Seconds from a copy's start until what is left of it is likely to take HIDDEN_COPY_S.

    bytes_s: how fast copies were, 0 if that is unknown; then None: nobody can tell.
    """
    return max(0.0, nbytes / bytes_s - HIDDEN_COPY_S) if bytes_s else None


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
