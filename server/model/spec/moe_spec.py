"""The computation of a layer's experts. Pure."""

from typing import Literal

import msgspec

from loraplex.server.model.spec.linear_spec import LinearSpec, Tensors, tensors_of
from loraplex.server.model.spec.norm_spec import NormSpec

# Experts of `relu2` have no gate.
ExpertActivation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"]
# How a router chooses experts and weighs them: the softmax of all logits, of which the `top_k`
# largest are taken, as they are or divided by their sum; or the softmax of the largest logits; or
# the sigmoid of each logit, as with the softmax of all; or one expert after the other, by the
# softmax of those logits that are near the largest one left.
RouterRule = Literal[
    "softmax_top_k",
    "softmax_top_k_normed",
    "top_k_softmax",
    "sigmoid_top_k",
    "sigmoid_top_k_normed",
    "sparse_mixer",
]

# Of `clamped_swiglu`: `gate * sigmoid(ALPHA * gate) * (up + 1)`, with the gate at most LIMIT and up
# between -LIMIT and LIMIT.
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


class FeedForwardSpec(msgspec.Struct, frozen=True):
    """Two products, with an activation between them."""

    gate_up: LinearSpec
    down: LinearSpec

    @property
    def size(self) -> int:
        """Features inside; with experts, inside one."""
        return self.down.in_features

    @property
    def chooser(self) -> LinearSpec | None:
        """The product that chooses experts or weighs what comes out, if there is one."""
        return None

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Products that adapters may change, in the order of their sites."""
        chooser = () if self.chooser is None else (self.chooser,)
        return *chooser, self.gate_up, self.down

    def tensors(self) -> Tensors:
        """Names, relative to the layer, and shapes of what the checkpoint holds."""
        yield from tensors_of(*self.linears)


class MoeSpec(FeedForwardSpec, frozen=True):
    """The weighted sum of `top_k` of all experts, which are gated MLPs.

    router: the product with the normed input that gives the experts' logits. wide_weights: experts'
    weights stay in float32; else they are rounded to the model's dtype. wide_router: the router's
    product is computed in float32.
    correction: path and shape of numbers, one an expert, which are added to scores where experts
    are chosen, and not where they are weighed. groups: how many experts are in, and how many of
    these a token may choose from, by the sum of each one's `best_of_group` best scores. norm_floor:
    the least sum that weights are divided by. norm_added: to that sum. factor: of the weights.
    margin: of `sparse_mixer`, how far a logit may lie below the largest, as a part of its own size.
    latent: products before and behind experts, whose inputs and results have another size than
    those of the layer; () = they have not. router_norm: of the stream, which the router then reads
    in place of what experts read. scales: path of numbers, one an expert, which its weight is
    multiplied with; "" = none.
    """

    top_k: int
    router: LinearSpec
    rule: RouterRule
    wide_weights: bool = False
    activation: ExpertActivation = "silu"
    wide_router: bool = False
    correction: tuple[str, tuple[int, ...]] | None = None
    groups: tuple[int, int] = (1, 1)
    best_of_group: int = 2
    norm_floor: float = 0.0
    norm_added: float = 0.0
    factor: float = 1.0
    margin: float = 0.0
    latent: tuple[LinearSpec, ...] = ()
    router_norm: NormSpec | None = None
    scales: str = ""

    @property
    def chooser(self) -> LinearSpec:
        return self.router

    @property
    def by_sigmoid(self) -> bool:
        """Whether a score is the expert's own sigmoid, else a share of a softmax."""
        return self.rule.startswith("sigmoid")

    @property
    def is_normed(self) -> bool:
        """Whether weights of the chosen are divided by their sum."""
        return self.rule.endswith("normed")

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Products that adapters may change, in the order of their sites."""
        return self.router, *self.latent[:1], self.gate_up, self.down, *self.latent[1:]

    @property
    def experts(self) -> int:
        return self.down.experts

    def tensors(self) -> Tensors:
        """Names, relative to the layer, and shapes of what the checkpoint holds."""
        yield from FeedForwardSpec.tensors(self)
        if self.correction is not None:
            yield self.correction
        yield from tensors_of(self.router_norm)
        if self.scales:
            yield self.scales, (self.experts,)
