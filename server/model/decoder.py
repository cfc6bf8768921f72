"""The decoder: one forward over a flat batch of tokens, for every model of the Llama kind."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from server.model.checkpoint.config import ModelConfig
from server.model.lora.sites import Sites
from server.model.ops.ops import Ops
from server.model.weights import ModelWeights

P = TypeVar("P")
L = TypeVar("L")
Y = TypeVar("Y")


@dataclass(frozen=True, slots=True)
class Wanted(Generic[L]):
    """The tokens whose result somebody needs: no others go through the end of the last layer, which
    writes no keys and values. rows: int64 `[rows]`, ascending, the last of them perhaps several
    times; lora: of these."""

    rows: torch.Tensor
    lora: L | None


class Decoder(Generic[P, L, Y]):
    """Llama 2 and 3, Mistral, Qwen2, Qwen3: what differs is in the configuration."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, sites: Sites, ops: Ops[P, L, Y]
    ) -> None:
        self.config = config
        self.weights = weights
        self.sites = sites
        self.ops = ops

    def forward(
        self,
        token_ids: torch.Tensor,
        plan: P,
        lora: L | None,
        wanted: Wanted[L] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """token_ids: int64 `[tokens]`, in the plan's order -> normed hidden states `[tokens,
        hidden]`, or `[rows, hidden]` of those wanted. Writes the tokens' keys and values.
        meanwhile: called in each layer."""
        attended, hidden = self.up_to_end(token_ids, plan, lora, meanwhile)
        if wanted is not None:
            if not len(wanted.rows):
                return hidden[:0]
            attended, hidden, lora = attended[wanted.rows], hidden[wanted.rows], wanted.lora
        return self.end(attended, hidden, lora)

    def up_to_end(
        self,
        token_ids: torch.Tensor,
        plan: P,
        lora: L | None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, up to the last layer's attention: what it attended and hidden states."""
        normed, hidden = self.begin(token_ids, lora)
        last = len(self.weights.layers) - 1
        for layer, weights in enumerate(self.weights.layers):
            site = self.sites.layers[layer].qkv
            qkv = self.ops.linear(normed, weights.qkv, weights.qkv_bias, lora, site)
            attended = self.ops.attend(plan, layer, qkv, weights.qk_norm)
            if meanwhile is not None:
                meanwhile()
            if layer < last:
                normed, hidden = self.after_attention(layer, attended, hidden, lora)
        return attended, hidden

    def end(self, attended: torch.Tensor, hidden: torch.Tensor, lora: L | None) -> torch.Tensor:
        """From the last layer's attention to normed hidden states, of any tokens."""
        return self.after_attention(len(self.weights.layers) - 1, attended, hidden, lora)[0]

    def begin(self, token_ids: torch.Tensor, lora: L | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Up to the first layer's product of q, k and v: normed and hidden states."""
        hidden = self.ops.embed(token_ids, self.weights.embed, lora, self.sites.embed)
        first = self.weights.layers[0].input_norm
        return self.ops.rms_norm(hidden, first, self.config.rms_norm_eps), hidden

    def after_attention(
        self, layer: int, attended: torch.Tensor, hidden: torch.Tensor, lora: L | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From a layer's attention to the next layer's product of q, k and v, or the end."""
        ops, epsilon, sites = self.ops, self.config.rms_norm_eps, self.sites.layers[layer]
        layers = self.weights.layers
        weights = layers[layer]
        is_last = layer + 1 == len(layers)
        next_norm = self.weights.norm if is_last else layers[layer + 1].input_norm
        delta = ops.linear(attended, weights.o, weights.o_bias, lora, sites.o)
        normed, hidden = ops.add_norm(delta, hidden, weights.post_norm, epsilon)
        gate_up = ops.linear(normed, weights.gate_up, weights.gate_up_bias, lora, sites.gate_up)
        inner = ops.silu_mul(gate_up)
        delta = ops.linear(inner, weights.down, weights.down_bias, lora, sites.down)
        return ops.add_norm(delta, hidden, next_norm, epsilon)

    def logits(self, normed: torch.Tensor, lora: L | None) -> torch.Tensor:
        """Some rows of `forward`'s result `[rows, hidden]` -> `[rows, vocab]`. lora: of them."""
        return self.ops.logits(normed, self.weights.lm_head, lora, self.sites.lm_head)
