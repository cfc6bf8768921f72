"""Attention of a step: decodes by the project's own kernel, prompts by `PromptAttention`.

A plan is made on the host from lengths that the host knows; page lists are gathered on the device.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from loraplex.server.kernels.attention.decode_attention import (
    DecodeBatchView,
    DecodeScratch,
    LayerScores,
    decode_attention,
)
from loraplex.server.kernels.attention.decode_work import DecodeItems, WorkLayout
from loraplex.server.kernels.attention.latent_attention import latent_decodes
from loraplex.server.kernels.attention.rope_append import QkNorm, Rotation
from loraplex.server.kernels.lora.pending import PendingDelta
from loraplex.server.model.ops.attention.prompt_attention import (
    ONE_KERNEL,
    PromptAttention,
    cache_pages,
)
from loraplex.server.model.ops.attention.score_rules import distinct_windows, score_rules
from loraplex.server.model.ops.ops import KVCache, StepLayout
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.spec.model_spec import ModelSpec


def prompt_backend(capability: tuple[int, int]) -> str:
    """The backend of FlashInfer for this compute capability."""
    return "fa3" if capability == (9, 0) else "fa2"


@dataclass(frozen=True, slots=True)
class Attention:
    """Preparation of a step's attention on a GPU. decodes, prompts: which tokens of the flat batch
    they are; None where a step has none. decode: for each group of layers. In steps with prompts
    that a graph computes both are all, and what is planned says which.
    """

    decodes: slice
    decode: tuple[DecodeBatchView, ...] | None
    prompts: slice
    prefill: PromptAttention | None


# Of a step without pages.
NOTHING = Attention(slice(0), None, slice(0), None)


class PagedAttention:
    """Compute attention over paged keys and values. Owns the scratch memory. One step at a time is
    planned; several may be in flight.
    """

    def __init__(
        self,
        model: ModelSpec,
        cache: KVCache,
        prefill_backend: str,
        most_decodes: int,
        most_rows: int,
    ) -> None:
        """Allocate scratch, and choose the kernels. prefill_backend: see `prompt_backend`, or
        ONE_KERNEL. most_decodes: of a flat batch, with what pads them. most_rows: as many, or of
        all rows of a batch that a graph takes.
        """
        self.model = model
        self.cache = cache
        self.is_one_kernel = prefill_backend == ONE_KERNEL
        self.device = cache.pool.device
        attentions = model.attentions.values()
        heads = max((a.num_heads for a in attentions), default=1)
        widest = heads, max((a.head_dim for a in attentions), default=16)
        self._scratch = DecodeScratch(most_decodes, *widest, self.device, most_rows)
        capability = torch.cuda.get_device_capability(self.device)
        self._programmatic_launch = capability >= (9, 0)
        self._prompts = PromptAttention(model, cache, prefill_backend)
        self._windows = distinct_windows(model)
        self._scores = {
            layer: LayerScores(rule, self._windows.index(rule.window))
            for layer, rule in score_rules(model, self.device).items()
        }

    def work(self, batch: int) -> WorkLayout:
        """The layout of work for at most `batch` decodes."""
        return WorkLayout(self._windows, batch)

    def plan(self, layout: StepLayout, turns: torch.Tensor | None) -> Attention:
        """Plan a step outside graphs, whose decodes come first. turns: `Rotations.turns`."""
        n = layout.num_decodes
        decode = prefill = None
        if n:
            decode = self._plan_decodes(layout, n, turns)
        if n < len(layout.num_new):
            prefill = self._prompts
            prefill.plan(layout)
        return Attention(slice(n), decode, slice(n, None), prefill)

    def decode(
        self,
        batch: tuple[DecodeBatchView, ...],
        layer: int,
        qkv: torch.Tensor,
        pending: PendingDelta | None,
        rotation: tuple[Rotation, QkNorm | None],
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Compute attention of decodes in one layer. batch: for each group of layers. rotation:
        behind the norm of q and k; the rest as in `decode_attention`.
        """
        scores = self._scores[layer]
        if sinks is not None:
            scores = replace(scores, sinks=sinks)
        view = batch[self.cache.groups.group(layer)]
        context = (view, cache_pages(self.cache, layer), *rotation, scores, self._scratch, out)
        decode_attention(qkv, pending, *context, programmatic_launch=self._programmatic_launch)

    def decode_latents(
        self, batch: tuple[DecodeBatchView, ...], layer: int, q: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Compute attention of decodes to latents, as `latent_decodes` does. batch: for each group
        of layers."""
        view, pages = batch[self.cache.groups.group(layer)], self.cache.of(layer)[0]
        context = (view, pages, self._scores[layer], self._scratch, out)
        latent_decodes(q, *context, programmatic_launch=self._programmatic_launch)

    def _plan_decodes(
        self, layout: StepLayout, decodes: int, turns: torch.Tensor | None
    ) -> tuple[DecodeBatchView, ...]:
        work = self.work(decodes)
        packed = np.zeros(work.length, dtype=np.int32)
        work.cut(layout.starts[:decodes] + 1, packed)
        items = work.items(to_device(packed, self.device))
        rows = to_device(layout.seq_rows[:decodes].astype(np.int32), self.device)
        turns = None if turns is None else turns[:decodes]
        return decode_views(rows, layout.positions[:decodes], layout.page_table, items, turns)


def decode_views(
    rows: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    work: tuple[DecodeItems, ...],
    turns: torch.Tensor | None,
) -> tuple[DecodeBatchView, ...]:
    """Return views of a decode batch. One for each group of layers. page_table: int64 `[groups,
    rows, pages a row]`; the rest as of `DecodeBatchView`.
    """
    return tuple(DecodeBatchView(rows, positions, table, work, turns) for table in page_table)
