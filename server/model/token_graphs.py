"""CUDA graphs of all but attention, by padded number of tokens: for steps that have prompts.

Attention's plan changes with every step, so it is launched as it comes; from one attention to the
next lies one graph. Without them the host would need longer for a step of few hundred tokens than
the device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from server.kernels.segments import route
from server.model.capture import padded_size, record, sizes_up_to
from server.model.decoder import Decoder
from server.model.lora import any_adapter
from server.model.ops_cuda import CudaOps, CudaPlan, DeviceLora, Product
from server.model.transfers import to_device

# With more tokens the device needs longer than the host.
_MAX_TOKENS = 2048


def token_sizes(max_tokens: int) -> tuple[int, ...]:
    """Up to what steps of `max_tokens` tokens need: padding is the smaller part of any step."""
    top = min(max_tokens, _MAX_TOKENS)
    sizes = [32, 64, 96, 128, *range(192, 1024, 64), *range(1024, _MAX_TOKENS + 1, 128)]
    return sizes_up_to(sizes, top)


@dataclass(slots=True)
class _Captured:
    """graphs: the first up to the first attention, then one after each layer's. normed: `[size,
    hidden]`, what the last one leaves. lora: kept since the graphs write to its tensors."""

    graphs: list[torch.cuda.CUDAGraph]
    normed: torch.Tensor
    lora: DeviceLora | None


@dataclass(slots=True)
class _States:
    """Of the run at hand; `[size, hidden]` each."""

    normed: torch.Tensor
    hidden: torch.Tensor


class TokenGraphs:
    """Captured once at start. Steps run one after the other, and share the tensors between graphs
    and attention."""

    def __init__(
        self,
        decoder: Decoder[CudaPlan, DeviceLora, Product],
        ops: CudaOps,
        sizes: tuple[int, ...],
    ) -> None:
        self.sizes = sizes
        self._decoder, self._ops = decoder, ops
        model, device, dtype = decoder.config, ops.device, ops.cache.k.dtype
        most = sizes[-1]
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots = torch.full((most,), -1, dtype=torch.int32, device=device)
        qkv_size = model.q_size + 2 * model.kv_size
        self._qkv = torch.zeros(most, qkv_size, dtype=dtype, device=device)
        self._attended = torch.zeros(most, model.q_size, dtype=dtype, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple[int, bool], _Captured] = {}

    def capture(self, with_adapters: bool) -> None:
        """One family, largest first so that the others fit in its memory."""
        for size in reversed(self.sizes):
            lora = None
            if with_adapters:
                lora = self._ops.captured_lora(self._slots[:size], decodes=False)
            states, pieces = self._pieces(size, lora)
            for piece in pieces:
                piece()
            torch.cuda.synchronize()
            graphs = [record(piece, self._pool) for piece in pieces]
            for graph in graphs:
                graph.replay()  # the first time takes longer
            self._captured[size, with_adapters] = _Captured(graphs, states.normed, lora)

    def takes(self, token_slots: np.ndarray) -> bool:
        """token_slots: int64 `[tokens]`, adapter slots of a step, -1 = the base."""
        if len(token_slots) > self.sizes[-1]:
            return False
        if not any_adapter(token_slots):
            return True
        known = (self.sizes[0], True) in self._captured
        return known and not self._ops.table.changes_model(token_slots)

    def forward(
        self, token_ids: torch.Tensor, plan: CudaPlan, token_slots: np.ndarray
    ) -> torch.Tensor:
        """As `Decoder.forward`; the result is valid until the next call, in stream order."""
        tokens = len(token_ids)
        size = padded_size(self.sizes, tokens)
        with_adapters = any_adapter(token_slots)
        if with_adapters:
            slots = np.full(size, -1, dtype=np.int32)
            slots[:tokens] = token_slots
            self._slots[:size].copy_(to_device(slots, self._ops.device))
        self._token_ids[:tokens].copy_(token_ids)
        captured = self._captured[size, with_adapters]
        qkv, attended = Product(self._qkv[:tokens]), self._attended[:tokens]
        first, *others = captured.graphs
        first.replay()
        layers = self._decoder.weights.layers
        for layer, (weights, graph) in enumerate(zip(layers, others, strict=True)):
            self._ops.attend(plan, layer, qkv, weights.qk_norm, out=attended)
            graph.replay()
        return captured.normed[:tokens]

    def _pieces(
        self, size: int, lora: DeviceLora | None
    ) -> tuple[_States, list[Callable[[], None]]]:
        """What each graph does, in order, and where it leaves its states. Rows that pad read what
        earlier steps left in them, and nobody reads theirs."""
        decoder, ops = self._decoder, self._ops
        token_ids, attended = self._token_ids[:size], self._attended[:size]
        layers = decoder.weights.layers
        states = _States(attended, attended)

        def project(layer: int) -> None:
            weights, site = layers[layer], decoder.sites.layer(layer)
            bias, out = weights.qkv_bias, self._qkv[:size]
            ops.linear(states.normed, weights.qkv, bias, lora, site, out=out)

        def begin() -> None:
            if lora is not None:
                route(lora.slots, lora.segments)
            states.normed, states.hidden = decoder.begin(token_ids, lora)
            project(0)

        def follow(layer: int) -> None:
            states.normed, states.hidden = decoder.after_attention(
                layer, attended, states.hidden, lora
            )
            if layer + 1 < len(layers):
                project(layer + 1)

        followers = [lambda layer=layer: follow(layer) for layer in range(len(layers))]
        return states, [begin, *followers]
