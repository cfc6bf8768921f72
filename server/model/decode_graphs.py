"""CUDA graphs of decode steps: one for each padded batch size, without and with adapters.

A graph reads one packed upload, so it is valid for any sequences, contexts, adapters and ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from server.kernels.decode_inputs import gather_inputs
from server.kernels.greedy import GreedyScratch, greedy_append
from server.kernels.segments import route
from server.model.attention_cuda import Attention, GraphAttention, PagedAttention, is_balanced
from server.model.decode_batch import APPEND, NUM_COLUMNS, ROW, SLOT, DecodeBatch
from server.model.decoder import Decoder
from server.model.ops_cuda import MAX_DECODE_ROWS, CudaOps, CudaPlan, DeviceLora
from server.model.rows import Rows

# One more than uploads that can be on their way while the next is written.
_UPLOADS = 4
_ALIGNMENT = 64


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, then by eights up to what `max_rows` sequences need, at most 256."""
    top = min(max_rows, MAX_DECODE_ROWS)
    sizes = [1, 2, 4, *range(8, MAX_DECODE_ROWS + 1, 8)]
    return tuple(size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < top)


@dataclass(frozen=True, slots=True)
class GraphStep:
    """What a replayed step leaves: logits `[slices, vocab]` and the greedy ids int32 `[slices]`
    (-1 = not finite). Both are valid until the next replay, in stream order."""

    logits: torch.Tensor
    token_ids: torch.Tensor


class _Packed:
    """Where the parts of an upload of `size` rows lie, on the host and on the device alike."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.last_page_len = _align(NUM_COLUMNS * size)
        self.kv_indptr = _align(self.last_page_len + size)
        self.end = self.kv_indptr + size + 1

    def columns(self, packed: torch.Tensor) -> torch.Tensor:
        return packed[: NUM_COLUMNS * self.size].view(NUM_COLUMNS, self.size)


class DecodeGraphs:
    """Captured once at start; `launch` uploads, plans and replays."""

    def __init__(
        self,
        decoder: Decoder[CudaPlan, DeviceLora],
        ops: CudaOps,
        attention: PagedAttention,
        rows: Rows,
        sizes: tuple[int, ...],
    ) -> None:
        self.sizes = sizes
        self._decoder, self._ops, self._attention, self._rows = decoder, ops, attention, rows
        self._page_size = ops.cache.page_size
        most, device = sizes[-1], ops.device
        vocab, dtype = decoder.config.vocab_size, ops.cache.k.dtype
        self._logits = torch.empty(most, vocab, dtype=dtype, device=device)
        self._sampled = torch.empty(most, dtype=torch.int32, device=device)
        self._token_ids, self._positions, self._slots = (
            torch.zeros(most, dtype=torch.int64, device=device) for _ in range(3)
        )
        page_lists = most * rows.page_table.shape[1]
        self._page_lists = torch.zeros(page_lists, dtype=torch.int32, device=device)
        self._scratch = GreedyScratch(most, device)
        widest = _Packed(most).end
        self._uploads = torch.zeros(_UPLOADS, widest, dtype=torch.int32, pin_memory=True)
        self._launched = 0
        self._packed = {s: torch.zeros(widest, dtype=torch.int32, device=device) for s in sizes}
        self._plans = {size: self._attention_of(size) for size in sizes}
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    def _attention_of(self, size: int) -> GraphAttention:
        parts, packed = _Packed(size), self._packed[size]
        indptr = packed[parts.kv_indptr : parts.end]
        last = packed[parts.last_page_len : parts.last_page_len + size]
        return GraphAttention(self._attention, indptr, last, self._page_lists)

    def capture(self, with_adapters: bool) -> None:
        """The graphs of one family, largest first so that the others fit in its memory."""
        for size in reversed(self.sizes):
            step = self._step(size, with_adapters)
            self._upload(size, DecodeBatch(np.zeros((NUM_COLUMNS, 0), np.int32), ()))
            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step()
            self._graphs[size, with_adapters] = graph

    def takes(self, batch: DecodeBatch) -> bool:
        """Whether the batch can run in a graph, and would not be slower in it."""
        if len(batch) > self.sizes[-1] or not is_balanced(batch.contexts):
            return False
        if not batch.has_adapters:
            return True
        known = (self.sizes[0], True) in self._graphs
        return known and not self._ops.table.changes_model(batch.columns[SLOT])

    def launch(self, batch: DecodeBatch) -> GraphStep:
        n = len(batch)
        size = next(size for size in self.sizes if size >= n)
        self._upload(size, batch)
        self._graphs[size, batch.has_adapters].replay()
        return GraphStep(self._logits[:n], self._sampled[:n])

    def _upload(self, size: int, batch: DecodeBatch) -> None:
        """Fill up with rows that compute nothing of use, on a row and a page of their own."""
        n, parts = len(batch), _Packed(size)
        self._launched += 1
        upload = self._uploads[self._launched % _UPLOADS]
        host = upload.numpy()
        columns = host[: NUM_COLUMNS * size].reshape(NUM_COLUMNS, size)
        columns[:, :n] = batch.columns
        columns[:, n:] = self._padding()
        lengths = np.ones(size, dtype=np.int32)
        lengths[:n] = batch.contexts
        counts = -(-lengths // self._page_size)
        last = lengths - (counts - 1) * self._page_size
        host[parts.last_page_len : parts.last_page_len + size] = last
        indptr = host[parts.kv_indptr : parts.end]
        indptr[0] = 0
        np.cumsum(counts, out=indptr[1:])
        target = self._packed[size][: parts.end]
        target.copy_(upload[: parts.end], non_blocking=True)
        self._plans[size].plan(upload[parts.kv_indptr : parts.end], torch.from_numpy(lengths))

    def _padding(self) -> np.ndarray:
        return np.array([[self._rows.scratch], [0], [-1], [0], [-1], [-1], [-1]], dtype=np.int32)

    def _step(self, size: int, with_adapters: bool) -> Callable[[], None]:
        parts, packed = _Packed(size), self._packed[size]
        columns = parts.columns(packed)
        indptr = packed[parts.kv_indptr : parts.end]
        outputs = (self._token_ids[:size], self._positions[:size], self._slots[:size])
        lora = self._ops.allocate_lora(size, model_sites=False) if with_adapters else None
        attention: Attention = self._plans[size].step
        plan = CudaPlan(outputs[1], outputs[2], attention)
        logits, sampled = self._logits[:size], self._sampled[:size]
        rows, head = self._rows, self._decoder.weights.lm_head

        def step() -> None:
            gather_inputs(
                columns,
                indptr,
                rows.tokens,
                rows.page_table,
                self._page_size,
                (*outputs, self._page_lists),
            )
            if lora is not None:
                route(columns[SLOT], lora.segments)
            normed = self._decoder.forward(outputs[0], plan, lora)
            torch.mm(normed, head.T, out=logits)
            greedy_append(
                logits, columns[ROW], columns[APPEND], rows.tokens, sampled, self._scratch
            )

        return step


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
