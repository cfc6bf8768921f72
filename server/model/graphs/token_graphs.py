"""CUDA graphs of steps: those of decodes by padded batch size and reach of adapters, those with
prompts by padded number of tokens.

A graph of decodes reads one packed upload, so it is valid for any sequences, contexts, adapters and
ranks. Where what attention of prompts launches depends on its plan, it is launched as it comes, and
from one to the next lies one graph. What follows the last attention that writes are other graphs
(`EndGraphs`); where further layers attend, it is launched as it comes. Without graphs the host
would need longer for a step of few hundred tokens than the device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from loraplex.server.engine.plan import StepPlan
from loraplex.server.kernels.attention.decode_inputs import Shifted, gather_inputs
from loraplex.server.kernels.sampling.greedy import GreedyScratch, greedy_append
from loraplex.server.model.decoder import Decoder, Embedded, Stream
from loraplex.server.model.graphs.decode_batch import APPEND, ROW, SLOT, DecodeBatch, num_columns
from loraplex.server.model.lora.lora import Reach
from loraplex.server.model.ops.attention.attention_cuda import Attention, decode_views
from loraplex.server.model.ops.cuda.capture import record
from loraplex.server.model.ops.cuda.device_lora import DeviceLora
from loraplex.server.model.ops.cuda.graph_attention import GraphAttention, GraphTexts
from loraplex.server.model.ops.cuda.lora_linear import LinearOutput, Ready
from loraplex.server.model.ops.cuda.ops_cuda import CudaOps, CudaPlan, first_rows
from loraplex.server.model.ops.cuda.states_cuda import NO_STATES, walk_columns, walks
from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.row_states import StatePhase, StateSteps
from loraplex.server.model.ops.sizes import padded_size
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.steps.rows import Rows

_NOBODY = np.zeros(0, dtype=np.int32)

# One more than uploads that can be on their way while the next is written.
_UPLOADS = 4


class EndGraphs:
    """Graphs of a step's end, from the last attention to hidden states. Captured once at start."""

    def __init__(
        self,
        decoder: Decoder[CudaPlan, DeviceLora, LinearOutput],
        ops: CudaOps,
        sizes: tuple[int, ...],
        begun: tuple[torch.Tensor, Stream],
        pool: Any,
    ) -> None:
        """Allocate the inputs and outputs of graphs for a step's end. begun: `[sizes[-1], heads *
        head_dim]` of the last layer and a stream of as many tokens, where steps leave what that
        layer attended and theirs. pool: of graphs.
        """
        self.sizes = sizes
        self._decoder, self._ops, self._begun, self._pool = decoder, ops, begun, pool
        # Rows, then slots: one upload.
        self._packed = torch.zeros(2 * sizes[-1], dtype=torch.int32, device=ops.device)
        self._normed = begun[1].hidden.new_zeros(sizes[-1], decoder.spec.output_size)
        self._graphs: dict[tuple[int, Reach], torch.cuda.CUDAGraph] = {}
        # Kept since graphs write to their tensors.
        self._loras: dict[tuple[int, Reach], DeviceLora] = {}

    def rehearse(self, reach: Reach) -> None:
        """Run once, outside of any graph, all that the graphs of one family will do."""
        for size in reversed(self.sizes):
            self._upload(size, _NOBODY, _NOBODY)
            self._step(size, reach)()

    def capture(self, reach: Reach) -> None:
        """Capture graphs. One family, largest first so that the others fit in its memory. Others of
        as many tokens were rehearsed.
        """
        for size in reversed(self.sizes):
            self._graphs[size, reach] = record(self._step(size, reach), self._pool)

    def forward(self, rows: np.ndarray, slots: np.ndarray) -> torch.Tensor:
        """Compute the wanted rows from the last attention to normed hidden states. rows: int64
        `[n]`, of what steps left; slots: their adapters' -> normed `[n, hidden]`, valid until
        the next call, in stream order.
        """
        n = len(rows)
        if n:
            size = padded_size(self.sizes, n)
            self._upload(size, rows, slots)
            self._graphs[size, self._ops.table.reach(slots)].replay()
        return self._normed[:n]

    def _upload(self, size: int, rows: np.ndarray, slots: np.ndarray) -> None:
        """Upload rows and slots. The padding is the first row, without an adapter."""
        packed = np.zeros((2, size), dtype=np.int32)
        packed[1] = -1
        packed[:, : len(rows)] = rows, slots
        upload = torch.from_numpy(packed).view(-1).pin_memory()
        self._packed[: 2 * size].copy_(upload, non_blocking=True)

    def _step(self, size: int, reach: Reach) -> Callable[[], None]:
        rows, slots = self._packed[: 2 * size].view(2, size)
        lora = None
        if reach is not Reach.NONE:
            lora = self._ops.lora_batches.captured(slots, reach, decodes=False)
            self._loras[size, reach] = lora

        def step() -> None:
            if lora is not None:
                self._ops.route(lora)
            attended, stream = self._begun
            found = self._decoder.end(attended.index_select(0, rows), stream.rows(rows), lora)
            self._normed[:size].copy_(found)

        return step


@dataclass(frozen=True, slots=True)
class _Captured:
    """Captured graphs of one size. graphs: one, or the first up to the first attention, then one
    after each but the last. lora: kept since the graphs write to its tensors.
    """

    graphs: list[torch.cuda.CUDAGraph]
    lora: DeviceLora | None


class TokenGraphs:
    """Graphs of steps with prompts. Captured once at start. Steps run one after the other, and
    share the tensors between graphs and attention.
    """

    def __init__(
        self,
        decoder: Decoder[CudaPlan, DeviceLora, LinearOutput],
        ops: CudaOps,
        sizes: tuple[int, ...],
        attention: GraphAttention | GraphTexts | None,
    ) -> None:
        """Allocate the inputs and outputs of graphs. attention: that graphs can launch; None: it
        lies between them.
        """
        self.sizes = sizes
        self._decoder, self._ops, self._attention = decoder, ops, attention
        model, device, dtype = decoder.spec, ops.device, ops.cache.dtype
        attentions = [model.layers[each.layer].attention for each in decoder.mixers]
        self._q_sizes = [of.q_size for of in attentions]
        self._qkv_sizes = [of.qkv.out_features for of in attentions]
        most = sizes[-1]
        self._token_ids, self._positions = (
            torch.zeros(most, dtype=torch.int64, device=device) for _ in range(2)
        )
        self._slots = torch.full((most,), -1, dtype=torch.int32, device=device)
        self._is_given = torch.zeros(1, 1, dtype=torch.bool, device=device)
        self._gives = False  # what is there when all that was launched is done
        if attention is None:
            self._qkv, self._attended = (
                torch.zeros(most * max(widths), dtype=dtype, device=device)
                for widths in (self._qkv_sizes, self._q_sizes)
            )
        else:
            self._attended = attention.attended
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple[int, Reach], _Captured] = {}
        # Between graphs, and where more layers attend, lies what all read; else that of the last.
        all_layers = attention is None or decoder.mixes_behind
        layers = len(decoder.weights.layers) if all_layers else 1
        self._stream = decoder.room(most, layers)
        self._given = self._stream.hidden
        if model.embedding.projection is not None:
            self._given = self._given.new_zeros(most, model.embedding.size)
        self._begun = (self._attended_by(decoder.last_writer, most), self._stream)
        self.ends = None
        if not decoder.mixes_behind:
            self.ends = EndGraphs(decoder, ops, sizes, self._begun, self._pool)

    def rehearse(self, reach: Reach, example: Callable[[int], StepLayout]) -> None:
        """Run once, outside graphs, what those of one family will do; else as `capture`."""
        for size in reversed(self.sizes):
            for piece in self._prepared(size, self._lora(size, reach), example):
                piece()
            torch.cuda.synchronize()  # plans are uploaded from memory that comes round again
        if self.ends is not None:
            self.ends.rehearse(reach)

    def capture(self, reach: Reach, example: Callable[[int], StepLayout]) -> None:
        """Capture graphs. One family, largest first so that the others fit in its memory. Others of
        as many tokens were rehearsed. example: of prompts with so many tokens in all.
        """
        for size in reversed(self.sizes):
            lora = self._lora(size, reach)
            pieces = self._prepared(size, lora, example)
            graphs = [record(piece, self._pool) for piece in pieces]
            self._captured[size, reach] = _Captured(graphs, lora)
        if self.ends is not None:
            self.ends.capture(reach)

    def takes(self, plan: StepPlan) -> bool:
        if plan.num_tokens > self.sizes[-1]:
            return False
        prompts = [(each.start, each.num_new) for each in plan.slices if not each.is_single]
        if self._attention is not None and len(prompts) > self._attention.most_prompts:
            return False
        if self._ops.unfolder.leaves_graphs(prompts):
            return False
        slots = np.array([piece.adapter_slot for piece in plan.slices])
        return (self.sizes[0], self._ops.table.reach(slots)) in self._captured

    def shift(self, layout: StepLayout) -> int:
        """How many of a step's first tokens go to its end: decodes, behind prompts' tokens."""
        return layout.num_decodes if isinstance(self._attention, GraphAttention) else 0

    def forward(
        self,
        token_ids: torch.Tensor,
        layout: StepLayout,
        token_slots: np.ndarray,
        wanted: np.ndarray,
    ) -> torch.Tensor:
        """Compute normed hidden states of the tokens wanted (int64 `[rows]`, on the host), as
        `Decoder.forward` does.
        """
        tokens, first = len(token_ids), self.shift(layout)
        size = padded_size(self.sizes, tokens)
        captured = self._captured[size, self._ops.table.reach(token_slots)]
        if self._attention is not None:
            self._attention.fill(size, layout)
        elif self._decoder.weights.embedding.positions is not None:
            self._positions[:tokens].copy_(layout.positions)
        self._token_ids[:tokens].copy_(token_ids.roll(-first))
        if captured.lora is not None:
            slots = np.full(size, -1, dtype=np.int32)
            slots[:tokens] = np.roll(token_slots, -first)
            self._slots[:size].copy_(to_device(slots, self._ops.device))
            self._embed(slots)
        if self._attention is None:
            self._replay_between(captured.graphs, self._ops.plan(layout), tokens)
        else:
            captured.graphs[0].replay()
        rows, slots = (wanted - first) % tokens, token_slots[wanted]
        if self.ends is not None:
            return self.ends.forward(rows, slots)
        if not len(rows):
            return self._stream.hidden[:0]
        return self._end(to_device(rows, self._ops.device), slots, layout.of(wanted))

    def _end(self, rows: torch.Tensor, slots: np.ndarray, layout: StepLayout) -> torch.Tensor:
        """Compute wanted rows where mixers lie behind the graphs. rows: int64 `[n]`, of what steps
        left; slots: their adapters'. layout: of these tokens."""
        attended, stream = self._begun
        lora, plan = self._ops.lora(slots), self._ops.plan(layout)
        return self._decoder.end(attended[rows], stream.rows(rows), lora, plan)

    def _embed(self, slots: np.ndarray) -> None:
        """Embed tokens before the graph, where the adapters ask for it. slots: int32 `[size]`."""
        table, size = self._ops.table, len(slots)
        gives = table.changes_embedding(slots)
        if gives != self._gives:
            self._gives = gives
            self._is_given.fill_(gives)
        if gives:
            token_ids = self._token_ids[:size]
            self._given[:size].copy_(self._decoder.embed(token_ids, self._ops.lora(slots)))
            if table.is_wide(slots).any():  # the graph embeds in vain
                token_ids.clamp_(max=self._decoder.spec.vocab_size - 1)

    def _embedded(self, size: int, lora: DeviceLora | None) -> Embedded | None:
        """Return the embedded tokens that adapters give; None without adapters. They come where the
        hidden states are left later, if they are as wide.
        """
        return None if lora is None else Embedded(self._given[:size], self._is_given)

    def _replay_between(
        self, graphs: list[torch.cuda.CUDAGraph], plan: CudaPlan, tokens: int
    ) -> None:
        plan = replace(plan, attended=self._attended)
        for number, graph in enumerate(graphs):
            graph.replay()
            self._decoder.mix(plan, number, [Ready(self._qkv_of(number, tokens))])

    def _qkv_of(self, number: int, rows: int) -> torch.Tensor:
        """The product that an attention reads. number: see `Decoder.mixers`."""
        return first_rows(self._qkv, rows, self._qkv_sizes[number])

    def _attended_by(self, number: int, rows: int) -> torch.Tensor:
        """The result of an attention."""
        return first_rows(self._attended, rows, self._q_sizes[number])

    def _lora(self, size: int, reach: Reach) -> DeviceLora | None:
        if reach is Reach.NONE:
            return None
        return self._ops.lora_batches.captured(self._slots[:size], reach, decodes=False)

    def _prepared(
        self, size: int, lora: DeviceLora | None, example: Callable[[int], StepLayout]
    ) -> list[Callable[[], None]]:
        if self._attention is not None:
            self._attention.fill(size, example(size))
        return self._pieces(size, lora)

    def _pieces(self, size: int, lora: DeviceLora | None) -> list[Callable[[], None]]:
        """The work of each graph, in order. Padding rows read what earlier steps left in them.

        Nobody reads the results of padding rows.
        """
        if self._attention is None:
            return self._pieces_between(size, lora)
        attention, embedded = self._attention, self._embedded(size, lora)

        def step() -> None:
            if lora is not None:
                self._ops.route(lora)
            token_ids, plan = self._token_ids[:size], attention.plan(size)
            _, stream = self._decoder.up_to_end(token_ids, plan, lora, embedded=embedded)
            self._stream.first(size).copy_(stream)

        return [step]

    def _pieces_between(self, size: int, lora: DeviceLora | None) -> list[Callable[[], None]]:
        decoder, stream = self._decoder, self._stream.first(size)

        def begin() -> None:
            if lora is not None:
                self._ops.route(lora)
            token_ids, embedded = self._token_ids[:size], self._embedded(size, lora)
            normed, begun = decoder.begin(token_ids, self._positions[:size], lora, embedded)
            stream.copy_(begun)
            self._project(normed, 0, lora)

        def follow(number: int) -> None:
            attended = self._attended_by(number, size)
            normed, summed = decoder.after_mixer(number, attended, stream, lora)
            if summed.hidden is not stream.hidden:  # else in place
                stream.hidden.copy_(summed.hidden)
            self._project(normed, number + 1, lora)

        numbers = range(decoder.last_writer)
        return [begin, *(partial(follow, number) for number in numbers)]

    def _project(self, normed: torch.Tensor, number: int, lora: DeviceLora | None) -> None:
        attention, out = self._decoder.mixers[number], self._qkv_of(number, len(normed))
        qkv, site = attention.weights.linears[0], attention.sites[0]
        done = self._ops.linear(normed, qkv, lora, site, out=out)
        if not isinstance(done, Ready):
            raise TypeError("attention outside the graph takes complete outputs alone")


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
