"""Attention of prompts on a GPU, launched as it comes or from a CUDA graph.

FlashInfer has one compiled module for each combination of windows and soft caps, of which some take
minutes to compile where the user starts the server, and none for sinks and most head sizes. So one
of its modules is used, for layers that see their whole context and have no slopes, and the
project's own kernel for all others. The module reads keys of eight bits from a copy.
`docs/internals/prompt-attention.md` says more.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal

import flashinfer
import numpy as np
import torch

from loraplex.server.kernels.attention.decode_inputs import gather_pages
from loraplex.server.kernels.attention.latent_attention import latent_prompts, latent_tiles
from loraplex.server.kernels.attention.pages import CachePages, widen_pages
from loraplex.server.kernels.attention.prompt_attention import (
    TILE_COLUMNS,
    cut_prompts,
    max_tiles,
    prompt_attention,
    tile_shape,
)
from loraplex.server.model.ops.attention.score_rules import score_rule
from loraplex.server.model.ops.attention.unfolding import are_unfolded
from loraplex.server.model.ops.memory import WIDENED_BYTES, split_prompts_bytes
from loraplex.server.model.ops.ops import KVCache, StepLayout
from loraplex.server.model.ops.sizes import MAX_PROMPTS, PromptRoom
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.spec.latent_spec import LatentSpec
from loraplex.server.model.spec.model_spec import AttentionSpec, ModelSpec

PromptKernel = Literal["FlashInfer", "FlashInfer, widened", "Triton"]
_WIDENED: PromptKernel = "FlashInfer, widened"
_FLASHINFER_HEADS = (64, 128, 256)
# A backend that is none of FlashInfer's: this package's kernel computes all layers, and decodes as
# prompts of one token. A token's sums depend on nothing else of the step.
ONE_KERNEL = "triton"

_LEAST_WORKSPACE_BYTES = 1 << 20
_INT_WORKSPACE_BYTES = 8 << 20
# A plan's upload may still be on its way while the next is made.
_PLAN_BUFFERS = 3


def cache_pages(cache: KVCache, layer: int) -> CachePages:
    """The cache's pages of one layer, as the kernels take them."""
    pages, parts = cache.of(layer), cache.parts(layer)
    if not cache.is_rounded:
        return CachePages(*pages, parts=parts)
    k_scales, v_scales = cache.token_scales(layer) or (None, None)
    return CachePages(*pages, *cache.scales[layer], k_scales, v_scales, parts)


class TiledPrompts:
    """Attention of prompts by this package's own kernel. One plan serves all layers of one form.
    One step at a time is planned; several may be in flight.
    """

    def __init__(
        self,
        layers: dict[int, AttentionSpec],
        cache: KVCache,
        captured: PromptRoom | None,
        *,
        of_decodes: bool = False,
    ) -> None:
        """Choose tiles for the layers and the device. layers: by number. captured: a graph launches
        it. of_decodes: as of `tile_shape`.
        """
        self._cache, self._device = cache, cache.pool.device
        of = next(iter(layers.values()))
        capability = torch.cuda.get_device_capability(self._device)
        self._of = of
        if isinstance(of, LatentSpec):
            self._shape = latent_tiles(of.num_heads, capability)
        else:
            group = of.num_heads // of.num_kv_heads
            self._shape = tile_shape(group, of.head_dim, capability, of_decodes=of_decodes)
        self._rules = {number: score_rule(of, self._device) for number, of in layers.items()}
        self._captured = captured
        room = 0 if captured is None else self._most_tiles(captured, captured.tokens)
        self._tiles = torch.zeros(room, TILE_COLUMNS, dtype=torch.int32, device=self._device)
        self._lasts: torch.Tensor | None = None
        self._joining = {number for number, of in layers.items() if of.joins_pictures}
        self._page_table = torch.zeros(0, 0, 0, dtype=torch.int64, device=self._device)

    def _most_tiles(self, captured: PromptRoom, tokens: int) -> int:
        """The most tiles that a captured step of so many tokens has."""
        return max_tiles(tokens, captured.prompts, self._shape)

    def plan(self, layout: StepLayout) -> None:
        """Prepare the attention of a step, as `PromptAttention.plan` does."""
        self._page_table = layout.page_table
        chosen = None
        if isinstance(self._of, LatentSpec) and self._captured is None:
            _, *of_prompts = layout.prompts
            chosen = ~are_unfolded(self._of, *of_prompts)
        tiles = cut_prompts(*layout.prompts, self._shape.tokens, chosen)
        self._lasts = None
        if layout.lasts is not None and self._joining:
            lasts = layout.lasts[layout.num_decodes :].astype(np.int32)
            self._lasts = to_device(lasts, self._device)
        if self._captured is not None:  # what pads has no tokens
            tiles = np.pad(tiles, ((0, len(self._tiles) - len(tiles)), (0, 0)))
            self._tiles.copy_(to_device(tiles, self._device))
        else:
            self._tiles = to_device(tiles, self._device)

    def run(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None
    ) -> None:
        """Compute one layer's attention, as `PromptAttention.run` does."""
        tiles = self._tiles
        if self._captured is not None:
            tiles = tiles[: self._most_tiles(self._captured, len(q))]
        page_table, rule = self._page_table[self._cache.groups.group(layer)], self._rules[layer]
        context = (page_table, tiles, self._shape)
        if isinstance(self._of, LatentSpec):
            latent_prompts(q, self._cache.of(layer)[0], *context, rule.outer, out)
        else:
            lasts = self._lasts if layer in self._joining else None
            pages = cache_pages(self._cache, layer)
            prompt_attention(q, pages, *context, rule, sinks, out, lasts)


class WidenedPages:
    """Keys and values of prompts, widened from eight bits to the queries' dtype. Those of a layer
    take the place of the last layer's.
    """

    def __init__(self, cache: KVCache, layer: int, memory: torch.Tensor) -> None:
        """Lay pages of this layer's form into memory. memory: uint8 `[n]`, which layers of all
        forms share.
        """
        self._cache = cache
        of_page = _widened_page_bytes(cache, layer)
        self.room = min(len(cache.pool), len(memory) // of_page)
        wide = memory[: self.room * of_page].view(cache.dtype)
        self._wide = wide.view(2, self.room, *cache.of(layer)[0].shape[1:])
        self._pages = torch.arange(0, dtype=torch.int32)
        self._places = torch.arange(self.room, dtype=torch.int32, device=cache.pool.device)

    def place(self, pages: torch.Tensor) -> torch.Tensor:
        """Say where copies of these pages will lie. pages: int32 `[n]`, at most `room` of them ->
        int32 `[n]`.
        """
        self._pages = pages
        return self._places[: len(pages)]

    def of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Widen the layer's pages: k and v, as `KVCache.of`, of the places."""
        widen_pages(cache_pages(self._cache, layer), self._pages, self._wide)
        return self._wide[0], self._wide[1]


def _widened_page_bytes(cache: KVCache, layer: int) -> int:
    """Bytes of a page's keys and values in the queries' dtype."""
    return 2 * cache.of(layer)[0][0].numel() * cache.dtype.itemsize


def _widened_memory(cache: KVCache, layers: Iterable[int]) -> torch.Tensor:
    """Allocate memory of widened pages, uint8 `[n]`. layers: one of each form."""
    most = max((len(cache.pool) * _widened_page_bytes(cache, n) for n in layers), default=0)
    nbytes = min(most, WIDENED_BYTES)
    return torch.empty(nbytes, dtype=torch.uint8, device=cache.pool.device)


class FlashInferPrompts:
    """Attention of prompts by FlashInfer, in layers of one form that share pages. Owns its
    workspace. One step at a time is planned; several may be in flight.
    """

    def __init__(
        self,
        layers: dict[int, AttentionSpec],
        cache: KVCache,
        backend: str,
        captured: PromptRoom | None,
        widened: WidenedPages | None = None,
    ) -> None:
        """Allocate what FlashInfer needs. layers: by number, of one page group. captured: a graph
        launches it, and its first plan is of the most tokens. widened: read in place of pages of
        eight bits.
        """
        self._widened = widened
        self._scales = {number: attention.scale for number, attention in layers.items()}
        first, attention = next(iter(layers.items()))
        self._group, self._cache = cache.groups.group(first), cache
        self._heads = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
        self._device = cache.pool.device
        self._captured = captured is not None
        nbytes = _LEAST_WORKSPACE_BYTES  # FA3 leaves nothing in it
        if backend == "fa2":
            processors = torch.cuda.get_device_properties(self._device).multi_processor_count
            nbytes += split_prompts_bytes(attention, processors)
        workspace = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._pinned = [
            torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True)
            for _ in range(_PLAN_BUFFERS)
        ]
        self._plans = 0
        buffers: dict[str, Any] = {}
        if captured is not None:
            lengths = {
                "qo_indptr_buf": MAX_PROMPTS + 1,
                "paged_kv_indptr_buf": MAX_PROMPTS + 1,
                "paged_kv_indices_buf": captured.pages,
                "paged_kv_last_page_len_buf": MAX_PROMPTS,
            }
            buffers["use_cuda_graph"] = True
            for name, length in lengths.items():
                buffers[name] = torch.zeros(length, dtype=torch.int32, device=self._device)
        self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend=backend, **buffers
        )

    def plan(self, layout: StepLayout) -> None:
        """Prepare the attention of a step, as `PromptAttention.plan` does."""
        seq_rows, starts, num_new = layout.prompts
        if self._captured:
            # What pads has no tokens and no pages.
            missing = MAX_PROMPTS - len(num_new)
            seq_rows, starts, num_new = (
                np.pad(a, (0, missing)) for a in (seq_rows, starts, num_new)
            )
        size, dtype = self._cache.page_size, self._cache.dtype
        contexts = starts + num_new
        counts = -(-contexts // size)
        indptr = _pinned_indptr(counts)
        last = np.where(counts > 0, contexts - (counts - 1) * size, 0).astype(np.int32)
        # Real pages even where kernels are compiled and not launched.
        pages = torch.zeros(int(counts.sum()), dtype=torch.int32, device=self._device)
        rows = to_device(seq_rows, self._device)
        table = layout.page_table[self._group]
        gather_pages(rows, indptr.to(self._device, non_blocking=True), table, pages)
        if self._widened is not None:
            pages = self._widened.place(pages)
        self._plans += 1
        # Its upload goes by way of pinned memory that no plan in flight uses.
        wrapper = self._wrapper
        wrapper._pin_memory_int_workspace_buffer = self._pinned[self._plans % _PLAN_BUFFERS]
        wrapper.plan(
            _pinned_indptr(num_new),
            indptr,
            pages,
            torch.from_numpy(last).pin_memory(),
            *self._heads,
            size,
            causal=True,
            sm_scale=1.0,  # each layer's own comes with it
            q_data_type=dtype,
            kv_data_type=dtype,
            max_token_per_sequence=int(num_new.max()),
        )

    def run(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None
    ) -> None:
        """Compute a layer, as `PromptAttention.run` does. Raises ValueError for sinks."""
        if sinks is not None:
            raise ValueError("FlashInfer's module has no sinks")
        pages = (self._widened or self._cache).of(layer)
        self._wrapper.run(q, pages, out=out, q_scale=self._scales[layer])


def _pinned_indptr(counts: np.ndarray) -> torch.Tensor:
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    return torch.from_numpy(indptr).pin_memory()


class ChosenPrompts:
    """Attention of prompts in layers that share form and pages, which FlashInfer computes in most
    steps. The project's kernel computes those whose keys and values of eight bits have no room when
    widened, and those whose pictures are joined.
    """

    def __init__(
        self,
        layers: dict[int, AttentionSpec],
        cache: KVCache,
        backend: str,
        memory: torch.Tensor | None,
    ) -> None:
        """Prepare both ways. layers: by number, of one page group. memory: of widened pages; None =
        pages are read as they are.
        """
        self._page_size = cache.page_size
        self._widened = None
        if memory is not None:
            self._widened = WidenedPages(cache, next(iter(layers)), memory)
        self._joins = _join_pictures(layers)
        self._flashinfer = FlashInferPrompts(layers, cache, backend, None, self._widened)
        self._tiled = TiledPrompts(layers, cache, None)
        self._planned: FlashInferPrompts | TiledPrompts = self._tiled

    def plan(self, layout: StepLayout) -> None:
        """Prepare the attention of a step, as `PromptAttention.plan` does."""
        is_tiled = self._joins and layout.lasts is not None
        if self._widened is not None:
            _, starts, num_new = layout.prompts
            pages = int((-(-(starts + num_new) // self._page_size)).sum())
            is_tiled = is_tiled or pages > self._widened.room
        self._planned = self._tiled if is_tiled else self._flashinfer
        self._planned.plan(layout)

    def run(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None
    ) -> None:
        """Compute one layer's attention, as `PromptAttention.run` does."""
        self._planned.run(layer, q, out, sinks)


def _join_pictures(layers: dict[int, AttentionSpec]) -> bool:
    return any(of.joins_pictures for of in layers.values())


def prompt_kernel(
    attention: AttentionSpec, *, rounded_cache: bool = False, captured: bool = False
) -> PromptKernel:
    """Name the kernel that computes a layer's attention of prompts. FlashInfer's module reads no
    keys of eight bits, and a graph's contexts may be too long to widen.
    """
    is_plain = attention.window is None and attention.softcap is None
    is_plain = is_plain and not attention.sinks and not attention.slopes
    if isinstance(attention, LatentSpec):
        return "Triton"
    if not is_plain or attention.head_dim not in _FLASHINFER_HEADS:
        return "Triton"
    if not rounded_cache:
        return "FlashInfer"
    return "Triton" if captured else _WIDENED


def prompt_kernels(
    model: ModelSpec, *, backend: str = "", rounded_cache: bool = False, captured: bool = False
) -> tuple[PromptKernel, ...]:
    """The kernel of each layer that attends."""
    of_each = model.attentions.values()
    if backend == ONE_KERNEL:
        return tuple("Triton" for _ in of_each)
    return tuple(
        prompt_kernel(of, rounded_cache=rounded_cache, captured=captured) for of in of_each
    )


def prompts_in_graphs(model: ModelSpec, backend: str, *, rounded_cache: bool = False) -> bool:
    """Say whether graphs can launch the attention of prompts. backend: FlashInfer's, of which
    graphs can launch "fa3" alone: for what the other launches depends on the plan.
    """
    kernels = prompt_kernels(model, backend=backend, rounded_cache=rounded_cache, captured=True)
    return backend == "fa3" or "FlashInfer" not in kernels


def _planned_together(
    model: ModelSpec, cache: KVCache, backend: str, *, captured: bool
) -> list[tuple[PromptKernel, dict[int, AttentionSpec]]]:
    """Layers by number that one plan serves, and their kernel: for FlashInfer layers that have the
    same pages, too."""
    found = defaultdict[tuple[PromptKernel, int, int], dict[int, AttentionSpec]](dict)
    forms = {"rounded_cache": cache.is_rounded, "captured": captured}
    kernels = prompt_kernels(model, backend=backend, **forms)
    for (number, of), kernel in zip(model.attentions.items(), kernels, strict=True):
        if kernel == "Triton":
            found[kernel, of.num_heads // of.num_kv_heads, of.head_dim][number] = of
        else:
            found[kernel, cache.groups.group(number), of.num_heads][number] = of
    return [(kernel, layers) for (kernel, *_), layers in found.items()]


_Plan = FlashInferPrompts | ChosenPrompts | TiledPrompts


class PromptAttention:
    """Attention of prompts, by the kernel that each layer needs. Owns its workspace. One step at a
    time is planned; several may be in flight.
    """

    def __init__(
        self, model: ModelSpec, cache: KVCache, backend: str, captured: PromptRoom | None = None
    ) -> None:
        """Choose the kernels that the model's layers need. backend: FlashInfer's. captured: a graph
        launches it, the first plan is of the most tokens, all are of one page table, and of at
        most so many prompts.
        """
        self._plans: list[_Plan] = []
        self._of_layer: dict[int, _Plan] = {}
        together = _planned_together(model, cache, backend, captured=captured is not None)
        widened = (next(iter(layers)) for kernel, layers in together if kernel == _WIDENED)
        memory = _widened_memory(cache, widened)
        for kernel, layers in together:
            plan: _Plan
            if kernel == "Triton":
                of_decodes = backend == ONE_KERNEL
                plan = TiledPrompts(layers, cache, captured, of_decodes=of_decodes)
            elif kernel == "FlashInfer" and (captured or not _join_pictures(layers)):
                plan = FlashInferPrompts(layers, cache, backend, captured)
            else:
                plan = ChosenPrompts(layers, cache, backend, memory if kernel == _WIDENED else None)
            self._plans.append(plan)
            self._of_layer.update(dict.fromkeys(layers, plan))

    def plan(self, layout: StepLayout) -> None:
        """Plan the layout's prompts, whose tokens follow one another from the first on in `run`'s
        input.
        """
        for plan in self._plans:
            plan.plan(layout)

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Compute one layer's attention of prompts. q, out: `[tokens, heads, head_dim]`; keys and
        values are in their pages. sinks: float32 `[heads]`.
        """
        self._of_layer[layer].run(layer, q, out, sinks)
