"""CUDA graphs of decode steps: one for each padded batch size and reach of its adapters.

A graph reads one packed upload, so it is valid for any sequences, contexts, adapters and ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from loraplex.server.kernels.attention.decode_inputs import Shifted, gather_inputs
from loraplex.server.kernels.sampling.greedy import GreedyScratch, greedy_append
from loraplex.server.model.decoder import Decoder
from loraplex.server.model.graphs.decode_batch import APPEND, ROW, SLOT, DecodeBatch, num_columns
from loraplex.server.model.lora.lora import Reach
from loraplex.server.model.ops.attention.attention_cuda import Attention, decode_views
from loraplex.server.model.ops.cuda.capture import record
from loraplex.server.model.ops.cuda.device_lora import DeviceLora
from loraplex.server.model.ops.cuda.lora_linear import LinearOutput
from loraplex.server.model.ops.cuda.ops_cuda import CudaOps, CudaPlan
from loraplex.server.model.ops.cuda.states_cuda import NO_STATES, walk_columns, walks
from loraplex.server.model.ops.sizes import padded_size
from loraplex.server.model.ops.state_steps import StatePhase, StateSteps
from loraplex.server.model.steps.rows import Rows

# One more than uploads that can be on their way while the next is written.
_UPLOADS = 4


@dataclass(frozen=True, slots=True)
class GraphStep:
    """Results of a replayed step: logits `[slices, vocab]`, greedy ids int32 `[slices]` (-1 = not
    finite).

    Both are valid until the next replay, in stream order.
    """

    logits: torch.Tensor
    token_ids: torch.Tensor


class DecodeGraphs:
    """Graphs of decode steps. Captured once at start; `launch` uploads, plans and replays."""

    def __init__(
        self,
        decoder: Decoder[CudaPlan, DeviceLora, LinearOutput],
        ops: CudaOps,
        rows: Rows,
        sizes: tuple[int, ...],
    ) -> None:
        self.sizes = sizes
        self._decoder, self._ops, self._rows = decoder, ops, rows
        most, device = sizes[-1], ops.device
        vocab, dtype = decoder.spec.vocab_size, ops.cache.dtype
        self._logits = torch.empty(most, vocab, dtype=dtype, device=device)
        self._sampled = torch.empty(most, dtype=torch.int32, device=device)
        self._token_ids, self._positions, self._turns = (
            torch.zeros(most, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._scratch = GreedyScratch(most, device)
        self._work = {size: ops.decode_work(size) for size in sizes}
        groups = len(rows.page_table)
        self._columns = num_columns(groups)
        self._padding = np.array([[rows.scratch], [0], [-1], [-1], [-1], *[[0], [-1]] * groups])
        self._of_states = len(self._state_columns(np.zeros(0), np.zeros(0)))
        widest = (self._columns + self._of_states) * most + self._work[most].length
        self._uploads = torch.zeros(_UPLOADS, widest, dtype=torch.int32, pin_memory=True)
        self._launched = 0
        self._packed = {s: torch.zeros(widest, dtype=torch.int32, device=device) for s in sizes}
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, Reach], torch.cuda.CUDAGraph] = {}
        # Kept since graphs write to their tensors.
        self._loras: dict[tuple[int, Reach], DeviceLora] = {}

    def rehearse(self, reach: Reach) -> None:
        """Run once, outside of any graph, all that the graphs of one family will do."""
        for size in reversed(self.sizes):
            nothing = np.zeros((self._columns, 0), np.int32)
            self._upload(size, DecodeBatch(nothing, (), np.zeros(0, np.int64)))
            self._step(size, reach)()
            torch.cuda.synchronize()  # uploads are in memory that comes round again

    def capture(self, reach: Reach) -> None:
        """The graphs of one family, largest first so that the others fit in its memory. Others of
        as many rows were rehearsed."""
        for size in reversed(self.sizes):
            step = self._step(size, reach)
            self._graphs[size, reach] = record(step, self._pool)

    @property
    def reaches(self) -> frozenset[Reach]:
        """Reaches of adapters for whose steps graphs were captured."""
        return frozenset(reach for _, reach in self._graphs)

    def takes(self, batch: DecodeBatch) -> bool:
        """Whether the batch can run in a graph. These embed and have the head, as the base does."""
        changes_model = self._ops.table.changes_model(batch.columns[SLOT])
        if len(batch) > self.sizes[-1] or changes_model:
            return False
        return (self.sizes[0], self._reach(batch)) in self._graphs

    def launch(self, batch: DecodeBatch) -> GraphStep:
        n = len(batch)
        size = padded_size(self.sizes, n)
        self._upload(size, batch)
        self._graphs[size, self._reach(batch)].replay()
        return GraphStep(self._logits[:n], self._sampled[:n])

    def _reach(self, batch: DecodeBatch) -> Reach:
        return self._ops.table.reach(batch.columns[SLOT])

    def _upload(self, size: int, batch: DecodeBatch) -> None:
        """Fill up with rows that compute nothing of use, on a row and a page of their own."""
        n, used = len(batch), (self._columns + self._of_states) * size
        self._launched += 1
        upload = self._uploads[self._launched % _UPLOADS]
        host = upload.numpy()
        columns = host[:used].reshape(-1, size)
        columns[: self._columns, :n] = batch.columns
        columns[: self._columns, n:] = self._padding
        replays = np.zeros(size, dtype=np.int64)
        replays[:n] = batch.replays
        columns[self._columns :] = self._state_columns(columns[ROW].astype(np.int64), replays)
        contexts = np.ones(size, dtype=np.int64)
        contexts[:n] = batch.contexts
        work = self._work[size]
        work.cut(contexts, host[used:])
        end = used + work.length
        self._packed[size][:end].copy_(upload[:end], non_blocking=True)

    def _state_columns(self, rows: np.ndarray, replays: np.ndarray) -> np.ndarray:
        """Columns that states need of decodes beside the others, `[columns, n]`."""
        states = self._ops.states
        depth = states.depth if states else 0
        return walk_columns(rows, replays, states.scratch, depth)

    def _step(self, size: int, reach: Reach) -> Callable[[], None]:
        packed, used = self._packed[size], (self._columns + self._of_states) * size
        every = packed[:used].view(-1, size)
        columns, of_states = every[: self._columns], every[self._columns :].unbind()
        token_ids, positions = self._token_ids[:size], self._positions[:size]
        lora = None
        if reach is not Reach.NONE:
            lora = self._loras[size, reach] = self._ops.lora_batches.captured(
                columns[SLOT], reach, decodes=True
            )
        logits, sampled = self._logits[:size], self._sampled[:size]
        rows = self._rows
        shifts = self._ops.rotations.shifts(rows.long_rows, rows.offsets)
        turns = None if shifts is None else self._turns[:size]
        shifted = None if turns is None or shifts is None else Shifted(*shifts, turns)
        work = self._work[size].items(packed[used:])

        def step() -> None:
            inputs = (columns, rows.tokens, rows.page_table, token_ids, positions)
            gather_inputs(*inputs, shifted)
            if lora is not None:
                self._ops.route(lora)
            views = decode_views(columns[ROW], positions, rows.page_table, work, turns)
            attention = Attention(slice(size), views, slice(0), None)
            states = NO_STATES
            if self._ops.states:
                of_walks = (columns[ROW], positions, of_states)
                singles, keep = walks(*of_walks, self._ops.states.depth)
                states = StateSteps((StatePhase(singles),), keep)
            plan = CudaPlan(positions, None, attention, turns=turns, states=states)
            normed = self._decoder.forward(token_ids, plan, lora)
            self._decoder.logits(normed, lora, out=logits)
            greedy_append(
                logits, columns[ROW], columns[APPEND], rows.tokens, sampled, self._scratch
            )

        return step
