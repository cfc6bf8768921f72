"""The computation of a layer's experts. Pure."""

from typing import Literal

import msgspec

from loraplex.server.model.spec.linear_spec import LinearSpec, Tensors

ExpertActivation = Literal["silu", "clamped_swiglu"]
# How a router chooses experts and weighs them: the softmax of all logits, of which the `top_k`
# largest are taken, as they are or divided by their sum; or the softmax of the largest logits.
RouterRule = Literal["softmax_top_k", "softmax_top_k_normed", "top_k_softmax"]

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
    def linears(self) -> tuple[LinearSpec, ...]:
        """Products that adapters may change, in the order of their sites."""
        return self.gate_up, self.down

    def tensors(self) -> Tensors:
        """Names, relative to the layer, and shapes of what the checkpoint holds."""
        for linear in self.linears:
            yield from linear.tensors()


class MoeSpec(FeedForwardSpec, frozen=True):
    """The weighted sum of `top_k` of all experts, which are gated MLPs.

    router: the module whose product with the normed input are the experts' logits; router_bias:
    whether it has one. wide_weights: experts' weights stay in float32; else they are rounded to the
    model's dtype.
    """

    top_k: int
    router: str
    rule: RouterRule
    router_bias: bool = False
    wide_weights: bool = False
    activation: ExpertActivation = "silu"

    @property
    def experts(self) -> int:
        return self.down.experts

    def tensors(self) -> Tensors:
        """Names, relative to the layer, and shapes of what the checkpoint holds."""
        yield from FeedForwardSpec.tensors(self)
        yield f"{self.router}.weight", (self.experts, self.gate_up.in_features)
        if self.router_bias:
            yield f"{self.router}.bias", (self.experts,)
