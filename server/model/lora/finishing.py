"""Adapters that a device finishes: what steps need is made of what the adapter brings."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch

from loraplex.server.engine.executor import AdapterCopy, CopySums
from loraplex.server.model.lora.arena_weights import Adapter

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
