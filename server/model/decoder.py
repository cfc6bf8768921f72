"""The decoder: one forward over a flat batch of tokens, for every model of the Llama kind."""

from typing import Generic, TypeVar

import torch

from server.model.config import ModelConfig
from server.model.lora import SiteIndex
from server.model.ops import Ops
from server.model.weights import LayerWeights, ModelWeights

P = TypeVar("P")
L = TypeVar("L")
Y = TypeVar("Y")


class Decoder(Generic[P, L, Y]):
    """Llama 2 and 3, Mistral, Qwen2, Qwen3: what differs is in the configuration."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, sites: SiteIndex, ops: Ops[P, L, Y]
    ) -> None:
        self.config = config
        self.weights = weights
        self.sites = sites
        self.ops = ops

    def forward(self, token_ids: torch.Tensor, plan: P, lora: L | None) -> torch.Tensor:
        """token_ids: int64 `[tokens]`, in the plan's order -> normed hidden states `[tokens,
        hidden]`. Writes the tokens' keys and values."""
        ops, epsilon = self.ops, self.config.rms_norm_eps
        layers = self.weights.layers
        hidden = ops.embed(token_ids, self.weights.embed, lora, self.sites.embed)
        normed = ops.rms_norm(hidden, layers[0].input_norm, epsilon)
        next_norms = [*(layer.input_norm for layer in layers[1:]), self.weights.norm]
        for layer, (weights, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            delta = self._attention(layer, weights, normed, plan, lora)
            normed, hidden = ops.add_norm(delta, hidden, weights.post_norm, epsilon)
            delta = self._mlp(layer, weights, normed, lora)
            normed, hidden = ops.add_norm(delta, hidden, next_norm, epsilon)
        return normed

    def logits(self, normed: torch.Tensor, lora: L | None) -> torch.Tensor:
        """Some rows of `forward`'s result `[rows, hidden]` -> `[rows, vocab]`. lora: of them."""
        return self.ops.logits(normed, self.weights.lm_head, lora, self.sites.lm_head)

    def _attention(
        self, layer: int, weights: LayerWeights, x: torch.Tensor, plan: P, lora: L | None
    ) -> Y:
        ops, site = self.ops, self.sites.layer(layer)
        qkv = ops.linear(x, weights.qkv, weights.qkv_bias, lora, site)
        attended = ops.attend(plan, layer, qkv, weights.qk_norm)
        return ops.linear(attended, weights.o, weights.o_bias, lora, site + 1)

    def _mlp(self, layer: int, weights: LayerWeights, x: torch.Tensor, lora: L | None) -> Y:
        ops, site = self.ops, self.sites.layer(layer)
        gate_up = ops.linear(x, weights.gate_up, weights.gate_up_bias, lora, site + 2)
        inner = ops.silu_mul(gate_up)
        return ops.linear(inner, weights.down, weights.down_bias, lora, site + 3)
