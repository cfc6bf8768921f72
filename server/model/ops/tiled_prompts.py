"""The project's own attention of prompts: any window, soft cap, sinks and head size."""

import numpy as np
import torch

from loraplex.server.kernels.attention.prompt_attention import (
    TILE_COLUMNS,
    cut_prompts,
    max_tiles,
    prompt_attention,
    tile_shape,
)
from loraplex.server.model.ops.cache_pages import cache_pages
from loraplex.server.model.ops.ops import KVCache, StepLayout
from loraplex.server.model.ops.score_rules import score_rules
from loraplex.server.model.ops.sizes import MAX_PROMPTS, PromptRoom
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.spec.model_spec import ModelSpec


class TiledPrompts:
    """One plan serves all layers. One step at a time is planned; several may be in flight."""

    def __init__(self, model: ModelSpec, cache: KVCache, captured: PromptRoom | None) -> None:
        """captured: a graph launches it."""
        self._cache, self._device = cache, cache.k.device
        group = model.num_heads // model.num_kv_heads
        capability = torch.cuda.get_device_capability(self._device)
        self._shape = tile_shape(group, model.head_dim, capability)
        self._rules = score_rules(model)
        self._captured = captured is not None
        room = self._most_tiles(captured.tokens) if captured is not None else 0
        self._tiles = torch.zeros(room, TILE_COLUMNS, dtype=torch.int32, device=self._device)
        self._page_table = torch.zeros(0, 0, 0, dtype=torch.int64, device=self._device)

    def _most_tiles(self, tokens: int) -> int:
        """Plan a captured step."""
        return max_tiles(tokens, MAX_PROMPTS, self._shape)

    def plan(self, layout: StepLayout) -> None:
        """As of `PromptAttention`."""
        self._page_table = layout.page_table
        tiles = cut_prompts(*layout.prompts, self._shape.tokens)
        if self._captured:  # what pads has no tokens
            tiles = np.pad(tiles, ((0, len(self._tiles) - len(tiles)), (0, 0)))
            self._tiles.copy_(to_device(tiles, self._device))
        else:
            self._tiles = to_device(tiles, self._device)

    def run(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None
    ) -> None:
        """As of `PromptAttention`."""
        tiles = self._tiles
        if self._captured:
            tiles = tiles[: self._most_tiles(len(q))]
        page_table = self._page_table[self._cache.groups.group(layer)]
        context = (page_table, tiles, self._shape, self._rules[layer], sinks)
        prompt_attention(q, cache_pages(self._cache, layer), *context, out)
