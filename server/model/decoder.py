"""The decoder: one forward over a flat batch of tokens, for every model with a ModelSpec."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from loraplex.server.model.linear.experts import MoeWeights
from loraplex.server.model.lora.sites import Sites
from loraplex.server.model.ops.ops import Ops
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.weights import ModelWeights

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


@dataclass(frozen=True, slots=True)
class Embedded:
    """The embedding of a captured step's tokens, which adapters may change outside the graph.
    hidden: `[tokens, hidden]`. is_given: bool `[1, 1]`; where it is false the graph embeds."""

    hidden: torch.Tensor
    is_given: torch.Tensor


class Decoder(Generic[P, L, Y]):
    """Decoder of any model that is served. spec: what differs between models, and nothing else
    does.
    """

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, sites: Sites, ops: Ops[P, L, Y]
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.sites = sites
        self.ops = ops
        # As the residual stream holds it: a factor of another precision would round otherwise.
        self._embedding_scale = torch.tensor(spec.embedding.scale, dtype=weights.embed.dtype).item()

    def forward(
        self,
        token_ids: torch.Tensor,
        plan: P,
        lora: L | None,
        wanted: Wanted[L] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Compute a step from token ids to hidden states. token_ids: int64 `[tokens]`, in the
        plan's order -> normed hidden states `[tokens, hidden]`, or `[rows, hidden]` of those
        wanted. Writes the tokens' keys and values. meanwhile: called in each layer.
        """
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
        embedded: Embedded | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a step up to the last layer's attention. Returns its result, and the hidden
        states.
        """
        normed, hidden = self.begin(token_ids, lora, embedded)
        last = len(self.weights.layers) - 1
        for layer, weights in enumerate(self.weights.layers):
            qkv = self.ops.linear(normed, weights.qkv, lora, self.sites.layers[layer].qkv)
            attended = self.ops.attend(plan, layer, qkv, weights.qk_norm, weights.sinks)
            if meanwhile is not None:
                meanwhile()
            if layer < last:
                normed, hidden = self.after_attention(layer, attended, hidden, lora)
        return attended, hidden

    def end(self, attended: torch.Tensor, hidden: torch.Tensor, lora: L | None) -> torch.Tensor:
        """Compute from the last layer's attention to normed hidden states, of any tokens."""
        return self.after_attention(len(self.weights.layers) - 1, attended, hidden, lora)[0]

    def embed(self, token_ids: torch.Tensor, lora: L | None) -> torch.Tensor:
        """Embed tokens, `[tokens, hidden]`, without the model's factor."""
        return self.ops.embed(token_ids, self.weights.embed, lora, self.sites.embed)

    def begin(
        self, token_ids: torch.Tensor, lora: L | None, embedded: Embedded | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute up to the first layer's product of q, k and v. Returns normed and
        hidden states.
        """
        hidden = self.embed(token_ids, lora)
        if embedded is not None:
            hidden = torch.where(embedded.is_given, embedded.hidden, hidden)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        norm = self.weights.layers[0].pre_attention
        if norm is None:
            return hidden, hidden
        return self._with_own(self.ops.rms_norm(hidden, norm), hidden, lora, 0), hidden

    def after_attention(
        self, layer: int, attended: torch.Tensor, hidden: torch.Tensor, lora: L | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute from a layer's attention to the next layer's product of q, k and v, or to the
        end.
        """
        ops, sites, layers = self.ops, self.sites.layers[layer], self.weights.layers
        weights, spec = layers[layer], self.spec.layers[layer]
        is_last = layer + 1 == len(layers)
        next_norm = self.weights.norm if is_last else layers[layer + 1].pre_attention
        delta = ops.reduce(ops.linear(attended, weights.o, lora, sites.o))
        normed, hidden = ops.add_norm(
            delta, hidden, weights.pre_mlp, weights.post_attention, spec.residual_scale
        )
        normed = self._with_own(normed, hidden, lora, 2 * layer + 1)
        delta = ops.reduce(self._mlp(layer, normed, lora))
        normed, hidden = ops.add_norm(
            delta, hidden, next_norm, weights.post_mlp, spec.residual_scale
        )
        return self._with_own(normed, hidden, lora, 2 * layer + 2), hidden

    def _with_own(
        self, normed: torch.Tensor, hidden: torch.Tensor, lora: L | None, place: int
    ) -> torch.Tensor:
        """Norm again where adapters have a norm weight of their own. place: of the norm
        (`BaseNorm`).
        """
        if lora is not None:
            self.ops.norm_own(normed, hidden, lora, place)
        return normed

    def _mlp(self, layer: int, normed: torch.Tensor, lora: L | None) -> Y:
        """The output of a layer's MLP or experts."""
        ops, sites = self.ops, self.sites.layers[layer]
        weights = self.weights.layers[layer].mlp
        if isinstance(weights, MoeWeights):
            return ops.moe(normed, weights, lora, sites)
        gate_up = ops.linear(normed, weights.gate_up, lora, sites.gate_up)
        inner = ops.gated(gate_up, weights.spec.activation)
        return ops.linear(inner, weights.down, lora, sites.down)

    def logits(
        self,
        normed: torch.Tensor,
        lora: L | None,
        out: torch.Tensor | None = None,
        width: int | None = None,
    ) -> torch.Tensor:
        """Compute logits. Some rows of `forward`'s result `[rows, hidden]` -> `[rows, vocab]`, in
        `out` where that is given, or `[rows, width]`. lora: of them. width: as of `Ops.logits`;
        what lies behind the base's ids means nothing in rows whose adapter has none there.
        Nothing else computes logits.
        """
        head, weight = self.spec.head, self.weights.lm_head
        logits = self.ops.logits(normed, weight, lora, self.sites.lm_head, out, width)
        if head.scale != 1.0:
            logits.mul_(head.scale)
        if head.softcap is not None:
            logits.div_(head.softcap).tanh_().mul_(head.softcap)
        if lora is not None:
            self.ops.forbid_others(logits, lora, self.sites.lm_head)
        return logits
