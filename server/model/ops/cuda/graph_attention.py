"""Inputs of the attention of captured steps with prompts, or of texts: at fixed places, filled for
each step.

In a step with prompts these come before decodes, the other way round than outside graphs:
FlashInfer's first token is always a prompt's.
"""

from dataclasses import replace

import numpy as np
import torch

from loraplex.server.kernels.attention.decode_work import WorkLayout
from loraplex.server.kernels.attention.whole_attention import TILE_TOKENS, cut_texts
from loraplex.server.model.ops.attention.attention_cuda import NOTHING, Attention, decode_views
from loraplex.server.model.ops.attention.prompt_attention import PromptAttention
from loraplex.server.model.ops.attention.whole_cuda import WholeAttention
from loraplex.server.model.ops.cuda.ops_cuda import CudaOps, CudaPlan
from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.spec.latent_spec import LatentSpec

_ALL = slice(0, None)


class GraphAttention:
    """Attention whose inputs lie where graphs read them. most_tokens: of a graph; most_decodes,
    most_prompts: of a step. attended: flat, where each layer's result lies, `[tokens, heads *
    head_dim]`.
    """

    def __init__(
        self,
        ops: CudaOps,
        prompts: PromptAttention,
        page_table: torch.Tensor,
        most_tokens: int,
        most_decodes: int,
        most_prompts: int,
    ) -> None:
        self._ops, self._prompts, self._page_table = ops, prompts, page_table
        self._most_decodes, self.most_prompts = most_decodes, most_prompts
        device = ops.device
        # Positions, and rows of the rotation's tables.
        self._places = torch.zeros(2, most_tokens, dtype=torch.int64, device=device)
        slots = (len(page_table), most_tokens)
        self._kv_slots = torch.full(slots, -1, dtype=torch.int64, device=device)
        attentions = ops.model.attentions.values()
        self._keeps_all = any(isinstance(of, LatentSpec) for of in attentions)
        # What pads a step reads what earlier ones left.
        widest = max((attention.q_size for attention in attentions), default=0)
        self.attended = torch.zeros(most_tokens * widest, dtype=ops.cache.dtype, device=device)
        length = most_tokens + ops.decode_work(most_decodes).length
        self._packed = torch.zeros(length, dtype=torch.int32, device=device)

    def plan(self, size: int) -> CudaPlan:
        """Plan a graph of `size` tokens, whatever they are."""
        rows, (positions, turns) = self._packed[:size], self._places[:, :size]
        own_turns = turns if self._ops.rotations.has_turns else None
        views = None
        if not self._ops.is_batch_invariant:
            work = self._work(size).items(self._packed[size:])
            views = decode_views(rows, positions, self._page_table, work, own_turns)
        attention = Attention(_ALL, views, _ALL, self._prompts)
        return CudaPlan(positions, self._kv_slots[:, :size], attention, self.attended, own_turns)

    def fill(self, size: int, layout: StepLayout) -> None:
        """Write the inputs of a step for the next replay of the graph with this size."""
        n, tokens = layout.num_decodes, len(layout.positions)
        first = tokens - n
        turns, places = self._ops.rotations.turns(layout), layout.positions[None]
        if turns is not None and turns is not layout.positions:
            places = torch.stack((layout.positions, turns))
        self._places[:, :tokens].copy_(places.roll(-n, 1))
        # Decodes write their own keys and values, but for latents.
        slots = self._ops.kv_slots(layout)
        kept = slots.roll(-n, 1) if self._keeps_all else slots[:, n:]
        self._kv_slots[:, : kept.shape[1]].copy_(kept)
        self._kv_slots[:, kept.shape[1] : size].fill_(-1)
        packed = np.zeros(len(self._packed), dtype=np.int32)
        packed[first:tokens] = layout.seq_rows[:n]
        self._work(size).cut(layout.starts[:n] + 1, packed[size:], first)
        upload = torch.from_numpy(packed).pin_memory()
        self._packed.copy_(upload, non_blocking=True)
        self._prompts.plan(layout)

    def _work(self, size: int) -> WorkLayout:
        """The work of a graph of `size` tokens: the upload has their rows first, then this."""
        return self._ops.decode_work(min(size, self._most_decodes))


class GraphTexts:
    """Attention of whole texts, as `GraphAttention`. example: lays out the most tokens of a graph,
    and lies where graphs read each step's. most_prompts: texts of a step.
    """

    def __init__(
        self, ops: CudaOps, texts: WholeAttention, example: StepLayout, most_prompts: int
    ) -> None:
        self._texts, self._layout, self.most_prompts = texts, example, most_prompts
        most, device = len(example.positions), ops.device
        widest = max(attention.q_size for attention in ops.model.attentions.values())
        self.attended = torch.zeros(most * widest, dtype=ops.cache.dtype, device=device)
        self._tiles = torch.zeros(self._most_tiles(most), 3, dtype=torch.int32, device=device)

    def plan(self, size: int) -> CudaPlan:
        """Plan a graph of `size` tokens, whatever they are. Rotations are computed within."""
        positions, rows = self._layout.positions[:size], self._layout.token_rows[:size]
        layout = replace(self._layout, positions=positions, token_rows=rows)
        texts = self._texts.of(self._tiles[: self._most_tiles(size)], layout)
        return CudaPlan(positions, None, NOTHING, self.attended, texts=texts)

    def fill(self, size: int, layout: StepLayout) -> None:
        """Write the inputs of a step for the next replay of the graph with this size."""
        tokens, found = len(layout.positions), cut_texts(layout.num_new)
        self._layout.positions[:tokens].copy_(layout.positions)
        self._layout.token_rows[:tokens].copy_(layout.token_rows)
        tiles = np.zeros((self._most_tiles(size), found.shape[1]), dtype=np.int32)
        tiles[: len(found)] = found
        self._tiles[: len(tiles)].copy_(to_device(tiles, self._tiles.device))

    def _most_tiles(self, size: int) -> int:
        """Tiles that texts of so many tokens are cut to at most."""
        return size // TILE_TOKENS + min(size, self.most_prompts)
