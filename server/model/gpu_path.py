"""Which ops serve a model on a device; on a GPU, everything compiled, warm and captured."""

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from server.engine.executor import ExecutorLimits
from server.kernels.table import RANK_BLOCKS
from server.model.config import ModelConfig
from server.model.decoder import Decoder
from server.model.draws_torch import TorchDraws
from server.model.lora import AdapterTable
from server.model.ops import KVCache, StepLayout
from server.model.ops_torch import TorchOps
from server.model.row_sampling import RowSampling
from server.model.rows import Rows
from server.model.sampler import Draws
from server.model.start_phases import StartPhases
from server.model.weights import ModelWeights

log = logging.getLogger(__name__)

# Token counts that between them use every kernel of steps outside graphs.
_WARM_TOKENS = (3, 40, 300, 600, 2100)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a set of ops works on; all on one device. summary: of its memory, for a person."""

    model: ModelConfig
    weights: ModelWeights
    cache: KVCache
    table: AdapterTable
    rows: Rows
    parameters: RowSampling
    limits: ExecutorLimits
    summary: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Built:
    """graphs, token_graphs: DecodeGraphs and TokenGraphs, None where steps are computed as they
    come. backend: for a person."""

    decoder: Decoder[Any, Any, Any]
    draws: Draws
    graphs: Any
    token_graphs: Any
    backend: str


def _build_reference(parts: Parts, why: str) -> Built:
    ops = TorchOps(parts.model, parts.cache, parts.table)
    decoder = Decoder(parts.model, parts.weights, parts.table.sites, ops)
    draws = TorchDraws(parts.rows, parts.parameters)
    return Built(decoder, draws, None, None, f"plain torch: {why}")


def why_not_fast(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a CUDA device serves this model with the reference ops, or None where it need not."""
    for package in ("flashinfer", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed (pip install 'loraplex[gpu]')"
    try:
        from server.model.attention_cuda import unsupported
    except ImportError as error:
        return f"FlashInfer cannot be imported ({error})"
    return unsupported(model, dtype, torch.cuda.get_device_capability(device))


def build(parts: Parts, graph_batches: Sequence[int] | None, phases: StartPhases) -> Built:
    """graph_batches: padded batch sizes to capture, and none of steps with prompts; None = all that
    the limits need. phases: what takes long is noted there."""
    device = parts.cache.k.device
    if device.type == "cpu":
        return _build_reference(parts, "computing on the CPU")
    reason = why_not_fast(parts.model, parts.cache.k.dtype, device)
    if reason is not None:
        log.warning("serving with plain torch, which is slower: %s", reason)
        return _build_reference(parts, reason)
    return _build_fast(parts, graph_batches, phases)


def _build_fast(parts: Parts, graph_batches: Sequence[int] | None, phases: StartPhases) -> Built:
    # Not at the top: neither package is needed on a CPU.
    from server.model.attention_cuda import PagedAttention, prompt_backend
    from server.model.decode_graphs import DecodeGraphs, graph_sizes
    from server.model.draws_cuda import CudaDraws
    from server.model.ops_cuda import CudaOps

    limits, rows = parts.limits, parts.rows
    rows.page_table[rows.scratch] = limits.num_pages
    most_decodes = min(limits.max_rows, limits.max_step_tokens)
    sizes = tuple(sorted(graph_batches or graph_sizes(most_decodes)))
    prompt_sizes = () if graph_batches else _prompt_sizes(limits)
    backend = prompt_backend(torch.cuda.get_device_capability(rows.device))
    most_rows = max(limits.max_rows, sizes[-1], *(prompt_sizes if backend == "fa3" else ()))
    attention = PagedAttention(parts.model, parts.cache, backend, most_rows)
    most_tokens = max(limits.max_step_tokens, sizes[-1], *prompt_sizes)
    reach = (limits.max_context, most_tokens)
    ops = CudaOps(parts.model, parts.cache, parts.table, attention, reach)
    decoder = Decoder(parts.model, parts.weights, parts.table.sites, ops)
    adapters = limits.adapter_slots > 0
    for tokens in _WARM_TOKENS:
        _warm(decoder, rows, min(tokens, limits.max_step_tokens), limits.max_context, adapters)
    draws = CudaDraws(rows, parts.parameters)
    draws.warm(parts.model.vocab_size, parts.cache.k.dtype)
    phases.done("kernels")
    ops.products.measure(sorted({*sizes, *prompt_sizes}), _layer_products(parts.weights))
    # Of steps with prompts no graph has the head.
    ops.products.measure(sizes, [[(parts.weights.lm_head, None)]])
    phases.done("products")
    graphs = DecodeGraphs(decoder, ops, rows, sizes)
    token_graphs = _token_graphs(parts, decoder, prompt_sizes, backend) if prompt_sizes else None
    for with_adapters in (False, True)[: 1 + adapters]:
        graphs.capture(with_adapters)
        if token_graphs is not None:
            token_graphs.capture(with_adapters, partial(_prompts_of, rows, limits.max_context))
    torch.cuda.synchronize()
    phases.done("graphs")
    _tell_of_late_kernels()
    told = f"FlashInfer ({backend} for prompts), decode graphs for up to {sizes[-1]} sequences"
    return Built(decoder, draws, graphs, token_graphs, told)


def _prompt_sizes(limits: ExecutorLimits) -> tuple[int, ...]:
    """Tokens of the graphs of steps with prompts."""
    from server.model.prompt_attention import MAX_PROMPTS
    from server.model.token_graphs import token_sizes

    # No step has more, or there are no prompts: slices of one token are decodes.
    most = MAX_PROMPTS * limits.max_context if limits.max_context > 1 else 0
    return tuple(size for size in token_sizes(limits.max_step_tokens) if size <= most)


def _token_graphs(
    parts: Parts, decoder: Decoder[Any, Any, Any], sizes: tuple[int, ...], backend: str
) -> Any:
    """Not captured yet. backend: of prompts' attention."""
    from server.model.graph_attention import GraphAttention
    from server.model.prompt_attention import MAX_PROMPTS, PromptAttention
    from server.model.token_graphs import TokenGraphs

    ops: Any = decoder.ops
    inside = None
    if backend == "fa3":
        page_table, most = parts.rows.page_table, sizes[-1]
        pages = MAX_PROMPTS * page_table.shape[1]
        prompts = PromptAttention(parts.model, parts.cache, backend, captured_pages=pages)
        most_decodes = min(most, parts.limits.max_rows)
        inside = GraphAttention(ops, prompts, page_table, most, most_decodes)
    return TokenGraphs(decoder, ops, sizes, inside)


def _layer_products(
    weights: ModelWeights,
) -> list[list[tuple[torch.Tensor, torch.Tensor | None]]]:
    """Weight and bias of each product of a layer, those of all layers together."""
    layers = weights.layers
    return [
        [(layer.qkv, layer.qkv_bias) for layer in layers],
        [(layer.o, layer.o_bias) for layer in layers],
        [(layer.gate_up, layer.gate_up_bias) for layer in layers],
        [(layer.down, layer.down_bias) for layer in layers],
    ]


def _tell_of_late_kernels() -> None:
    """What is compiled from now on holds up a step: it should have been warm."""
    import triton

    def late(*, repr: str, **_: object) -> None:
        log.warning("a kernel was compiled while serving: %s", repr)

    triton.knobs.runtime.jit_post_compile_hook = late


def _warm(
    decoder: Decoder[Any, Any, Any], rows: Rows, tokens: int, max_context: int, adapters: bool
) -> None:
    """A mixed step on the scratch row: one decode, and chunks of the rest. With adapters also as
    if they changed the embedding and the head, which no graph does, of small ranks and of any."""
    chunks, rest = divmod(tokens - 1, max_context)
    # Decodes come first, and a rest of one is another.
    layout = _on_scratch(rows, np.array([1] + ([rest] if rest else []) + [max_context] * chunks))
    token_ids = torch.zeros(tokens, dtype=torch.int64, device=rows.device)
    ops: Any = decoder.ops
    loras: list[tuple[Any, Any]] = [(None, None)]
    if adapters:
        of_all, of_last = (_everywhere(ops.lora(np.zeros(n, np.int64))) for n in (tokens, 1))
        loras.append((replace(of_all, down=None), of_last))
        if of_all.down is not None:
            loras += [(ops.shrinking(of_all, block), of_last) for block in RANK_BLOCKS]
    for of_all, of_last in loras:
        normed = decoder.forward(token_ids, ops.plan(layout), of_all)
        decoder.logits(normed[-1:], of_last)
    torch.cuda.synchronize()


def _everywhere(lora: Any) -> Any:
    return replace(lora, model_sites=True)


def _prompts_of(rows: Rows, max_context: int, tokens: int) -> StepLayout:
    """As few prompts as have so many tokens, all alike."""
    count = -(-tokens // max_context)
    num_new = np.full(count, tokens // count)
    num_new[: tokens % count] += 1
    return _on_scratch(rows, num_new)


def _on_scratch(rows: Rows, num_new: np.ndarray) -> StepLayout:
    """Slices that begin their contexts, all of them on the row that is no sequence's."""
    tokens = int(num_new.sum())
    positions = np.concatenate([np.arange(n) for n in num_new])
    return StepLayout(
        seq_rows=np.full(len(num_new), rows.scratch),
        starts=np.zeros(len(num_new), dtype=np.int64),
        num_new=num_new,
        token_rows=torch.full((tokens,), rows.scratch, device=rows.device),
        positions=torch.from_numpy(positions).to(rows.device),
        page_table=rows.page_table,
    )
