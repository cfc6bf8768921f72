"""Copies of whole pages between the device, host memory and the disk, beside the steps.

Host memory is page-major: a page's numbers of all layers lie together there, as they do on the
device. So a page is one copy, and neighbours are one copy together; the copy engines make them, and
no multiprocessor is taken from the steps.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from loraplex.server.engine.executor import PageCopies, PagesCopied, PageWay
from loraplex.server.model.pages.page_files import PageFault, PageFiles
from loraplex.server.model.pages.pinned import coalesce, pin, unpin

log = logging.getLogger(__name__)

_READERS = 4
_DONE: dict[PageWay, str] = {"write": "written to disk", "read": "read from disk"}


class _Moving(NamedTuple):
    """Copies under way. ended: recorded behind those of the device. faults: of each thread that
    copies pages of the disk, the reasons of those that failed, by place."""

    copies: PageCopies
    ended: torch.cuda.Event | None = None
    faults: Sequence[Future[dict[int, str]]] = ()

    @property
    def is_over(self) -> bool:
        if self.ended is not None:
            return bool(self.ended.query())
        return all(fault.done() for fault in self.faults)


class PageCopier:
    """Copies to the host and from there have a stream each. Nothing here waits for the device, nor
    for the disk, which threads read and write: pages are written, and dropped, in order.

    On the CPU `start` copies.
    """

    def __init__(
        self,
        pools: Sequence[torch.Tensor],
        memory: memoryview,
        slots: int,
        files: PageFiles | None,
        *,
        after_steps: bool,
    ) -> None:
        """Pin the memory. pools: `[pages, n]` each; a page is a row of each. memory: of so many
        slots of a page. after_steps: whether copies wait on the device for what was launched before
        them: other devices of a group may be done with a step while this one is not.

        Raises MemoryError where the memory cannot be pinned.
        """
        self._pools = [pool.view(torch.uint8) for pool in pools]
        host = torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0)
        sizes = [slots * pool.shape[1] for pool in self._pools]
        parts = host[: sum(sizes)].split(sizes)
        self._slots = [part.view(slots, -1) for part in parts] if slots else []
        self._pinned = host if slots and pools[0].is_cuda else None
        if self._pinned is not None and not pin(self._pinned):
            raise MemoryError(f"{len(memory)} bytes of host memory cannot be pinned")
        on_gpu = self._pinned is not None
        self._out = torch.cuda.Stream() if on_gpu else None
        self._in = torch.cuda.Stream() if on_gpu else None
        self._after_steps = after_steps
        self._files = files
        self._writer = ThreadPoolExecutor(1, "page-writer")
        self._readers = ThreadPoolExecutor(_READERS, "page-reader")
        self._moving: list[_Moving] = []
        self._lost: Exception | None = None

    def start(self, copies: PageCopies) -> None:
        """Begin copies. Raises nothing: `poll` tells what went wrong."""
        try:
            with torch.inference_mode():
                self._moving.append(self._start(copies))
        except Exception as lost:  # CUDA's, of any type
            self._lost = lost

    def poll(self) -> list[PagesCopied]:
        """The copies that are over; never blocks. Raises what CUDA says when the device is lost."""
        if self._lost is not None:
            raise self._lost
        if not self._moving:
            return []
        ended, going = list[_Moving](), list[_Moving]()
        for moving in self._moving:
            (ended if moving.is_over else going).append(moving)
        self._moving = going
        return [_told(moving) for moving in ended]

    def stored(self, most: int) -> tuple[bytes, ...]:
        """Names of the pages on disk, as `PageFiles.stored` says."""
        return () if self._files is None else tuple(self._files.stored(most))

    def close(self) -> None:
        for threads in (self._writer, self._readers):
            threads.shutdown(cancel_futures=True)
        if self._files is not None:
            self._files.close()
        if self._pinned is not None:
            for stream in filter(None, (self._out, self._in)):
                with suppress(RuntimeError):  # the device may be lost
                    stream.synchronize()
            unpin(self._pinned)
        self._slots = []

    def _start(self, copies: PageCopies) -> _Moving:
        files = self._files
        if copies.way in ("out", "in"):
            return self._copy(copies)
        assert files is not None
        if copies.way == "read":
            places = range(len(copies.keys))
            parts = [places[first::_READERS] for first in range(_READERS)]
            act = partial(self._on_disk, files.read, copies)
            return _Moving(copies, faults=[self._readers.submit(act, part) for part in parts])
        act = partial(self._on_disk, files.write, copies)
        if copies.way == "drop":
            act = partial(_drop, files, copies)
        return _Moving(copies, faults=[self._writer.submit(act, range(len(copies.keys)))])

    def _copy(self, copies: PageCopies) -> _Moving:
        is_out = copies.way == "out"
        stream = self._out if is_out else self._in
        if stream is None:
            for target, source in self._rows(copies, is_out):
                target.copy_(source)
            return _Moving(copies)
        if self._after_steps:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for target, source in self._rows(copies, is_out):
                target.copy_(source, non_blocking=True)
        return _Moving(copies, stream.record_event())

    def _rows(
        self, copies: PageCopies, is_out: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Where each run of pages goes, and where it is."""
        for count, slot, page in coalesce([1] * len(copies.pages), copies.slots, copies.pages):
            for pool, slots in zip(self._pools, self._slots, strict=True):
                device, host = pool[page : page + count], slots[slot : slot + count]
                yield (host, device) if is_out else (device, host)

    def _on_disk(
        self,
        act: Callable[[bytes, Sequence[memoryview]], None],
        copies: PageCopies,
        places: Iterable[int],
    ) -> dict[int, str]:
        """In a thread: write, or read, the pages at these places. Returns those that failed."""
        faults = {}
        for place in places:
            try:
                slot = copies.slots[place]
                act(copies.keys[place], [memoryview(of[slot].numpy()) for of in self._slots])
            except PageFault as fault:
                faults[place] = str(fault)
        return faults


def _drop(files: PageFiles, copies: PageCopies, places: Iterable[int]) -> dict[int, str]:
    for place in places:
        files.drop(copies.keys[place])
    return {}


def _told(moving: _Moving) -> PagesCopied:
    copies, faults = moving.copies, dict[int, str]()
    for of_thread in moving.faults:
        faults |= of_thread.result()
    if faults:
        what, why = _DONE[copies.way], next(iter(faults.values()))
        text = "%d of %d pages could not be %s: %s"
        log.warning(text, len(faults), len(copies.keys), what, why)
    return PagesCopied(copies.number, tuple(sorted(faults)))
