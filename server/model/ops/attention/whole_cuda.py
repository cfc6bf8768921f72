"""Attention of whole texts on a GPU, for models whose tokens see all others."""

from dataclasses import dataclass

import torch

from loraplex.server.kernels.attention.whole_attention import cut_texts, whole_attention
from loraplex.server.model.ops.attention.score_rules import score_rules
from loraplex.server.model.ops.ops import StepLayout
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.ops.turned_heads import HeadTurns, StepTurns, turned_heads
from loraplex.server.model.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class WholeTexts:
    """Preparation of a step's attention. tiles: as of `cut_texts`."""

    tiles: torch.Tensor
    turns: StepTurns


class WholeAttention:
    """Computes attention of texts, each of which is one slice. It keeps nothing."""

    def __init__(
        self,
        model: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        biases: torch.Tensor | None,
    ) -> None:
        """Prepare the rotations and rules of a model's layers. biases: as of ModelWeights."""
        self._model, self._device, self._biases = model, device, biases
        self._turns, self._rules = HeadTurns(model, dtype, device), score_rules(model, device)

    def plan(self, layout: StepLayout) -> WholeTexts:
        """Prepare the attention of a step."""
        return self.of(to_device(cut_texts(layout.num_new), self._device), layout)

    def of(self, tiles: torch.Tensor, layout: StepLayout) -> WholeTexts:
        """Prepare the attention of tiles. layout: of their tokens on the device alone."""
        return WholeTexts(tiles, self._turns.of(layout))

    def run(
        self,
        texts: WholeTexts | None,
        layer: int,
        qkv: torch.Tensor,
        qk_norm: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one layer's attention, as `Ops.attend` does. texts: that `plan` gave. out:
        `[tokens, heads * head_dim]`, contiguous, which is returned."""
        if texts is None:
            raise TypeError("a plan without texts")
        spec = self._model.layers[layer].attention
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        if spec.rope is not None or qk_norm is not None or spec.q_scale is not None:
            heads = torch.cat(turned_heads(spec, qkv, qk_norm, texts.turns), dim=1)
        counts = spec.num_heads, spec.num_kv_heads
        whole_attention(heads, counts, texts.tiles, self._rules[layer], self._biases, out)
        return out
