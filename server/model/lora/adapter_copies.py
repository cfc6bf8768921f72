"""Copies of adapters from the host arena to the device's, on a stream beside the steps. What is
finished on the device goes back to the host arena, so that it is finished once."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import NamedTuple

import torch

from loraplex.server.engine.executor import (
    COPY_FAILED,
    AdapterCopy,
    CopyNews,
    CopyOver,
    CopySums,
    CopyUsable,
)
from loraplex.server.model.lora.arena_weights import Adapter
from loraplex.server.model.lora.lora import AdapterTable
from loraplex.server.model.pages.pinned import coalesce, pin, unpin

log = logging.getLogger(__name__)

# A copy in pieces lets the steps have the memory bus in between.
_PIECE_BYTES = 8 << 20
# A plan is made while the step before it runs. What is left of a copy by then is over before the
# plan's first kernel, if it is no more than this; else the running streams would wait for it.
HIDDEN_COPY_S = 0.003
_NEWEST = 0.2  # weight of the newest copy in the mean rate
_FINISHED = object()


class DeviceSums:
    """Sums over devices for one copy at a time."""

    def __init__(self, most: int, *, pinned: bool) -> None:
        """Allocate host memory for the numbers. most: numbers of a copy."""
        self._digest = ""
        self._numbers: torch.Tensor | None = None
        self._room = torch.empty(most, pin_memory=pinned)
        self._host = self._room[:0]
        self._is_offered = False

    @property
    def are_awaited(self) -> bool:
        return self._numbers is not None

    def begin(self, digest: str, numbers: torch.Tensor) -> None:
        """Begin to copy numbers to the host. numbers: float32 `[n]`, which become the sums. Queues
        on the current stream.
        """
        self._digest, self._numbers, self._is_offered = digest, numbers, False
        self._host = self._room[: len(numbers)]
        self._host.copy_(numbers, non_blocking=True)

    def offered(self) -> list[CopySums]:
        """Returns this device's numbers for the copy that `begin` named, once; empty when there are
        none to give. Call it only when what `begin` queued is over.
        """
        if not self.are_awaited or self._is_offered:
            return []
        self._is_offered = True
        return [CopySums(self._digest, self._host.numpy().tobytes())]

    def end(self, sums: CopySums) -> None:
        """Queues on the current stream. Raises ValueError for what nobody waits for."""
        numbers = self._numbers
        is_awaited = numbers is not None and self._is_offered and sums.digest == self._digest
        if numbers is None or not is_awaited or len(sums.numbers) != self._host.nbytes:
            raise ValueError(f"no copy of {sums.digest} waits for these sums")
        if sums.numbers:
            self._host.copy_(torch.frombuffer(bytearray(sums.numbers), dtype=torch.float32))
            numbers.copy_(self._host, non_blocking=True)
        self._numbers = None


class Unfinished(NamedTuple):
    """An adapter whose bytes are queued or there. copy_s: of the copy, where that is over."""

    copy: AdapterCopy
    adapter: Adapter
    copy_s: float = 0.0


class _Job(NamedTuple):
    item: Unfinished
    pieces: Iterator[torch.Tensor | None]


class Finisher:
    """Finish adapters that need work on the device after their copy. One adapter after the other,
    in pieces: steps share the device with one piece at most.

    vectors: as `OutputVectors.pieces`. most_sums: numbers of an adapter that devices add up.
    stream: where pieces are queued; None = there is none, and each is over at once.
    """

    def __init__(
        self,
        vectors: Callable[[Adapter], Iterator[torch.Tensor | None]],
        most_sums: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._vectors = vectors
        self._stream = stream
        self._beside = nullcontext() if stream is None else torch.cuda.stream(stream)
        self._jobs: deque[_Job] = deque()
        self._sums = DeviceSums(most_sums, pinned=stream is not None)  # of the oldest job
        self._piece: torch.cuda.Event | None = None  # recorded behind the last one queued

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs)

    def begin(self, item: Unfinished) -> None:
        self._jobs.append(_Job(item, self._vectors(item.adapter)))

    def advance(self) -> Unfinished | None:
        """Queue a piece of what the oldest lacks, once the last piece is over. Returns the adapter
        whose last piece has been queued. Raises what a piece raises: see `give_up`."""
        if not self._jobs or self._sums.are_awaited or not self._is_piece_over():
            return None
        item, pieces = self._jobs[0]
        with self._beside:
            made = next(pieces, _FINISHED)
            if isinstance(made, torch.Tensor):
                self._sums.begin(item.copy.layout.digest, made)
        self._piece = None if self._stream is None else self._stream.record_event()
        if made is not _FINISHED:
            return None
        self._jobs.popleft()
        return item

    def give_up(self) -> AdapterCopy:
        """The oldest, whose piece has failed."""
        return self._jobs.popleft().item.copy

    def sums_offered(self) -> list[CopySums]:
        """Return numbers that wait to be summed over processes, as `GroupMember` says."""
        return self._sums.offered() if self._is_piece_over() else []

    def add_sums(self, sums: CopySums) -> None:
        """Take numbers summed over processes, as `GroupMember` says."""
        with self._beside:
            self._sums.end(sums)

    def _is_piece_over(self) -> bool:
        return self._piece is None or self._piece.query()


class _Moving(NamedTuple):
    """Copy whose bytes are queued. began, ended: recorded around them. finished: recorded behind
    what was made of them on the device, and written: behind its way back; None = it came
    finished.
    """

    copy: AdapterCopy
    adapter: Adapter
    nbytes: int
    began: torch.cuda.Event
    ended: torch.cuda.Event
    finished: torch.cuda.Event | None = None
    written: torch.cuda.Event | None = None


class AdapterCopies:
    """Copy adapters from host memory to the device, in order of arrival, on one stream: what comes
    later into the same extents is written later.

    The step loop's own thread queues them: another would need the interpreter that a launch holds.
    On the CPU `start` copies. A slot can be used once `poll` reported it.
    """

    def __init__(
        self,
        table: AdapterTable,
        host_arena: memoryview,
        vectors: Callable[[Adapter], Iterator[torch.Tensor | None]],
    ) -> None:
        """Make a stream, and pin the host's arena. vectors: `OutputVectors.pieces`."""
        self.table = table
        self._host = torch.frombuffer(host_arena, dtype=torch.uint8) if host_arena else None
        self._stream = torch.cuda.Stream() if table.arena.is_cuda else None
        self._beside = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        self._pinned = self._stream is not None and self._host is not None and pin(self._host)
        self._bytes_s = 0.0  # a running mean over copies; 0 = none has been made
        self._oldest_began = 0.0  # of all that move; perf_counter
        self._unusable: deque[_Moving] = deque()
        self._usable: deque[_Moving] = deque()  # all of them before those that are not
        self._unfinished: deque[_Moving] = deque()  # as the finisher has them
        self._finisher = Finisher(vectors, table.sites.summed_outputs, self._stream)
        self._news: list[CopyNews] = []
        self._lost: Exception | None = None

    def start(self, copy: AdapterCopy) -> None:
        """Queue a copy. Raises nothing: `poll` tells what went wrong."""
        try:
            with torch.inference_mode(), self._beside:
                self._start(copy)
        except ValueError as error:
            self._give_up(copy, str(error))
        except Exception as error:  # foreign; other copies must still be answered
            log.error("a copy failed", exc_info=error)
            self._give_up(copy, COPY_FAILED)

    def poll(self) -> list[CopyNews]:
        """Bind the slots that have become usable; never blocks. What is launched
        from now on waits, on the device, for what is left of their copies.

        Raises what CUDA says when the device is lost.
        """
        if self._lost is not None:
            raise self._lost
        told = self._ended()
        while self._unusable and self._is_hidden(self._unusable[0]):
            told.append(self._begin_use(self._unusable.popleft()))
        return told

    def use_oldest(self) -> None:
        """Let steps use the oldest copy that none may use yet, as `poll` does once it is usable. On
        the CPU copies are usable at once.
        """
        if self._unusable:
            self._begin_use(self._unusable.popleft())

    def over(self) -> list[CopyOver]:
        """Return the copies that have ended, as `poll` does, and bind no slot."""
        if self._lost is not None:
            raise self._lost
        return [news for news in self._ended() if isinstance(news, CopyOver)]

    def sums_offered(self) -> list[CopySums]:
        """Return numbers that wait to be summed over processes, as `GroupMember` says."""
        return self._finisher.sums_offered()

    def add_sums(self, sums: CopySums) -> None:
        """Take numbers summed over processes, as `GroupMember` says."""
        self._finisher.add_sums(sums)
        self._finish()

    def _ended(self) -> list[CopyNews]:
        self._finish()
        told, self._news = self._news, []
        while self._usable and (self._usable[0].written or self._usable[0].ended).query():
            told.append(self._end(self._usable.popleft()))
        return told

    def _begin_use(self, moving: _Moving) -> CopyUsable:
        self._usable.append(moving)
        torch.cuda.current_stream().wait_event(moving.finished or moving.ended)
        return self._bind(moving.copy, moving.adapter)

    def close(self) -> None:
        if self._pinned and self._host is not None and self._stream is not None:
            with suppress(RuntimeError):  # the device may be lost
                self._stream.synchronize()
            unpin(self._host)
        self._host = None

    def _start(self, copy: AdapterCopy) -> None:
        now = time.perf_counter()
        if self._stream is None:
            self._queue(copy)
            copy_s = time.perf_counter() - now
            adapter = self.table.prepare(copy.adapter_slot, copy.layout, copy.device_extents)
            if copy.layout.is_to_finish:
                self._finisher.begin(Unfinished(copy, adapter, copy_s))
            else:
                self._use(copy, adapter, copy_s)
            return
        began = self._stream.record_event(torch.cuda.Event(enable_timing=True))
        self._queue(copy)
        ended = self._stream.record_event(torch.cuda.Event(enable_timing=True))
        # While the bytes are on their way.
        adapter = self.table.prepare(copy.adapter_slot, copy.layout, copy.device_extents)
        if not self._usable and not self._unusable:
            self._oldest_began = now
        moving = _Moving(copy, adapter, copy.layout.shard_nbytes, began, ended)
        if copy.layout.is_to_finish:
            self._unfinished.append(moving)
            self._finisher.begin(Unfinished(copy, adapter))
        else:
            self._unusable.append(moving)

    def _finish(self) -> None:
        try:
            finished = self._finisher.advance()
        except Exception as error:  # foreign; other copies must still be answered
            log.error("an adapter's vectors could not be made", exc_info=error)
            if self._stream is not None:
                self._unfinished.popleft()
            self._give_up(self._finisher.give_up(), COPY_FAILED)
            return
        if finished is not None:
            self._write_back(finished)

    def _write_back(self, item: Unfinished) -> None:
        """Write what is finished back to the host block.

        If that fails, the host block is worthless, and so is the device.
        """
        finished = None if self._stream is None else self._stream.record_event()
        try:
            with self._beside:
                for piece, place in self._pieces(item.copy):
                    piece.copy_(place, non_blocking=True)
        except Exception as lost:  # foreign
            self._lost = lost
            return
        if self._stream is None:
            self._use(*item)
            return
        written = self._stream.record_event()
        moving = self._unfinished.popleft()
        self._unusable.append(moving._replace(finished=finished, written=written))

    def _use(self, copy: AdapterCopy, adapter: Adapter, copy_s: float) -> None:
        """Bind a finished copy to its slot, on the CPU."""
        self._news.append(self._bind(copy, adapter))
        self._news.append(self._over(copy, copy_s))

    def _over(self, copy: AdapterCopy, copy_s: float) -> CopyOver:
        layout = copy.layout
        return CopyOver(
            copy.adapter_slot, layout.digest, copy_s=copy_s, is_finished=layout.is_to_finish
        )

    def _give_up(self, copy: AdapterCopy, error: str) -> None:
        try:
            if self._stream is not None:
                self._stream.synchronize()  # pieces may be on their way; raises if it is the device
        except Exception as lost:
            self._lost = lost
        self._news.append(CopyOver(copy.adapter_slot, copy.layout.digest, error))

    def _bind(self, copy: AdapterCopy, adapter: Adapter) -> CopyUsable:
        self.table.bind(copy.adapter_slot, adapter)
        return CopyUsable(copy.adapter_slot, copy.layout.digest)

    def _is_hidden(self, first: _Moving) -> bool:
        """Whether the next step would hardly wait for `first`, the first not usable."""
        finished = any(moving.finished for moving in (*self._usable, first))
        if finished or self._finisher.is_busy:  # who knows how long that takes
            return bool((first.finished or first.ended).query())
        nbytes = sum(moving.nbytes for moving in self._usable) + first.nbytes
        spent_s = time.perf_counter() - self._oldest_began
        return is_hidden(nbytes, self._bytes_s, spent_s) or first.ended.query()

    def _end(self, moving: _Moving) -> CopyOver:
        copy_s = moving.began.elapsed_time(moving.ended) / 1e3
        rate = moving.nbytes / max(copy_s, 1e-9)
        self._bytes_s += (_NEWEST if self._bytes_s else 1.0) * (rate - self._bytes_s)
        self._oldest_began = time.perf_counter()
        return self._over(moving.copy, copy_s)

    def _queue(self, copy: AdapterCopy) -> None:
        for piece, place in self._pieces(copy):
            place.copy_(piece, non_blocking=True)

    def _pieces(self, copy: AdapterCopy) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of the host's arena, and where each lies in the device's.

        Raises ValueError for a piece that does not fit.
        """
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
            yield from self._pieces_of_run(source * size, target * size, run * size)

    def _pieces_of_run(
        self, source: int, target: int, nbytes: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        host, device = self._host, self.table.arena
        host_bytes = 0 if host is None else host.numel()
        inside = 0 <= source <= host_bytes - nbytes and 0 <= target <= device.numel() - nbytes
        if host is None or not inside:
            raise ValueError("a run of extents lies outside an arena")
        pieces = host[source : source + nbytes].split(_PIECE_BYTES)
        places = device[target : target + nbytes].split(_PIECE_BYTES)
        return zip(pieces, places, strict=True)


def is_hidden(nbytes: int, bytes_s: float, spent_s: float) -> bool:
    """Whether what is left of the copies is likely to take no more than HIDDEN_COPY_S.

    nbytes: of this one and those before it that are not over. spent_s: since the first of them
    began. bytes_s: how fast copies were, 0 if that is unknown; then nobody can tell.
    """
    return bytes_s > 0 and nbytes / bytes_s - spent_s <= HIDDEN_COPY_S
