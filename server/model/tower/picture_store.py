"""Pictures on the device: patches that come from host memory, the tower's work, kept results."""

import logging
import math
import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from loraplex.server.engine.executor import PictureCopy, PictureIn, PictureLimits
from loraplex.server.model.lora.lora import AdapterTable
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.spec.picture_spec import PictureSpec
from loraplex.server.model.tower.tower import Tower, TowerInput
from loraplex.server.model.weights import TowerWeights

log = logging.getLogger(__name__)

# Pieces that are launched at once, however few rows they have: the host is as long at each.
_MOST_PIECES = 8
_FAILED = "the picture could not be brought to the device"


class _Coming(NamedTuple):
    """A picture whose patches are on their way. patches: where they are to lie, `[patches,
    columns]`."""

    copy: PictureCopy
    patches: torch.Tensor
    over: "Future[None]"


class EncodeTicket(NamedTuple):
    """Work that was launched, as of `loraplex.server.engine.executor.TowerTicket`. began, done:
    recorded around it; None = it is done, and took `host_s`."""

    is_last: bool
    host_s: float
    began: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None

    def ready(self) -> bool:
        return self.done is None or self.done.query()

    def seconds(self) -> float:
        if self.began is None or self.done is None:
            return self.host_s
        return float(self.began.elapsed_time(self.done)) / 1e3


class _Pass(NamedTuple):
    """Pictures that pass the tower together. work: the rest of it, as of `Tower.encode`."""

    pictures: list[_Coming]
    work: Generator[float, None, tuple[torch.Tensor, ...]]


class PictureStore:
    """The tower, its pictures and their results.

    results: `[num_blocks * block_tokens, PictureSpec.result_size]`, in the model's dtype. Pictures
    pass the tower in the order of their start.
    """

    def __init__(
        self,
        pictures: PictureSpec,
        weights: TowerWeights,
        limits: PictureLimits,
        table: AdapterTable,
    ) -> None:
        """Allocate the results. limits: as of `ExecutorLimits`. table: of adapters."""
        embed = weights.body.embed
        self._device, self._dtype = embed.device, embed.dtype
        self._limits, self._table = limits, table
        assert table.tower is not None
        self._tower = Tower(pictures, weights, table.tower, self._device, limits.chunk)
        rows = limits.num_blocks * limits.block_tokens
        shape = rows, pictures.result_size
        self.results = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._threads = ThreadPoolExecutor(1, "picture-reader")
        self._stream = torch.cuda.Stream() if embed.is_cuda else None
        self._coming: deque[_Coming] = deque()
        self._here: deque[_Coming] = deque()
        self._passing: _Pass | None = None

    def warm(self) -> None:
        """Encode the largest picture there may be: all memory that any takes was asked for then."""
        form = self._limits.form
        grid = form.largest(self._limits.most_tokens)
        shape = (form.patches(grid), self._limits.columns)
        patches = torch.zeros(shape, dtype=self._dtype, device=self._device)
        for _ in self._tower.encode([TowerInput(patches, grid)]):
            pass

    def start(self, copy: PictureCopy, memory: memoryview) -> None:
        """Begin to bring a picture's patches. memory: which the copy's segment lies in. Raises
        nothing: `poll` tells what went wrong."""
        shape = (copy.rows, copy.columns)
        try:
            host = np.frombuffer(memory, np.float32, math.prod(shape), copy.segment).reshape(shape)
            patches = torch.empty(shape, dtype=self._dtype, device=self._device)
            begun = None if self._stream is None else torch.cuda.current_stream().record_event()
            over = self._threads.submit(self._bring, host, patches, begun)
        except (RuntimeError, ValueError) as error:  # no memory, or nothing lies there
            patches, over = self.results[:0], Future()
            over.set_exception(error)
        self._coming.append(_Coming(copy, patches, over))

    def poll(self) -> list[PictureIn]:
        """News of pictures; never blocks."""
        news = []
        while self._coming and self._coming[0].over.done():
            coming = self._coming.popleft()
            error = coming.over.exception()
            if error is None:
                self._here.append(coming)
            else:
                log.error("a picture could not be brought to the device", exc_info=error)
            news.append(PictureIn(coming.copy.blocks[0], None if error is None else _FAILED))
        return news

    def encode(self, pictures: int) -> EncodeTicket:
        """Launch further work, as `Executor.encode` says."""
        stream, began_s = self._stream, time.perf_counter()
        began = None if stream is None else _mark()
        if self._passing is None:
            taken = [self._here.popleft() for _ in range(pictures)]
            self._passing = _Pass(taken, self._tower.encode([*map(self._input, taken)]))
        is_last = self._advance(self._passing)
        done = None if stream is None else _mark()
        return EncodeTicket(is_last, time.perf_counter() - began_s, began, done)

    def _input(self, picture: _Coming) -> TowerInput:
        copy = picture.copy
        lora = self._table.of_tower(copy.adapter_slot, copy.scale)
        return TowerInput(picture.patches, copy.grid, lora)

    def _advance(self, passing: _Pass) -> bool:
        """Launch pieces for about a chunk; whether they were the last."""
        spent = 0.0
        for _ in range(_MOST_PIECES):
            try:
                cost = next(passing.work)
            except StopIteration as end:
                self._keep(passing, end.value)
                return True
            spent += cost
            if spent + cost > self._limits.chunk:  # the next piece is about as large
                break
        return False

    def _keep(self, passing: _Pass, results: tuple[torch.Tensor, ...]) -> None:
        """Keep the results of pictures."""
        self._passing = None
        for picture, tokens in zip(passing.pictures, results, strict=True):
            rows = to_device(self._rows(picture.copy.blocks, len(tokens)), self._device)
            self.results.index_copy_(0, rows, tokens)

    def forget(self) -> None:
        """Forget all pictures on their way."""
        for coming in self._coming:
            coming.over.cancel()
        self._coming.clear()
        self._here.clear()
        self._passing = None

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _rows(self, blocks: tuple[int, ...], tokens: int) -> np.ndarray:
        """Rows of results of a picture's tokens, int64 `[tokens]`."""
        size = self._limits.block_tokens
        return (np.array(blocks)[:, None] * size + np.arange(size)).reshape(-1)[:tokens]

    def _bring(
        self, stored: np.ndarray, patches: torch.Tensor, begun: torch.cuda.Event | None
    ) -> None:
        """Copy patches to the device, on a thread of their own. begun: recorded when the memory was
        taken, which earlier work may still use.
        """
        with torch.inference_mode():
            host = torch.from_numpy(stored).to(self._dtype)
            if self._stream is None or begun is None:
                patches.copy_(host)
                return
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(begun)
                patches.copy_(host)  # memory that is not pinned: this waits for the copy


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
