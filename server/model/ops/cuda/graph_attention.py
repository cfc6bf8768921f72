"""Inputs of the attention of captured steps with prompts: at fixed places, filled for each step.

In such a step prompts come before decodes, the other way round than outside graphs: FlashInfer's
first token is always a prompt's.
"""

import numpy as np
import torch

from loraplex.server.kernels.attention.decode_work import WorkLayout
from loraplex.server.model.ops.attention.attention_cuda import Attention, decode_views
from loraplex.server.model.ops.attention.prompt_attention import PromptAttention
from loraplex.server.model.ops.cuda.ops_cuda import CudaOps, CudaPlan
from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.spec.latent_spec import LatentSpec

_ALL = slice(0, None)


class GraphAttention:
    """Attention whose inputs lie where graphs read them. most_tokens: of a graph; most_decodes: of
    a step. attended: flat, where each layer's result lies, `[tokens, heads * head_dim]`.
    """

    def __init__(
        self,
        ops: CudaOps,
        prompts: PromptAttention,
        page_table: torch.Tensor,
        most_tokens: int,
        most_decodes: int,
    ) -> None:
        self._ops, self._prompts, self._page_table = ops, prompts, page_table
        self._most_decodes = most_decodes
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
