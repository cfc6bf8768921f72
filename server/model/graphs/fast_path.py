"""The GPU's operations at start: everything that steps launch is compiled, warm and captured."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

import loraplex.server.model
from loraplex.adapters.base import Role
from loraplex.server.engine.executor import ExecutorLimits
from loraplex.server.kernels.launch.compile_ahead import compiled_together, tell_of_late_kernels
from loraplex.server.kernels.launch.sources import sources_digest
from loraplex.server.model.decoder import Decoder
from loraplex.server.model.graphs.parts import Built, Parts
from loraplex.server.model.graphs.start_phases import StartPhases
from loraplex.server.model.graphs.token_graphs import DecodeGraphs, TokenGraphs
from loraplex.server.model.graphs.warm_up import prompts_of, run_steps, run_texts
from loraplex.server.model.linear.linear import Linear, MoeWeights
from loraplex.server.model.linear.quantised import row_form
from loraplex.server.model.lora.lora import Reach
from loraplex.server.model.ops.attention.attention_cuda import PagedAttention, prompt_backend
from loraplex.server.model.ops.attention.prompt_attention import (
    ONE_KERNEL,
    PromptAttention,
    prompt_kernels,
    prompts_in_graphs,
)
from loraplex.server.model.ops.attention.whole_cuda import WholeAttention
from loraplex.server.model.ops.cuda.device_lora import DeviceLora
from loraplex.server.model.ops.cuda.graph_attention import GraphAttention, GraphTexts
from loraplex.server.model.ops.cuda.kept_choices import KeptChoices
from loraplex.server.model.ops.cuda.lora_linear import LinearOutput
from loraplex.server.model.ops.cuda.lora_strategy import NONE_SUMMED, SummedSites
from loraplex.server.model.ops.cuda.ops_cuda import CudaOps, CudaPlan
from loraplex.server.model.ops.memory import LOGITS_ROWS
from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.sizes import (
    MAX_PROMPTS,
    MOST_PADDING,
    PromptRoom,
    graph_sizes,
    row_sizes,
    sizes_up_to,
    token_sizes,
)
from loraplex.server.model.routed_experts import chosen_experts
from loraplex.server.model.sampling.draws_cuda import CudaDraws
from loraplex.server.model.sampling.sampler import TorchDraws
from loraplex.server.model.weights import LayerWeights

log = logging.getLogger(__name__)
CudaDecoder = Decoder[CudaPlan, DeviceLora, LinearOutput]


def build_fast(parts: Parts, graph_batches: Sequence[int] | None, phases: StartPhases) -> Built:
    """Build the decoder and its graphs on a device that has all that the fast kernels need. The
    parameters are those of `gpu_path.build`.
    """
    if not parts.model.is_causal:
        return _build_whole(parts, phases)
    parts.rows.page_table[:, parts.rows.scratch] = parts.limits.num_pages
    start = _Start.of(parts, graph_batches)
    decoder = start.decoder(parts.weights.layers)
    # The first layer of each kind has the kernels of all.
    few_layers = start.decoder(parts.weights.layers[: parts.model.kinds_within])
    phases.begin("compiling kernels")
    compile_together(lambda: start.launch_all(few_layers), parts, start.sizes)
    phases.begin("loading kernels")
    start.run_steps(decoder)
    start.rehearse(few_layers)
    start.load_products()
    phases.begin("timing products")
    start.measure_products()
    phases.begin("capturing graphs")
    graphs, token_graphs = start.capture(decoder, phases)
    tell_of_late_kernels()
    most = start.sizes[-1]
    told = f"{start.prompt_kernels} for prompts, decode graphs for up to {most} sequences"
    if parts.batch_invariant:
        told = "one kernel of each kind for any batch (--batch-invariant)"
    of_steps = (graphs, token_graphs, start.row_sizes, told, start.ops.chosen_experts)
    return Built(decoder, start.draws, *of_steps)


def _build_whole(parts: Parts, phases: StartPhases) -> Built:
    """Build the decoder and the graphs of a model whose tokens see all others: texts are whole, and
    no token is drawn."""
    limits, model, texts = parts.limits, parts.model, parts.limits.max_rows
    linears, biases = parts.weights.linears, parts.weights.biases
    attention = WholeAttention(model, parts.cache.dtype, parts.rows.device, biases)
    sizes = _prompt_sizes(limits, parts.weights.layers, texts)
    reach = (limits.max_context, max((limits.max_step_tokens, *sizes)))
    context = (model, parts.cache, parts.table, attention, reach)
    ops = CudaOps(*context, summed_sites(parts), row_form(linears), states=parts.states)
    few = replace(parts.weights, layers=parts.weights.layers[: model.kinds_within])
    decoder, of_each_kind = parts.decoder(ops), parts.decoder(ops, few)
    example = _examples(parts)

    def graphs_of(layers: CudaDecoder) -> TokenGraphs | None:
        if not sizes:
            return None
        inside = GraphTexts(ops, attention, example(sizes[-1]), texts)
        return TokenGraphs(layers, ops, sizes, inside)

    def launch(layers: CudaDecoder) -> None:
        run_texts(layers, ops, parts.rows, limits)
        if (rehearsed := graphs_of(of_each_kind)) is not None:
            for family in _families(parts):
                rehearsed.rehearse(family, example)

    phases.begin("compiling kernels")
    compile_together(lambda: launch(of_each_kind), parts, sizes)
    phases.begin("loading kernels")
    launch(decoder)
    torch.cuda.synchronize()
    outside = row_sizes(limits.max_rows, limits.max_step_tokens)
    ops.products.load(outside, [same for same, *_ in _by_shape(linears)])
    phases.begin("capturing graphs")
    if (graphs := graphs_of(decoder)) is not None:
        for family in _families(parts):
            graphs.capture(family, example)
    torch.cuda.synchronize()
    draws = TorchDraws(parts.rows, parts.parameters)
    return Built(decoder, draws, None, graphs, outside, "the project's kernels of whole texts")


@dataclass(frozen=True, slots=True)
class _Start:
    """Steps of a start on a fast GPU. sizes, prompt_sizes: sequences of decode graphs, tokens of
    those of steps with prompts. row_sizes: of products outside graphs. backend: FlashInfer's, of
    prompts' attention.
    """

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
        most_decodes = min(limits.most_decodes, limits.max_step_tokens)
        sizes = tuple(sorted(graph_batches or graph_sizes(most_decodes)))
        # What states launch for prompts depends on these.
        of_prompts = (limits, parts.weights.layers, MAX_PROMPTS)
        prompt_sizes = () if parts.states else _prompt_sizes(*of_prompts)
        backend = prompt_backend(torch.cuda.get_device_capability(rows.device))
        backend = ONE_KERNEL if parts.batch_invariant else backend
        inside = prompts_in_graphs(parts.model, backend, rounded_cache=parts.cache.is_rounded)
        captured = prompt_sizes if inside else ()
        most = max(limits.most_decodes + MOST_PADDING, sizes[-1])
        room = (most, max((most, *captured)))
        attention = PagedAttention(parts.model, parts.cache, backend, *room)
        reach = (limits.max_context, max(limits.max_step_tokens, sizes[-1], *prompt_sizes))
        forms = (summed_sites(parts), row_form(parts.weights.linears))
        context = (parts.model, parts.cache, parts.table, attention, reach)
        ops = CudaOps(*context, *forms, states=parts.states)
        ops.chosen_experts = chosen_experts(limits, reach[1], rows.device)
        draws = CudaDraws(rows, parts.parameters, limits.most_decodes, parts.rows_at_once)
        outside = row_sizes(limits.most_decodes, limits.max_step_tokens)
        return cls(parts, sizes, prompt_sizes, outside, backend, ops, draws)

    @property
    def prompt_kernels(self) -> str:
        """Name the kernels that compute prompts, for a person."""
        parts = self.parts
        forms = {"rounded_cache": parts.cache.is_rounded}
        names = sorted(set(prompt_kernels(parts.model, backend=self.backend, **forms)))
        return " and ".join(names).replace("FlashInfer", f"FlashInfer ({self.backend})")

    def decoder(self, layers: Sequence[LayerWeights]) -> CudaDecoder:
        weights = replace(self.parts.weights, layers=tuple(layers))
        return self.parts.decoder(self.ops, weights)

    def launch_all(self, decoder: CudaDecoder) -> None:
        """Launch all that steps do, and what is measured."""
        self.run_steps(decoder)
        for sizes, products in self._products():
            self.ops.products.launch_ours(sizes, products)
        self.rehearse(decoder)

    def run_steps(self, decoder: CudaDecoder) -> None:
        """Run steps that no graph has."""
        parts = self.parts
        run_steps(decoder, self.ops, parts.rows, parts.limits)
        for num_ids in (parts.limits.vocab_size, parts.limits.most_ids):
            self.draws.warm(num_ids, parts.cache.dtype)
        if self.ops.chosen_experts is not None:
            self.ops.chosen_experts.warm()

    def rehearse(self, decoder: CudaDecoder) -> None:
        """Launch all that graphs will launch, outside of any.

        A kernel is loaded at its first launch, which a capture does not allow.
        """
        graphs, token_graphs = self._graphs(decoder)
        for reach in _families(self.parts):
            if graphs is not None:
                graphs.rehearse(reach)
            if token_graphs is not None:
                token_graphs.rehearse(reach, _examples(self.parts))

    def load_products(self) -> None:
        """Load products of steps outside graphs: of all tokens, and of rows with logits."""
        weights, sizes = self.parts.weights, self.row_sizes
        self.ops.products.load(sizes, [linear for linear, *_ in _by_shape(weights.linears)])
        most_logits = max(self.parts.limits.most_decodes, LOGITS_ROWS)
        self.ops.products.load(sizes_up_to(sizes, most_logits), [weights.lm_head])

    def measure_products(self) -> None:
        kept = KeptChoices.of(self.ops.device)
        for sizes, products in self._products():
            self.ops.products.measure(sizes, products, kept)
        try:
            kept.save()
        except OSError as error:
            log.warning("the next start will time products again: %s", error)

    def capture(
        self, decoder: CudaDecoder, phases: StartPhases
    ) -> tuple[DecodeGraphs | None, TokenGraphs | None]:
        graphs, token_graphs = self._graphs(decoder)
        families = _families(self.parts)
        for number, reach in enumerate(families):
            phases.count(number, len(families), "sets")
            if graphs is not None:
                graphs.capture(reach)
            if token_graphs is not None:
                token_graphs.capture(reach, _examples(self.parts))
        torch.cuda.synchronize()
        return graphs, token_graphs

    def _products(self) -> Iterator[tuple[Sequence[int], list[list[Linear]]]]:
        """Numbers of rows, and for each shape of a product that has them its matrices."""
        weights = self.parts.weights
        yield sorted({*self.sizes, *self.prompt_sizes}), _by_shape(weights.linears)
        # Of steps with prompts no graph has the head.
        yield self.sizes, [[weights.lm_head]]

    def _graphs(self, decoder: CudaDecoder) -> tuple[DecodeGraphs | None, TokenGraphs | None]:
        """Make the graphs' objects, not captured yet. With --batch-invariant decodes are computed
        as prompts."""
        graphs = None
        if not self.parts.batch_invariant:
            graphs = DecodeGraphs(decoder, self.ops, self.parts.rows, self.sizes)
        return graphs, self._token_graphs(decoder) if self.prompt_sizes else None

    def _token_graphs(self, decoder: CudaDecoder) -> TokenGraphs:
        parts, inside = self.parts, None
        if prompts_in_graphs(parts.model, self.backend, rounded_cache=parts.cache.is_rounded):
            page_table, most = parts.rows.page_table, self.prompt_sizes[-1]
            room = PromptRoom(most, MAX_PROMPTS * page_table.shape[-1])
            if parts.batch_invariant:
                room = replace(room, prompts=parts.limits.max_rows)
            prompts = PromptAttention(parts.model, parts.cache, self.backend, room)
            counts = min(most, parts.limits.most_decodes), room.prompts
            inside = GraphAttention(self.ops, prompts, page_table, most, *counts)
        return TokenGraphs(decoder, self.ops, self.prompt_sizes, inside)


def compile_together(launch: Callable[[], None], parts: Parts, sizes: tuple[int, ...]) -> None:
    """Compile the kernels that are launched, all at once, unless an earlier start did for such
    parts on all devices of the group: launching has them exchange tensors. Without it kernels are
    compiled one by one, as what follows comes to them. sizes: of decode graphs.
    """
    products = [same.kind for same, *_ in _by_shape(parts.weights.linears)]
    kinds = (parts.whole, parts.limits, parts.cache.pool.dtype, parts.cache.dtype, products, sizes)
    options = (parts.group.shard, parts.dora_graphs, parts.batch_invariant)
    sources = sources_digest(loraplex.server.model)  # which choose what is launched
    kept = KeptChoices.of(parts.rows.device, *kinds, *options, sources)
    if parts.group.least(int(kept.are_compiled)):
        return
    try:
        with compiled_together():
            launch()
    except Exception:
        log.warning("kernels could not be compiled together", exc_info=True)
    else:
        with suppress(OSError):  # the next start looks at each kernel again
            kept.keep_compiled()
    torch.cuda.empty_cache()  # graphs have memory of their own


def _families(parts: Parts) -> tuple[Reach, ...]:
    """Families of graphs that are captured.

    One is without adapters. Where there are adapters, one is for those that change layers, and
    one for those of experts, which cost every layer more. Where asked for, one is for adapters
    that change the base's own products.
    """
    if not parts.limits.adapter_slots:
        return (Reach.NONE,)
    has_experts = parts.table.sites.of_experts.any()
    wanted = {Reach.EXPERTS: has_experts, Reach.OUTPUTS: parts.dora_graphs}
    return (Reach.NONE, Reach.LAYERS, *(reach for reach, is_wanted in wanted.items() if is_wanted))


def _examples(parts: Parts) -> Callable[[int], StepLayout]:
    """Makes the layout of prompts with so many tokens in all."""
    return partial(prompts_of, parts.rows, parts.limits.max_context)


def summed_sites(parts: Parts) -> SummedSites:
    """Sites whose output the devices of a group sum or norm together."""
    group = parts.group
    if group.shard.count == 1:
        return NONE_SUMMED
    norms_all = any(of.norms_all_heads for of in parts.whole.attentions.values())
    before = frozenset[Role](("qkv",) if norms_all else ())
    summed = frozenset(site.role for site in parts.table.sites if site.turn is not None)
    return SummedSites(before, summed, group.term_rows)


def _by_shape(linears: Iterable[Linear]) -> list[list[Linear]]:
    """Group linears by shape."""
    found: dict[tuple[object, ...], list[Linear]] = {}
    for linear in linears:
        found.setdefault(linear.kind, []).append(linear)
    return list(found.values())


def _prompt_sizes(
    limits: ExecutorLimits, layers: Iterable[LayerWeights], prompts: int
) -> tuple[int, ...]:
    """Tokens of the graphs of steps with prompts, of which there are so many at most."""
    # In a context of one token there are none: slices of one token are decodes.
    most = prompts * limits.max_context if limits.max_context > 1 else 0
    return token_sizes(limits.max_step_tokens, max(map(_weights_of_token, layers)), most)


def _weights_of_token(layer: LayerWeights) -> int:
    """How many of a layer's a token is multiplied with."""
    weights = sum(linear.out_features * linear.in_features for linear in layer.linears)
    for branch in layer.branches:
        if isinstance(branch, MoeWeights):
            experts = (branch.gate_up, branch.down)
            each = sum(linear.out_features * linear.in_features for linear in experts)
            weights += branch.spec.top_k * each
    return weights
