"""CUDA graphs of steps that have prompts, by padded number of tokens.

Where what attention launches depends on its plan, it is launched as it comes, and from one to the
next lies one graph. Without graphs the host would need longer for a step of few hundred tokens than
the device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from server.engine.plan import StepPlan
from server.model.capture import record
from server.model.decoder import Decoder
from server.model.graph_attention import GraphAttention
from server.model.lora import any_adapter
from server.model.ops import StepLayout
from server.model.ops_cuda import CudaOps, CudaPlan, DeviceLora, Product
from server.model.prompt_attention import MAX_PROMPTS
from server.model.sizes import padded_size
from server.model.transfers import to_device


@dataclass(slots=True)
class _States:
    """What a run leaves; `[size, hidden]` each."""

    normed: torch.Tensor
    hidden: torch.Tensor


@dataclass(slots=True)
class _Captured:
    """graphs: one, or the first up to the first attention, then one after each layer's. lora: kept
    since the graphs write to its tensors."""

    graphs: list[torch.cuda.CUDAGraph]
    states: _States
    lora: DeviceLora | None


class TokenGraphs:
    """Captured once at start. Steps run one after the other, and share the tensors between graphs
    and attention."""

    def __init__(
        self,
        decoder: Decoder[CudaPlan, DeviceLora, Product],
        ops: CudaOps,
        sizes: tuple[int, ...],
        attention: GraphAttention | None,
    ) -> None:
        """attention: that graphs can launch; None: it lies between them."""
        self.sizes = sizes
        self._decoder, self._ops, self._attention = decoder, ops, attention
        model, device, dtype = decoder.config, ops.device, ops.cache.k.dtype
        most = sizes[-1]
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots = torch.full((most,), -1, dtype=torch.int32, device=device)
        between = most if attention is None else 0
        qkv_size = model.q_size + 2 * model.kv_size
        self._qkv = torch.zeros(between, qkv_size, dtype=dtype, device=device)
        self._attended = torch.zeros(between, model.q_size, dtype=dtype, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple[int, bool], _Captured] = {}

    def rehearse(self, with_adapters: bool, example: Callable[[int], StepLayout]) -> None:
        """What the graphs of one family will do, outside of any; otherwise as `capture`."""
        for size in reversed(self.sizes):
            _, pieces = self._prepared(size, self._lora(size, with_adapters), example)
            for piece in pieces:
                piece()
            torch.cuda.synchronize()  # plans are uploaded from memory that comes round again

    def capture(self, with_adapters: bool, example: Callable[[int], StepLayout]) -> None:
        """One family, largest first so that the others fit in its memory. Others of as many tokens
        were rehearsed. example: of prompts with so many tokens in all."""
        for size in reversed(self.sizes):
            lora = self._lora(size, with_adapters)
            states, pieces = self._prepared(size, lora, example)
            graphs = [record(piece, self._pool) for piece in pieces]
            for graph in graphs:
                graph.replay()  # the first time takes longer
            states.hidden = states.normed  # what it was may be the next graphs' memory
            self._captured[size, with_adapters] = _Captured(graphs, states, lora)

    def takes(self, plan: StepPlan) -> bool:
        if plan.num_tokens > self.sizes[-1]:
            return False
        prompts = sum(piece.num_new > 1 for piece in plan.slices)
        if self._attention is not None and prompts > MAX_PROMPTS:
            return False
        slots = np.array([piece.adapter_slot for piece in plan.slices])
        if not any_adapter(slots):
            return True
        known = (self.sizes[0], True) in self._captured
        return known and not self._ops.table.changes_model(slots)

    def forward(
        self,
        token_ids: torch.Tensor,
        layout: StepLayout,
        token_slots: np.ndarray,
        wanted: np.ndarray,
    ) -> torch.Tensor:
        """As `Decoder.forward`, of the tokens wanted (int64 `[rows]`, on the host)."""
        tokens, first = len(token_ids), 0
        size = padded_size(self.sizes, tokens)
        captured = self._captured[size, any_adapter(token_slots)]
        if self._attention is not None:
            first = layout.num_decodes  # they go to the end
            self._attention.fill(size, layout)
        if captured.lora is not None:
            slots = np.full(size, -1, dtype=np.int32)
            slots[:tokens] = np.roll(token_slots, -first)
            self._slots[:size].copy_(to_device(slots, self._ops.device))
        self._token_ids[:tokens].copy_(token_ids.roll(-first))
        if self._attention is None:
            self._replay_between(captured.graphs, self._ops.plan(layout), tokens)
        else:
            captured.graphs[0].replay()
        return captured.states.normed[to_device((wanted - first) % tokens, self._ops.device)]

    def _replay_between(
        self, graphs: list[torch.cuda.CUDAGraph], plan: CudaPlan, tokens: int
    ) -> None:
        qkv, plan = Product(self._qkv[:tokens]), replace(plan, attended=self._attended[:tokens])
        first, *others = graphs
        first.replay()
        layers = self._decoder.weights.layers
        for layer, (weights, graph) in enumerate(zip(layers, others, strict=True)):
            self._ops.attend(plan, layer, qkv, weights.qk_norm)
            graph.replay()

    def _lora(self, size: int, with_adapters: bool) -> DeviceLora | None:
        if not with_adapters:
            return None
        return self._ops.captured_lora(self._slots[:size], decodes=False)

    def _prepared(
        self, size: int, lora: DeviceLora | None, example: Callable[[int], StepLayout]
    ) -> tuple[_States, list[Callable[[], None]]]:
        if self._attention is not None:
            self._attention.fill(size, example(size))
        return self._pieces(size, lora)

    def _pieces(
        self, size: int, lora: DeviceLora | None
    ) -> tuple[_States, list[Callable[[], None]]]:
        """What each graph does, in order, and where they leave their states. Rows that pad read
        what earlier steps left in them, and nobody reads theirs."""
        decoder, token_ids = self._decoder, self._token_ids[:size]
        states = _States(self._attended, self._attended)
        plan = None if self._attention is None else self._attention.plan(size)

        def step() -> None:
            if lora is not None:
                self._ops.route(lora)
            if plan is None:
                states.normed, states.hidden = decoder.begin(token_ids, lora)
                self._project(states, 0, lora, size)
            else:
                states.normed = decoder.forward(token_ids, plan, lora)

        def follow(layer: int) -> None:
            attended = self._attended[:size]
            states.normed, states.hidden = decoder.after_attention(
                layer, attended, states.hidden, lora
            )
            if layer + 1 < len(decoder.weights.layers):
                self._project(states, layer + 1, lora, size)

        layers = range(len(decoder.weights.layers)) if plan is None else range(0)
        return states, [step, *(partial(follow, layer) for layer in layers)]

    def _project(self, states: _States, layer: int, lora: DeviceLora | None, size: int) -> None:
        weights, site = self._decoder.weights.layers[layer], self._decoder.sites.layer(layer)
        bias, out = weights.qkv_bias, self._qkv[:size]
        self._ops.linear(states.normed, weights.qkv, bias, lora, site, out=out)
