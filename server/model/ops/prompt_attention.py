"""Attention of prompts on a GPU, launched as it comes or from a CUDA graph.

FlashInfer has one compiled module for each combination of windows and soft caps, of which some take
minutes to compile where the user starts the server, and none for sinks and most head sizes. So one
of its modules is used, for layers that see their whole context, and the project's own kernel for
all others. `docs/internals/prompt-attention.md` says more.
"""

from typing import Literal

import torch

from loraplex.server.model.ops.flashinfer_prompts import FlashInferPrompts
from loraplex.server.model.ops.ops import KVCache, StepLayout
from loraplex.server.model.ops.sizes import PromptRoom
from loraplex.server.model.ops.tiled_prompts import TiledPrompts
from loraplex.server.model.spec.model_spec import AttentionSpec, ModelSpec

PromptKernel = Literal["FlashInfer", "Triton"]
_FLASHINFER_HEADS = (64, 128, 256)


def prompt_kernel(attention: AttentionSpec, *, fp8_cache: bool = False) -> PromptKernel:
    """Which computes a layer's attention of prompts. FlashInfer's module reads no FP8."""
    if fp8_cache:
        return "Triton"
    is_plain = attention.window is None and attention.softcap is None and not attention.sinks
    if is_plain and attention.head_dim in _FLASHINFER_HEADS:
        return "FlashInfer"
    return "Triton"


def prompt_kernels(model: ModelSpec, *, fp8_cache: bool = False) -> tuple[PromptKernel, ...]:
    """The kernel of each layer."""
    return tuple(prompt_kernel(layer.attention, fp8_cache=fp8_cache) for layer in model.layers)


def prompts_in_graphs(model: ModelSpec, backend: str, *, fp8_cache: bool = False) -> bool:
    """backend: FlashInfer's, of which graphs can launch "fa3" alone: for what the other launches
    depends on the plan."""
    return backend == "fa3" or "FlashInfer" not in prompt_kernels(model, fp8_cache=fp8_cache)


class PromptAttention:
    """Owns its workspace. One step at a time is planned; several may be in flight."""

    def __init__(
        self, model: ModelSpec, cache: KVCache, backend: str, captured: PromptRoom | None = None
    ) -> None:
        """backend: FlashInfer's. captured: a graph launches it, the first plan is of the most
        tokens, all are of one page table, and of at most MAX_PROMPTS."""
        self._kernels = prompt_kernels(model, fp8_cache=cache.is_fp8)
        self._plans: dict[PromptKernel, FlashInferPrompts | TiledPrompts] = {}
        if "FlashInfer" in self._kernels:
            self._plans["FlashInfer"] = FlashInferPrompts(model, cache, backend, captured)
        if "Triton" in self._kernels:
            self._plans["Triton"] = TiledPrompts(model, cache, captured)

    def plan(self, layout: StepLayout) -> None:
        """Plan the layout's prompts, whose tokens follow one another from the first on in `run`'s
        input.
        """
        for plan in self._plans.values():
            plan.plan(layout)

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """q, out: `[tokens, heads, head_dim]`; keys and values are in their pages. sinks: float32
        `[heads]`."""
        self._plans[self._kernels[layer]].run(layer, q, out, sinks)
