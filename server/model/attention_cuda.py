"""Attention of a step: decodes by the project's own kernel, prompts by FlashInfer's.

A plan is made on the host from lengths that the host knows; page lists are gathered on the device.
"""

from dataclasses import dataclass
from typing import Any

import flashinfer
import numpy as np
import torch

from server.kernels.decode_attention import (
    DecodeBatchView,
    DecodeItems,
    DecodeScratch,
    cut_contexts,
    decode_attention,
    max_items,
)
from server.kernels.decode_inputs import gather_pages
from server.kernels.pending import PendingDelta
from server.model.config import ModelConfig
from server.model.ops import KVCache, StepLayout
from server.model.transfers import to_device

_WORKSPACE_BYTES = 256 << 20
_INT_WORKSPACE_BYTES = 8 << 20
# A plan's upload may still be on its way while the next is made.
_PLAN_BUFFERS = 3
_HEAD_DIMS = (64, 128, 256)


def unsupported(model: ModelConfig, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Why FlashInfer cannot serve this model on a device of this compute capability, or None."""
    if capability < (8, 0):
        found = ".".join(map(str, capability))
        return f"FlashInfer needs compute capability 8.0, this GPU has {found}"
    if dtype == torch.float32:
        return "FlashInfer computes in bfloat16 and float16, not in float32"
    if model.head_dim not in _HEAD_DIMS:
        return f"FlashInfer has head sizes {_HEAD_DIMS}, the model {model.head_dim}"
    windows = [window for window in model.windows if window is not None]
    if windows:
        return (
            "sliding windows are left to the reference attention; with a --max-context of at most"
            f" {min(windows)} the model has none"
        )
    return None


@dataclass(frozen=True, slots=True)
class Attention:
    """Decodes are the first `num_decodes` tokens; None where a step has no such slices."""

    num_decodes: int
    decode: DecodeBatchView | None
    prefill: Any


class PagedAttention:
    """Owns the scratch memory. One step at a time is planned; several may be in flight."""

    def __init__(self, model: ModelConfig, cache: KVCache, max_decodes: int) -> None:
        """max_decodes: of a step, the padding of graphs included."""
        self.model = model
        self.cache = cache
        self.device = cache.k.device
        self._scratch = DecodeScratch(max_decodes, model.num_heads, model.head_dim, self.device)
        capability = torch.cuda.get_device_capability(self.device)
        self._programmatic_launch = capability >= (9, 0)
        self.prefill_backend = "fa3" if capability == (9, 0) else "fa2"
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._pinned = [
            torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True)
            for _ in range(_PLAN_BUFFERS)
        ]
        self._plans = 0
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend=self.prefill_backend
        )

    def plan(self, layout: StepLayout) -> Attention:
        """Of a step outside graphs."""
        decodes = int((layout.num_new == 1).sum())
        decode = prefill = None
        if decodes:
            decode = self._plan_decodes(layout, decodes)
        if decodes < len(layout.num_new):
            prefill = self._plan_prompts(layout, decodes)
        return Attention(decodes, decode, prefill)

    def decode(
        self,
        batch: DecodeBatchView,
        layer: int,
        qkv: torch.Tensor,
        pending: PendingDelta | None,
        rotation: tuple[torch.Tensor, torch.Tensor | None],
        out: torch.Tensor,
    ) -> None:
        """rotation: cosines and sines, and the weights of q's and k's norm; the rest as in
        `decode_attention`."""
        cos_sin, weights = rotation
        pages = (self.cache.k[layer], self.cache.v[layer])
        norm = (weights, self.model.rms_norm_eps)
        context = (batch, pages, cos_sin, norm, self._scratch, out)
        decode_attention(qkv, pending, *context, programmatic_launch=self._programmatic_launch)

    def prefill(self, plan: Any, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """q, out: `[tokens, heads, head_dim]`; keys and values are in their pages."""
        plan.run(q, (self.cache.k[layer], self.cache.v[layer]), out=out)

    def _plan_decodes(self, layout: StepLayout, decodes: int) -> DecodeBatchView:
        packed = np.zeros((3, max_items(decodes)), dtype=np.int32)
        packed[2, 0] = cut_contexts(layout.starts[:decodes] + 1, packed[:2])
        work = to_device(packed, self.device)
        rows = to_device(layout.seq_rows[:decodes].astype(np.int32), self.device)
        items = DecodeItems(work[:2], work[2, :1])
        return DecodeBatchView(rows, layout.positions[:decodes], layout.page_table, items)

    def _plan_prompts(self, layout: StepLayout, decodes: int) -> Any:
        size, dtype, model = self.cache.page_size, self.cache.k.dtype, self.model
        num_new = layout.num_new[decodes:]
        contexts = layout.starts[decodes:] + num_new
        counts = -(-contexts // size)
        indptr = _pinned_indptr(counts)
        last = torch.from_numpy((contexts - (counts - 1) * size).astype(np.int32)).pin_memory()
        pages = torch.empty(int(counts.sum()), dtype=torch.int32, device=self.device)
        rows = to_device(layout.seq_rows[decodes:], self.device)
        on_device = indptr.to(self.device, non_blocking=True)
        gather_pages(rows, on_device, layout.page_table, pages)
        self._plans += 1
        # Its upload goes by way of pinned memory that no plan in flight uses.
        wrapper = self._prefill
        wrapper._pin_memory_int_workspace_buffer = self._pinned[self._plans % _PLAN_BUFFERS]
        heads = (model.num_heads, model.num_kv_heads, model.head_dim, size)
        types = {"q_data_type": dtype, "kv_data_type": dtype}
        wrapper.plan(_pinned_indptr(num_new), indptr, pages, last, *heads, causal=True, **types)
        return wrapper


def _pinned_indptr(counts: np.ndarray) -> torch.Tensor:
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    return torch.from_numpy(indptr).pin_memory()
