"""The GPU's set of ops: FlashInfer, cuBLAS, and the project's own Triton kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import flashinfer
import numpy as np
import torch
from torch.nn import functional

from server.kernels.attention.rope_append import rope_append
from server.kernels.attention.rope_append_lora import rope_append_lora
from server.kernels.launch.configs import KernelConfigs, Phase, load_configs
from server.kernels.linear.skinny_lora import SkinnyLora, skinny_product_lora
from server.kernels.linear.stack import Stack, stack_rows
from server.kernels.lora.expand import expand
from server.kernels.lora.pending import PendingDelta, PendingLora
from server.kernels.lora.segments import allocate_segments, route
from server.kernels.lora.shrink import gather_embedding, shrink
from server.kernels.lora.table import RANK_BLOCKS
from server.kernels.lora.workspace import Workspace, allocate_workspace
from server.kernels.pointwise.add_norm import add_norm
from server.kernels.pointwise.silu import silu_mul
from server.kernels.pointwise.silu_lora import silu_mul_lora
from server.model.linear.dense import DenseLinear
from server.model.lora.lora import AdapterTable, any_adapter
from server.model.lora.sites import Site
from server.model.ops import device_lora
from server.model.ops.attention_cuda import Attention, PagedAttention
from server.model.ops.device_lora import DeviceLora, Product
from server.model.ops.ops import KVCache, StepLayout
from server.model.ops.products import Products
from server.model.ops.rope import cos_sin, inverse_frequencies
from server.model.ops.transfers import to_device
from server.model.spec import Activation, ModelSpec

# Parts of the activation's columns whose sums for down's LoRA are kept apart.
_DOWN_SPLIT = 16


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """positions, slots (`CudaOps.kv_slots`; -1 = a token that is no prompt's): int64 `[tokens]`;
    captured steps of decodes have no slots. attended: `[tokens, heads * head_dim]`, where the
    result is to lie; None: anywhere."""

    positions: torch.Tensor
    slots: torch.Tensor | None
    attention: Attention
    attended: torch.Tensor | None = None


class CudaOps:
    """Implements `server.model.ops.ops.Ops` in bfloat16 and float16 with float32 accumulation."""

    def __init__(
        self,
        model: ModelSpec,
        cache: KVCache,
        table: AdapterTable,
        attention: PagedAttention,
        limits: tuple[int, int],
    ) -> None:
        """limits: the longest context, and the most tokens of a step, with what pads it."""
        max_context, max_tokens = limits
        self.model = model
        self.cache = cache
        self.table = table
        self._attention = attention
        self.device = cache.k.device
        self._configs: KernelConfigs = load_configs(self.device)
        self.products = Products(self._configs)
        self._side = torch.cuda.Stream(self.device)
        rope = model.layers[0].attention.rope
        assert rope is not None  # `unsupported` says so
        inv_freq = inverse_frequencies(rope, model.head_dim, self.device)
        places = torch.arange(max_context, device=self.device)
        angles = cos_sin(places, inv_freq, rope.attention_factor)
        self._cos_sin = torch.cat(angles, dim=-1).squeeze(1).contiguous()
        self._workspaces = self._allocate_workspaces("decode", device_lora.MIXED_TOKENS)
        self._workspaces |= self._allocate_workspaces("mixed", device_lora.MIXED_TOKENS)
        self._workspaces |= self._allocate_workspaces("prefill", max_tokens)
        most = max_tokens if max_tokens > device_lora.MIXED_TOKENS else 0
        self._down = {
            width: allocate_workspace(most, cache.k.dtype, self.device, _DOWN_SPLIT, width)
            for width in RANK_BLOCKS
        }

    def _allocate_workspaces(self, phase: Phase, rows: int) -> dict[tuple[Phase, int], Workspace]:
        """By `max_split`."""
        return {
            (phase, split): allocate_workspace(most, self.cache.k.dtype, self.device, split)
            for split, most in self._configs.workspaces(phase, rows).items()
        }

    # ---- once a step

    def plan(self, layout: StepLayout) -> CudaPlan:
        return CudaPlan(layout.positions, self.kv_slots(layout), self._attention.plan(layout))

    def kv_slots(self, layout: StepLayout) -> torch.Tensor:
        """int64 `[tokens]`: page * page_size + offset of each token's keys and values."""
        size = self.cache.page_size
        pages = layout.page_table[layout.token_rows, layout.positions // size]
        return pages * size + layout.positions % size

    def lora(self, token_slots: np.ndarray) -> DeviceLora | None:
        if not any_adapter(token_slots):
            return None
        slots = to_device(token_slots.astype(np.int32), self.device)
        lora = self._allocate(slots, model_sites=bool(self.table.changes_model(token_slots)))
        self.route(lora)
        block = self.table.rank_block(token_slots) if lora.phase == "prefill" else None
        return lora if block is None else self.shrinking(lora, block)

    def shrinking(self, lora: DeviceLora, block: int) -> DeviceLora:
        """With ranks of at most `block`, of which one workspace is."""
        return replace(lora, down=self._down[block])

    def route(self, lora: DeviceLora) -> None:
        """Again, as its slots are now; in a captured step at its beginning."""
        if lora.few is not None:
            stack_rows(lora.slots, lora.few.stack, self.table.device_table)
        if lora.few is None or lora.model_sites:
            route(lora.slots, lora.segments, self.table.device_table)

    def captured_lora(self, slots: torch.Tensor, *, decodes: bool) -> DeviceLora:
        """Of a captured step, which routes it; embedding and head stay the base's."""
        return self._allocate(slots, decodes=decodes, captured=True)

    def _allocate(
        self,
        slots: torch.Tensor,
        *,
        model_sites: bool = False,
        decodes: bool = False,
        captured: bool = False,
    ) -> DeviceLora:
        rows = len(slots)
        phase = device_lora.phase_of(rows, decodes)
        known, tile_rows = self.table.device_table.num_slots, self._configs.tile_rows(phase, rows)
        shared = device_lora.shares_tiles(rows)
        segments = allocate_segments(rows, tile_rows, known, self.device, shared=shared)
        workspace = self._workspaces[phase, self._configs.max_split(phase, rows)]
        sites, dtype = len(self.table.sites), self.cache.k.dtype
        few = device_lora.on_the_way(self._configs, rows, sites, dtype, self.device)
        return DeviceLora(slots, segments, workspace, phase, model_sites, decodes, captured, few)

    # ---- operations

    def embed(
        self, token_ids: torch.Tensor, weight: torch.Tensor, lora: DeviceLora | None, site: Site
    ) -> torch.Tensor:
        y = functional.embedding(token_ids, weight)
        if lora is not None and lora.model_sites:
            ids = token_ids.to(torch.int32)
            table = self.table.device_table
            gather_embedding(ids, table, site.number, lora.segments, lora.workspace)
            self._expand(y, lora, site)
        return y

    def linear(
        self,
        x: torch.Tensor,
        linear: DenseLinear,
        lora: DeviceLora | None,
        site: Site,
        out: torch.Tensor | None = None,
    ) -> Product:
        """With LoRA: in the product's kernel of few tokens; else shrink runs beside the product,
        and so does expand where what takes up the product adds a delta. out: where the product is
        to lie."""
        if lora is None:
            return Product(self.products.linear(x, linear, out))
        y = x.new_empty(len(x), linear.out_features) if out is None else out
        if lora.few is not None:
            on_the_way = self._skinny_lora(lora, site, lora.few.stack)
            skinny_product_lora(x, linear.weight, linear.bias, y, lora.few.config, on_the_way)
            return Product(y)
        kind = site.kind
        shrunk, delta = lora.down if kind == "down" else None, None
        if shrunk is not None:
            lora = replace(lora, workspace=shrunk)
        with self._fork(lora.phase) as (of_lora, of_product):
            with torch.cuda.stream(of_lora):
                if shrunk is None:
                    self._shrink(x, lora, site, after_input=lora.phase != "prefill")
                if device_lora.adds_delta(kind, lora):
                    delta = torch.empty_like(y)
                    self._expand(delta, lora, site, accumulate=False)
            with torch.cuda.stream(of_product):
                self.products.linear(x, linear, y, beside_lora=True)
        table = self.table.device_table
        if delta is not None:
            return Product(y, delta=PendingDelta(table, site.number, lora.slots, delta))
        if kind == "qkv" and (lora.phase != "prefill" or lora.captured):
            # Of few tokens the rotation would need longer to expand them on its way, and of a
            # graph it does not know which are decodes'.
            self._expand(y, lora, site)
            return Product(y)
        later = PendingLora(table, site.number, lora.segments, lora.workspace)
        shrunk = lora.down if kind == "gate_up" else None
        return Product(y, lora=later, phase=lora.phase, shrunk=shrunk)

    def _skinny_lora(self, lora: DeviceLora, site: Site, stack: Stack) -> SkinnyLora:
        table, widths = self.table.device_table, site.out_features
        return SkinnyLora(table, site.number, lora.slots, widths, lora.workspace, stack)

    @contextmanager
    def _fork(self, phase: Phase) -> Iterator[tuple[torch.cuda.Stream, torch.cuda.Stream]]:
        """Streams of LoRA and of the product. The current one, which is one of them, goes on when
        both are done; also after an error: what the other still reads must not be given to the next
        step.

        Of few tokens LoRA has the current one, so that shrink starts while what wrote x drains. Of
        many, which the host launches, the product has it: what takes it up starts sooner.
        """
        main, side = torch.cuda.current_stream(), self._side
        side.wait_stream(main)
        try:
            yield (side, main) if phase == "prefill" else (main, side)
        finally:
            main.wait_stream(side)

    def logits(
        self,
        x: torch.Tensor,
        linear: DenseLinear,
        lora: DeviceLora | None,
        site: Site,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y = self.products.linear(x, linear, out)
        if lora is not None and lora.model_sites:
            self._shrink(x, lora, site)
            self._expand(y, lora, site)
        return y

    def _shrink(
        self, x: torch.Tensor, lora: DeviceLora, site: Site, *, after_input: bool = False
    ) -> None:
        config = self._configs.shrink(lora.phase, len(x))
        context = (self.table.device_table, site.number, lora.segments, lora.workspace, config)
        shrink(x, *context, after_input=after_input)

    def _expand(
        self, y: torch.Tensor, lora: DeviceLora, site: Site, *, accumulate: bool = True
    ) -> None:
        config = self._configs.expand(lora.phase, len(y))
        context = (self.table.device_table, site.number, lora.segments, lora.workspace, config)
        expand(y, site.out_features, *context, accumulate=accumulate, after_gemm=True)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        normed: torch.Tensor = flashinfer.rmsnorm(x, weight, epsilon)
        return normed

    def add_norm(
        self, delta: Product, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In place."""
        early = self._configs.programmatic_launch
        add_norm(delta.y, delta.delta, hidden, weight, epsilon, programmatic_launch=early)
        return delta.y, hidden

    def norm_product(self, product: Product, weight: torch.Tensor, epsilon: float) -> Product:
        """As the sum with a residual stream of zeros."""
        nothing = torch.zeros_like(product.y)
        return Product(self.add_norm(product, nothing, weight, epsilon)[0])

    def attend(
        self, plan: CudaPlan, layer: int, qkv: Product, qk_norm: torch.Tensor | None
    ) -> torch.Tensor:
        y, attention, model = qkv.y, plan.attention, self.model
        out = y.new_empty(len(y), model.q_size) if plan.attended is None else plan.attended
        heads = out.view(len(y), model.num_heads, model.head_dim)
        # First: decodes read what it leaves of the product where LoRA is still to come.
        q = None if plan.slots is None else self._rotate(plan, plan.slots, layer, qkv, qk_norm)
        if attention.decode is not None:
            rotation = (self._cos_sin, qk_norm)
            batch, rows = attention.decode, attention.decodes
            self._attention.decode(batch, layer, y[rows], qkv.delta, rotation, heads[rows])
        if attention.prefill is not None and q is not None:
            attention.prefill.run(layer, q, heads[attention.prompts])
        return out

    def _rotate(
        self,
        plan: CudaPlan,
        slots: torch.Tensor,
        layer: int,
        qkv: Product,
        qk_norm: torch.Tensor | None,
    ) -> torch.Tensor:
        """Queries of prompts, whose keys and values go to their pages; decodes get LoRA's part."""
        y, prompts, positions = qkv.y, plan.attention.prompts, plan.positions
        pages, epsilon = (
            (self.cache.k[layer], self.cache.v[layer]),
            self.model.layers[layer].attention.qk_epsilon,
        )
        if qkv.lora is None:
            places = (positions[prompts], slots[prompts])
            return rope_append(y[prompts], self._cos_sin, *places, *pages, qk_norm, epsilon)
        context = (self._cos_sin, positions, slots, *pages, qk_norm, epsilon)
        config = self._configs.rope(len(y))
        return rope_append_lora(y, qkv.lora, prompts.start, *context, config)

    def gated(self, gate_up: Product, activation: Activation) -> torch.Tensor:
        """activation: "silu", since `unsupported` refuses models with another."""
        y, lora, shrunk = gate_up.y, gate_up.lora, gate_up.shrunk
        if lora is None:
            early = self._configs.programmatic_launch
            return silu_mul(y, gate_up.delta, programmatic_launch=early)
        if shrunk is None:
            return silu_mul_lora(y, lora, self._configs.fused(gate_up.phase, len(y)))
        return silu_mul_lora(y, lora, self._configs.fused_shrink(len(y)), shrunk)
