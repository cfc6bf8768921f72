"""The GPU's set of ops: FlashInfer, cuBLAS, and the project's own Triton kernels."""

from dataclasses import dataclass

import flashinfer
import numpy as np
import torch
from torch.nn import functional

from server.kernels.configs import KernelConfigs, Phase, load_configs
from server.kernels.expand import expand
from server.kernels.rope_append import rope_append
from server.kernels.segments import Segments, allocate_segments, route
from server.kernels.shrink import gather_embedding, shrink
from server.kernels.table import MAX_RANK
from server.kernels.workspace import Workspace, allocate_workspace
from server.model.attention_cuda import Attention, PagedAttention
from server.model.config import ModelConfig
from server.model.lora import AdapterTable
from server.model.ops import KVCache, StepLayout
from server.model.rope import cos_sin, inverse_frequencies

# Up to so many tokens LoRA is memory-bound: a program takes few rows, and inputs are split.
MAX_DECODE_ROWS = 256


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """positions, slots (page * page_size + offset): int64 `[tokens]`."""

    positions: torch.Tensor
    slots: torch.Tensor
    attention: Attention


@dataclass(frozen=True, slots=True)
class DeviceLora:
    """Adapters of a batch, routed on the device. model_sites: whether one of them changes the
    embedding or the head; then token_ids of the batch are gathered too."""

    segments: Segments
    workspace: Workspace
    phase: Phase
    model_sites: bool


class CudaOps:
    """Implements `server.model.ops.Ops` in bfloat16 and float16 with float32 accumulation."""

    def __init__(
        self,
        model: ModelConfig,
        cache: KVCache,
        table: AdapterTable,
        attention: PagedAttention,
        limits: tuple[int, int],
    ) -> None:
        """limits: the longest context, and the most tokens of a step."""
        max_context, max_tokens = limits
        self.model = model
        self.cache = cache
        self.table = table
        self._attention = attention
        self.device = cache.k.device
        self._configs: KernelConfigs = load_configs(self.device)
        self._side = torch.cuda.Stream(self.device)
        inv_freq = inverse_frequencies(model.rope, model.head_dim, self.device)
        places = torch.arange(max_context, device=self.device)
        angles = cos_sin(places, inv_freq, model.rope.attention_factor)
        self._cos_sin = torch.cat(angles, dim=-1).squeeze(1).contiguous()
        self._workspaces: dict[Phase, Workspace] = {
            "decode": self._workspace("decode", MAX_DECODE_ROWS),
            "prefill": self._workspace("prefill", max_tokens),
        }

    def _workspace(self, phase: Phase, rows: int) -> Workspace:
        split = self._configs.max_split_k if phase == "decode" else 1
        return allocate_workspace(rows, self.cache.k.dtype, self.device, split)

    # ---- once a step

    def plan(self, layout: StepLayout) -> CudaPlan:
        size = self.cache.page_size
        pages = layout.page_table[layout.token_rows, layout.positions // size]
        slots = pages * size + layout.positions % size
        return CudaPlan(layout.positions, slots, self._attention.plan(layout))

    def lora(self, token_slots: np.ndarray) -> DeviceLora | None:
        if not token_slots.size or token_slots.max() < 0:
            return None
        host = torch.from_numpy(token_slots.astype(np.int32)).pin_memory()
        lora = self.allocate_lora(len(host), bool(self.table.changes_model(token_slots)))
        route(host.to(self.device, non_blocking=True), lora.segments)
        return lora

    def allocate_lora(self, rows: int, model_sites: bool) -> DeviceLora:
        """For `rows` tokens; not routed yet."""
        phase: Phase = "decode" if rows <= MAX_DECODE_ROWS else "prefill"
        slots = self.table.device_table.num_slots
        segments = allocate_segments(rows, self._configs.tile_rows(phase, rows), slots, self.device)
        return DeviceLora(segments, self._workspaces[phase], phase, model_sites)

    # ---- operations

    def embed(
        self, token_ids: torch.Tensor, weight: torch.Tensor, lora: DeviceLora | None, site: int
    ) -> torch.Tensor:
        y = functional.embedding(token_ids, weight)
        if lora is not None and lora.model_sites:
            ids = token_ids.to(torch.int32)
            table = self.table.device_table
            gather_embedding(ids, table, site, lora.segments, lora.workspace)
            self._expand(y, lora, site, after_gemm=False)
        return y

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lora: DeviceLora | None,
        site: int,
    ) -> torch.Tensor:
        if lora is None or (site >= self.table.sites.embed and not lora.model_sites):
            return functional.linear(x, weight, bias)
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            config = self._configs.shrink(lora.phase, len(x), MAX_RANK, x.shape[1])
            table = self.table.device_table
            shrink(x, table, site, lora.segments, lora.workspace, config)
        y = functional.linear(x, weight, bias)
        main.wait_stream(self._side)
        self._expand(y, lora, site, after_gemm=True)
        return y

    def _expand(self, y: torch.Tensor, lora: DeviceLora, site: int, *, after_gemm: bool) -> None:
        widths = self.table.sites.widths(site)
        config = self._configs.expand(lora.phase, len(y), MAX_RANK, sum(widths))
        table = self.table.device_table
        segments, workspace = lora.segments, lora.workspace
        expand(y, widths, table, site, segments, workspace, config, after_gemm=after_gemm)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        normed: torch.Tensor = flashinfer.rmsnorm(x, weight, epsilon)
        return normed

    def add_norm(
        self, delta: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flashinfer.fused_add_rmsnorm(delta, hidden, weight, epsilon)
        return delta, hidden

    def rotate_store(
        self, plan: CudaPlan, layer: int, qkv: torch.Tensor, qk_norm: torch.Tensor | None
    ) -> torch.Tensor:
        k, v = self.cache.k[layer], self.cache.v[layer]
        epsilon = self.model.rms_norm_eps
        return rope_append(qkv, self._cos_sin, plan.positions, plan.slots, k, v, qk_norm, epsilon)

    def attention(self, plan: CudaPlan, layer: int, q: torch.Tensor) -> torch.Tensor:
        return self._attention.run(plan.attention, layer, q).flatten(1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        activated: torch.Tensor = flashinfer.silu_and_mul(gate_up)
        return activated
