"""The computation of a layer of experts, and the forms in which checkpoints hold its
weights. Pure.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

ExpertActivation = Literal["silu", "clamped_swiglu"]
# How a router chooses experts and weighs them: the softmax of all logits, of which the `top_k`
# largest are taken, as they are or divided by their sum; or the softmax of the largest logits.
RouterRule = Literal["softmax_top_k", "softmax_top_k_normed", "top_k_softmax"]
ExpertForm = Literal["each", "stacked", "mxfp4"]
Tensors = Iterator[tuple[str, tuple[int, ...]]]

# Of `clamped_swiglu`: `gate * sigmoid(ALPHA * gate) * (up + 1)`, with the gate at most LIMIT and up
# between -LIMIT and LIMIT.
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0
# Features that share a scale in MXFP4, two in a byte.
MXFP4_BLOCK = 32
# How the names of its tensors end.
MXFP4_TENSORS = ("_blocks", "_scales")


class MoeSpec(msgspec.Struct, frozen=True):
    """The weighted sum of `top_k` of `experts` gated MLPs with `size` features inside.

    router: the module whose product with the normed input are the experts' logits; router_bias:
    whether it has one. wide_weights: experts' weights stay in float32; else they are rounded to the
    model's dtype.
    """

    experts: int
    top_k: int
    size: int
    router: str
    rule: RouterRule
    router_bias: bool = False
    wide_weights: bool = False
    activation: ExpertActivation = "silu"

    def router_tensors(self, hidden: int) -> Tensors:
        """Names, relative to the layer, and shapes of what the checkpoint holds."""
        yield f"{self.router}.weight", (self.experts, hidden)
        if self.router_bias:
            yield f"{self.router}.bias", (self.experts,)


class ExpertStorage(msgspec.Struct, frozen=True):
    """How a checkpoint stores one matrix of all experts of a layer.

    form: `each` = a tensor for each expert and part; `stacked` = one tensor, `[experts, out, in]`;
    `mxfp4` = the same in blocks of MXFP4_BLOCK features. path: of the tensor of all experts, to
    which `mxfp4` adds suffixes. interleaved: in such a tensor row i belongs to part i % parts; else
    each part's rows lie together. transposed: `stacked` is `[experts, in, out]`.
    """

    path: str
    form: ExpertForm = "each"
    interleaved: bool = False
    transposed: bool = False

    def tensors(
        self, shape: tuple[int, int, int], parts: Sequence[tuple[str, int]], *, bias: bool
    ) -> Tensors:
        """List the tensors that hold the experts, with their shapes. shape: experts, output and
        input features. parts: paths and output features.
        """
        experts, outputs, inputs = shape
        if self.form == "each":
            for path, features in parts:
                for expert in range(experts):
                    yield f"{path.format(expert)}.weight", (features, inputs)
            return
        if self.form == "stacked":
            inner = (inputs, outputs) if self.transposed else (outputs, inputs)
            yield self.path, (experts, *inner)
        else:
            blocks = (experts, outputs, inputs // MXFP4_BLOCK)
            yield f"{self.path}_blocks", (*blocks, MXFP4_BLOCK // 2)
            yield f"{self.path}_scales", blocks
        if bias:
            yield f"{self.path}_bias", (experts, outputs)
