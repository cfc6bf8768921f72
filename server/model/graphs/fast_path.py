"""The GPU's operations at start: everything that steps launch is compiled, warm and captured."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import triton

from server.engine.executor import ExecutorLimits
from server.kernels.launch.compile_ahead import compiled_together
from server.model.decoder import Decoder
from server.model.graphs.decode_graphs import DecodeGraphs
from server.model.graphs.parts import Built, Parts
from server.model.graphs.start_phases import StartPhases
from server.model.graphs.token_graphs import TokenGraphs
from server.model.graphs.warm_up import prompts_of, run_steps
from server.model.linear.dense import DenseLinear
from server.model.ops.attention_cuda import PagedAttention, prompt_backend
from server.model.ops.device_lora import DeviceLora
from server.model.ops.graph_attention import GraphAttention
from server.model.ops.lora_linear import LinearOutput
from server.model.ops.memory import LOGITS_ROWS
from server.model.ops.ops import StepLayout
from server.model.ops.ops_cuda import CudaOps, CudaPlan
from server.model.ops.prompt_attention import (
    PromptAttention,
    prompt_kernels,
    prompts_in_graphs,
)
from server.model.ops.sizes import (
    MAX_PROMPTS,
    MOST_PADDING,
    PromptRoom,
    graph_sizes,
    row_sizes,
    sizes_up_to,
    token_sizes,
)
from server.model.sampling.draws_cuda import CudaDraws
from server.model.weights import LayerWeights

log = logging.getLogger(__name__)
CudaDecoder = Decoder[CudaPlan, DeviceLora, LinearOutput]


def build_fast(parts: Parts, graph_batches: Sequence[int] | None, phases: StartPhases) -> Built:
    """As `gpu_path.build`, on a device that has all that it needs."""
    parts.rows.page_table[parts.rows.scratch] = parts.limits.num_pages
    start = _Start.of(parts, graph_batches)
    decoder = start.decoder(parts.weights.layers)
    # The first layer of each kind has the kernels of all.
    few_layers = start.decoder(parts.weights.layers[: parts.model.kinds_within])
    start.compile_all(few_layers)
    phases.done("compilation")
    start.run_steps(decoder)
    start.rehearse(few_layers)
    start.load_products()
    phases.done("kernels")
    start.measure_products()
    phases.done("products")
    graphs, token_graphs = start.capture(decoder)
    phases.done("graphs")
    _tell_of_late_kernels()
    most = start.sizes[-1]
    told = f"{start.prompt_kernels} for prompts, decode graphs for up to {most} sequences"
    return Built(decoder, start.draws, graphs, token_graphs, start.row_sizes, told)


@dataclass(frozen=True, slots=True)
class _Start:
    """sizes, prompt_sizes: sequences of decode graphs, tokens of those of steps with prompts.
    row_sizes: of products outside graphs. backend: FlashInfer's, of prompts' attention."""

    parts: Parts
    sizes: tuple[int, ...]
    prompt_sizes: tuple[int, ...]
    row_sizes: tuple[int, ...]
    backend: str
    ops: CudaOps
    draws: CudaDraws

    @classmethod
    def of(cls, parts: Parts, graph_batches: Sequence[int] | None) -> "_Start":
        limits, rows = parts.limits, parts.rows
        most_decodes = min(limits.max_rows, limits.max_step_tokens)
        sizes = tuple(sorted(graph_batches or graph_sizes(most_decodes)))
        prompt_sizes = _prompt_sizes(limits, parts.weights.layers[0].linears)
        backend = prompt_backend(torch.cuda.get_device_capability(rows.device))
        captured = prompt_sizes if prompts_in_graphs(parts.model, backend) else ()
        most = max(limits.max_rows + MOST_PADDING, sizes[-1])
        room = (most, max((most, *captured)))
        attention = PagedAttention(parts.model, parts.cache, backend, *room)
        reach = (limits.max_context, max(limits.max_step_tokens, sizes[-1], *prompt_sizes))
        ops = CudaOps(parts.model, parts.cache, parts.table, attention, reach)
        draws = CudaDraws(rows, parts.parameters)
        outside = row_sizes(limits.max_rows, limits.max_step_tokens)
        return cls(parts, sizes, prompt_sizes, outside, backend, ops, draws)

    @property
    def prompt_kernels(self) -> str:
        """For a person."""
        names = sorted(set(prompt_kernels(self.parts.model)))
        return " and ".join(names).replace("FlashInfer", f"FlashInfer ({self.backend})")

    @property
    def families(self) -> tuple[bool, ...]:
        """Graphs without adapters, and with them where they are."""
        return (False, True) if self.parts.limits.adapter_slots else (False,)

    def decoder(self, layers: Sequence[LayerWeights]) -> CudaDecoder:
        weights = replace(self.parts.weights, layers=tuple(layers))
        return Decoder(self.parts.model, weights, self.parts.table.sites, self.ops)

    def compile_all(self, decoder: CudaDecoder) -> None:
        """Without it kernels are compiled one by one, as what follows comes to them."""
        try:
            with compiled_together():
                self._launch_all(decoder)
        except Exception:
            log.warning("kernels could not be compiled together", exc_info=True)
        torch.cuda.empty_cache()  # graphs have memory of their own

    def _launch_all(self, decoder: CudaDecoder) -> None:
        self.run_steps(decoder)
        for sizes, products in self._products():
            self.ops.products.launch_ours(sizes, products)
        self.rehearse(decoder)

    def run_steps(self, decoder: CudaDecoder) -> None:
        """Those that no graph has."""
        parts = self.parts
        run_steps(decoder, parts.rows, parts.limits)
        self.draws.warm(parts.model.vocab_size, parts.cache.k.dtype)

    def rehearse(self, decoder: CudaDecoder) -> None:
        """What graphs will launch, outside of any: a kernel is loaded at its first launch, which a
        capture does not allow."""
        graphs, token_graphs = self._graphs(decoder)
        for with_adapters in self.families:
            graphs.rehearse(with_adapters)
            if token_graphs is not None:
                token_graphs.rehearse(with_adapters, self._example)

    def load_products(self) -> None:
        """Of steps that no graph has: those of all tokens, and of rows that want logits."""
        weights, sizes = self.parts.weights, self.row_sizes
        self.ops.products.load(sizes, weights.layers[0].linears)
        most_logits = max(self.parts.limits.max_rows, LOGITS_ROWS)
        self.ops.products.load(sizes_up_to(sizes, most_logits), [weights.lm_head])

    def measure_products(self) -> None:
        for sizes, products in self._products():
            self.ops.products.measure(sizes, products)

    def capture(self, decoder: CudaDecoder) -> tuple[DecodeGraphs, TokenGraphs | None]:
        graphs, token_graphs = self._graphs(decoder)
        for with_adapters in self.families:
            graphs.capture(with_adapters)
            if token_graphs is not None:
                token_graphs.capture(with_adapters, self._example)
        torch.cuda.synchronize()
        return graphs, token_graphs

    def _products(self) -> Iterator[tuple[Sequence[int], list[list[DenseLinear]]]]:
        """Numbers of rows, and for each product that has them its matrix in every layer."""
        weights = self.parts.weights
        by_layer = zip(*(layer.linears for layer in weights.layers), strict=True)
        yield sorted({*self.sizes, *self.prompt_sizes}), [list(layers) for layers in by_layer]
        # Of steps with prompts no graph has the head.
        yield self.sizes, [[weights.lm_head]]

    def _graphs(self, decoder: CudaDecoder) -> tuple[DecodeGraphs, TokenGraphs | None]:
        """Not captured yet."""
        graphs = DecodeGraphs(decoder, self.ops, self.parts.rows, self.sizes)
        return graphs, self._token_graphs(decoder) if self.prompt_sizes else None

    def _token_graphs(self, decoder: CudaDecoder) -> TokenGraphs:
        parts, inside = self.parts, None
        if prompts_in_graphs(parts.model, self.backend):
            page_table, most = parts.rows.page_table, self.prompt_sizes[-1]
            room = PromptRoom(most, MAX_PROMPTS * page_table.shape[1])
            prompts = PromptAttention(parts.model, parts.cache, self.backend, room)
            most_decodes = min(most, parts.limits.max_rows)
            inside = GraphAttention(self.ops, prompts, page_table, most, most_decodes)
        return TokenGraphs(decoder, self.ops, self.prompt_sizes, inside)

    def _example(self, tokens: int) -> StepLayout:
        return prompts_of(self.parts.rows, self.parts.limits.max_context, tokens)


def _prompt_sizes(limits: ExecutorLimits, layer: Sequence[DenseLinear]) -> tuple[int, ...]:
    """Tokens of the graphs of steps with prompts."""
    # In a context of one token there are none: slices of one token are decodes.
    most = MAX_PROMPTS * limits.max_context if limits.max_context > 1 else 0
    weights = sum(linear.out_features * linear.in_features for linear in layer)
    return token_sizes(limits.max_step_tokens, weights, most)


def _tell_of_late_kernels() -> None:
    """What is compiled from now on holds up a step: it should have been warm."""

    def late(*, repr: str, **_: object) -> None:
        log.warning("a kernel was compiled while serving: %s", repr)

    triton.knobs.runtime.jit_post_compile_hook = late
