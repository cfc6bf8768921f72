"""Pictures on the device: patches that come from host memory, the tower's work, kept results."""

import logging
import math
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from loraplex.server.engine.executor import PictureCopy, PictureIn, PictureLimits
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.spec.picture_spec import PictureSpec
from loraplex.server.model.tower.tower import Tower, TowerPass
from loraplex.server.model.weights import TowerWeights

log = logging.getLogger(__name__)

_FAILED = "the picture could not be brought to the device"


class _Coming(NamedTuple):
    """A picture whose patches are on their way. patches: where they are to lie, `[patches,
    columns]`."""

    copy: PictureCopy
    patches: torch.Tensor
    over: "Future[None]"


class EncodeTicket(NamedTuple):
    """Layers that were launched. done: recorded behind them; None = they are done."""

    done: torch.cuda.Event | None

    def ready(self) -> bool:
        return self.done is None or self.done.query()


class PictureStore:
    """The tower, its pictures and their results.

    results: `[num_blocks * block_tokens, PictureSpec.result_size]`, in the model's dtype. Pictures
    pass the tower one after the other, in the order of their start.
    """

    def __init__(self, pictures: PictureSpec, weights: TowerWeights, limits: PictureLimits) -> None:
        """Allocate the results. limits: as of `ExecutorLimits`."""
        embed = weights.body.embed
        self._device, self._dtype = embed.device, embed.dtype
        self._limits = limits
        self._tower = Tower(pictures, weights, self._device)
        rows = limits.num_blocks * limits.block_tokens
        shape = rows, pictures.result_size
        self.results = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._threads = ThreadPoolExecutor(1, "picture-reader")
        self._stream = torch.cuda.Stream() if embed.is_cuda else None
        self._coming: deque[_Coming] = deque()
        self._here: deque[_Coming] = deque()
        self._passing: TowerPass | None = None  # of the first that is here

    def warm(self) -> None:
        """Encode the largest picture there may be: all memory that any takes was asked for then."""
        form = self._limits.form
        grid = form.largest(self._limits.most_tokens)
        shape = (form.patches(grid), self._limits.columns)
        patches = torch.zeros(shape, dtype=self._dtype, device=self._device)
        passing = self._tower.begin(patches, grid)
        self._tower.advance(passing, self._tower.num_layers)
        self._tower.tokens(passing)

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
            news.append(PictureIn(coming.copy.picture, None if error is None else _FAILED))
        return news

    def encode(self, layers: int) -> EncodeTicket:
        """Launch further layers, as `Executor.encode` says."""
        copy, patches, _ = self._here[0]
        if self._passing is None:
            self._passing = self._tower.begin(patches, copy.grid)
        self._tower.advance(self._passing, layers)
        if self._passing.done == self._tower.num_layers:
            tokens = self._tower.tokens(self._passing)
            rows = to_device(self._rows(copy.blocks, len(tokens)), self._device)
            self.results.index_copy_(0, rows, tokens)
            self._here.popleft()
            self._passing = None
        if self._stream is None:
            return EncodeTicket(None)
        return EncodeTicket(torch.cuda.current_stream().record_event())

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
