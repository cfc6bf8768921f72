"""What an adapter does to the base's own product, made from what it brings and the base's weights.

DoRA (arXiv:2402.09353): the rows of `W + scale * B A` get the lengths that the adapter says. So
`W x` is multiplied by `length / |W + scale * B A|`, row by row, and so is B; a bias is not. Biases
of the adapter are added, less those of the base that it replaces.
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise

import torch

from adapters.peft.lora_tensors import B_BIAS, MAGNITUDES, OWN_BIAS
from server.model.linear.linear import Linear
from server.model.lora.lora import Adapter, Projection, SiteWeights
from server.model.lora.sites import Sites
from server.model.weights import ModelWeights

# Of a matrix, in float32 at once; a piece is what is queued at once beside running steps.
_CHUNK, _PIECE = 1 << 23, 1 << 26


class OutputVectors:
    """Of adapters that have just been copied. Nothing here waits for the device."""

    def __init__(self, weights: ModelWeights, sites: Sites) -> None:
        self._sites = sites
        self._embed = weights.embed
        self._linears: dict[int, Linear] = {sites.lm_head.number: weights.lm_head}
        for of_layer, layer in zip(sites.layers, weights.layers, strict=True):
            each = (of_layer.qkv, of_layer.o, of_layer.gate_up, of_layer.down)
            # Adapters change routers nowhere, and outputs of experts in no way but by LoRA.
            self._linears |= {
                site.number: linear
                for site, linear in zip(each, layer.linears, strict=False)
                if not site.experts
            }

    def pieces(self, adapter: Adapter) -> Iterator[None]:
        """Each step queues a piece of the work on the current stream. At its end the arena holds
        factors and addends in place of what the adapter brought, and B is multiplied."""
        queued = 0
        for number, weights in adapter.weights.items():
            for count in self._finish(number, weights):
                queued += count
                if queued >= _PIECE:
                    yield
                    queued = 0

    def _finish(self, number: int, weights: SiteWeights) -> Iterator[int]:
        """One site; numbers of the matrix that each step takes."""
        if weights.vectors is None:
            return
        matrix, bias = self._of_base(number)
        factors, addends, *biases = weights.vectors
        of_begin = {projection.out_begin: projection for projection in weights.projections}
        borders = accumulate(self._sites[number].out_features, initial=0)
        for (begin, end), bits in zip(pairwise(borders), weights.vector_bits, strict=True):
            if bits & MAGNITUDES:
                yield from _scale(matrix, weights.a_t, of_begin[begin], factors)
            else:
                factors[begin:end] = 1.0
            if bias is not None:  # the product has it already
                if not bits & OWN_BIAS:
                    addends[begin:end] = bias[begin:end]
                addends[begin:end] -= factors[begin:end] * bias[begin:end]
            if bits & B_BIAS:
                addends[begin:end] += of_begin[begin].scale * biases[0][begin:end]

    def _of_base(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The base's matrix `[out_features, in_features]`, and its bias."""
        if number == self._sites.embed.number:
            return self._embed.T, None
        linear = self._linears[number]
        return linear.dequantised(), linear.bias


def _scale(
    matrix: torch.Tensor, a_t: torch.Tensor, projection: Projection, lengths: torch.Tensor
) -> Iterator[int]:
    """Lengths become factors, and B is multiplied by them. a_t, lengths: of the whole site."""
    a = a_t[:, projection.rank_begin : projection.rank_end].T.float()
    begin, end = projection.out_begin, projection.out_end
    rows = max(1, _CHUNK // matrix.shape[1])
    for first in range(begin, end, rows):
        last = min(first + rows, end)
        b = projection.b_t[:, first - begin : last - begin].T.float()
        changed = torch.addmm(matrix[first:last].float(), b, a, alpha=projection.scale)
        lengths[first:last] /= torch.linalg.vector_norm(changed, dim=1)
        yield changed.numel()
    projection.b_t.copy_(projection.b_t.float() * lengths[begin:end])
