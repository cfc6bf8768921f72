"""Attention of a step: decodes by the project's own kernel, prompts by FlashInfer's.

A plan is made on the host from lengths that the host knows; page lists are gathered on the device.
"""

from dataclasses import dataclass
from math import isclose

import numpy as np
import torch

from server.kernels.attention.decode_attention import (
    DecodeBatchView,
    DecodeItems,
    DecodeScratch,
    cut_contexts,
    decode_attention,
    max_items,
)
from server.kernels.lora.pending import PendingDelta
from server.model.ops.ops import KVCache, StepLayout
from server.model.ops.prompt_attention import PromptAttention
from server.model.ops.transfers import to_device
from server.model.spec import LayerSpec, ModelSpec, RopeSpec

_HEAD_DIMS = (64, 128, 256)


def prompt_backend(capability: tuple[int, int]) -> str:
    """Of FlashInfer's for this compute capability; graphs can launch "fa3" alone, for what the
    other launches depends on the plan."""
    return "fa3" if capability == (9, 0) else "fa2"


def unsupported(model: ModelSpec, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
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
    return next(filter(None, map(_other_maths, set(model.layers))), _other_ropes(model))


def _other_maths(layer: LayerSpec) -> str | None:
    """What of a layer the kernels do not compute."""
    attention = layer.attention
    if attention.softcap is not None:
        return "a soft cap on attention's scores is left to the reference attention"
    if not isclose(attention.scale, attention.head_dim**-0.5):
        return f"attention's scale of {attention.scale:g} is left to the reference attention"
    if attention.norms_all_heads:
        return "norms of q and k over all heads are left to the reference attention"
    if attention.q_scale is not None:
        return "a scale of q by position is left to the reference attention"
    if layer.mlp.activation != "silu":
        return f"the activation {layer.mlp.activation} is left to the reference operations"
    return None


def _other_ropes(model: ModelSpec) -> str | None:
    ropes = {layer.attention.rope for layer in model.layers}
    if len(ropes) > 1 or None in ropes:
        return "rotation that differs between layers is left to the reference attention"
    return next(filter(None, map(_other_rope, ropes)), None)


def _other_rope(rope: RopeSpec | None) -> str | None:
    if rope is None:
        return None
    if rope.rotary_dim is not None:
        return "rotation of a part of each head is left to the reference attention"
    if rope.interleaved:
        return "rotation of neighbouring pairs is left to the reference attention"
    if rope.long_factors:
        return (
            "rotation by the length of a sequence is left to the reference attention; with a"
            f" --max-context of at most {rope.original_context} the model has none"
        )
    return None


@dataclass(frozen=True, slots=True)
class Attention:
    """decodes, prompts: which tokens of the flat batch they are; None where a step has none. In
    steps with prompts that a graph computes both are all, and what is planned says which."""

    decodes: slice
    decode: DecodeBatchView | None
    prompts: slice
    prefill: PromptAttention | None


class PagedAttention:
    """Owns the scratch memory. One step at a time is planned; several may be in flight."""

    def __init__(
        self,
        model: ModelSpec,
        cache: KVCache,
        prefill_backend: str,
        most_decodes: int,
        most_rows: int,
    ) -> None:
        """prefill_backend: see `prompt_backend`. most_decodes: of a flat batch, with what pads
        them. most_rows: as many, or of all rows of a batch that a graph takes."""
        self.model = model
        self.cache = cache
        self.device = cache.k.device
        heads, head_dim = model.num_heads, model.head_dim
        self._scratch = DecodeScratch(most_decodes, heads, head_dim, self.device, most_rows)
        capability = torch.cuda.get_device_capability(self.device)
        self._programmatic_launch = capability >= (9, 0)
        self._prompts = PromptAttention(model, cache, prefill_backend)

    def plan(self, layout: StepLayout) -> Attention:
        """Of a step outside graphs: decodes are its first tokens."""
        n = layout.num_decodes
        decode = prefill = None
        if n:
            decode = self._plan_decodes(layout, n)
        if n < len(layout.num_new):
            prefill = self._prompts
            prefill.plan(*layout.prompts, layout.page_table)
        return Attention(slice(n), decode, slice(n, None), prefill)

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
        norm = (weights, self.model.layers[layer].attention.qk_epsilon)
        context = (batch, pages, cos_sin, norm, self._scratch, out)
        decode_attention(qkv, pending, *context, programmatic_launch=self._programmatic_launch)

    def _plan_decodes(self, layout: StepLayout, decodes: int) -> DecodeBatchView:
        packed = np.zeros((3, max_items(decodes)), dtype=np.int32)
        packed[2, 0] = cut_contexts(layout.starts[:decodes] + 1, packed[:2])
        work = to_device(packed, self.device)
        rows = to_device(layout.seq_rows[:decodes].astype(np.int32), self.device)
        items = DecodeItems(work[:2], work[2, :1])
        return DecodeBatchView(rows, layout.positions[:decodes], layout.page_table, items)
