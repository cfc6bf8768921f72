"""The decoder: one forward over a flat batch of tokens, for every model of the Llama kind."""

from typing import Generic, TypeVar

import torch

from server.model.config import ModelConfig
from server.model.lora import LoraBatch, SiteIndex
from server.model.ops import Ops, StepLayout
from server.model.rope import cos_sin, inverse_frequencies
from server.model.weights import LayerWeights, ModelWeights

P = TypeVar("P")


class Decoder(Generic[P]):
    """Llama 2 and 3, Mistral, Qwen2, Qwen3: what differs is in the configuration."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, sites: SiteIndex, ops: Ops[P]
    ) -> None:
        self.config = config
        self.weights = weights
        self.sites = sites
        self.ops = ops
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim, weights.embed.device)

    def forward(
        self, token_ids: torch.Tensor, layout: StepLayout, lora: LoraBatch | None
    ) -> torch.Tensor:
        """token_ids: int64 `[tokens]`, in the layout's order -> hidden states `[tokens, hidden]`
        before the last norm. Writes the tokens' keys and values."""
        plan = self.ops.plan(layout)
        rope = cos_sin(layout.positions, self._inv_freq, self.config.rope.attention_factor)
        hidden = self.ops.embed(token_ids, self.weights.embed, lora, self.sites.embed)
        for layer, weights in enumerate(self.weights.layers):
            hidden = hidden + self._attention(layer, weights, hidden, plan, rope, lora)
            hidden = hidden + self._mlp(layer, weights, hidden, lora)
        return hidden

    def logits(self, hidden: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        """Some rows of `forward`'s result `[rows, hidden]` -> float32 `[rows, vocab]`. lora: of
        those rows."""
        normed = self.ops.rms_norm(hidden, self.weights.norm, self.config.rms_norm_eps)
        head = self.ops.linear(normed, self.weights.lm_head, None, lora, self.sites.lm_head)
        return head.float()

    def _attention(
        self,
        layer: int,
        weights: LayerWeights,
        hidden: torch.Tensor,
        plan: P,
        rope: tuple[torch.Tensor, torch.Tensor],
        lora: LoraBatch | None,
    ) -> torch.Tensor:
        config, ops, site = self.config, self.ops, self.sites.layer(layer)
        x = ops.rms_norm(hidden, weights.input_norm, config.rms_norm_eps)
        qkv = ops.linear(x, weights.qkv, weights.qkv_bias, lora, site)
        heads = qkv.view(len(qkv), -1, config.head_dim)
        rotated_heads = config.num_heads + config.num_kv_heads
        qk, v = heads[:, :rotated_heads], heads[:, rotated_heads:]
        if weights.qk_norm is not None:
            qk = ops.rms_norm(qk, weights.qk_norm, config.rms_norm_eps)
        qk = ops.rotate(qk, *rope)
        ops.store_kv(plan, layer, qk[:, config.num_heads :], v)
        window = config.windows[layer]
        attended = ops.attention(plan, layer, qk[:, : config.num_heads], window)
        return ops.linear(attended, weights.o, weights.o_bias, lora, site + 1)

    def _mlp(
        self, layer: int, weights: LayerWeights, hidden: torch.Tensor, lora: LoraBatch | None
    ) -> torch.Tensor:
        ops, site = self.ops, self.sites.layer(layer)
        x = ops.rms_norm(hidden, weights.post_norm, self.config.rms_norm_eps)
        gate_up = ops.linear(x, weights.gate_up, weights.gate_up_bias, lora, site + 2)
        inner = ops.silu_mul(gate_up)
        return ops.linear(inner, weights.down, weights.down_bias, lora, site + 3)
