"""The effect of an adapter on the base's own product, made from its content and the base's weights.

DoRA (arXiv:2402.09353): the rows of `W + scale * B A` get the lengths that the adapter says. So `W
x` is multiplied by `length / |W + scale * B A|`, row by row, and so is B; a bias is not. Biases of
the adapter are added, less those of the base that it replaces.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch

from loraplex.adapters.peft.lora_tensors import B_BIAS, MAGNITUDES, OWN_BIAS
from loraplex.server.model.linear.linear import Linear
from loraplex.server.model.lora.arena_weights import Adapter, Projection, SiteWeights
from loraplex.server.model.lora.sites import Site, Sites, TowerSites
from loraplex.server.model.weights import ModelWeights

# Of a matrix, in float32 at once; a piece is what is queued at once beside running steps.
_CHUNK, _PIECE = 1 << 23, 1 << 26
# That are finished at once.
_SITES = 4
_TINY = torch.finfo(torch.float32).tiny


class OutputVectors:
    """Makes output vectors of adapters just copied. Nothing here waits for the device."""

    def __init__(
        self, weights: ModelWeights, sites: Sites, tower: TowerSites | None = None
    ) -> None:
        """tower: the sites of `weights.tower`, where adapters may change that."""
        self._tower = None
        if tower is not None and weights.tower is not None:
            self._tower = OutputVectors(weights.tower.body, tower)
            products = (*tower.mergers, tower.patches)
            of_each = zip(products, weights.tower.products, strict=True)
            self._tower._linears |= {site.number: linear for site, linear in of_each}
        self._sites, self._is_shared = sites, sites.shard.count > 1
        self._embed = weights.embed
        self._linears: dict[int, Linear] = {sites.lm_head.number: weights.lm_head}
        of_beside = zip(sites.beside.values(), weights.beside, strict=True)
        self._linears |= {site.number: linear for site, linear in of_beside}
        steps = chain.from_iterable(layer.steps for layer in weights.layers)
        for of_step, step in zip(sites.branches, steps, strict=True):
            for of_branch, branch in zip(of_step, step.branches, strict=True):
                # Adapters change outputs of experts in no way but by LoRA.
                ordinary = [site for site in of_branch if not site.experts]
                of_each = zip(ordinary, branch.linears, strict=True)
                self._linears |= {site.number: linear for site, linear in of_each}

    def pieces(self, adapter: Adapter) -> Iterator[torch.Tensor | None]:
        """Compute an adapter's factors and addends, piece by piece. Each step queues a piece of the
        work on the current stream. At its end the arena holds factors and addends in place of
        what the adapter brought, and B is multiplied.

        Devices that share the base add up each tensor that a step gives, in place, before the next
        step: squares of lengths whose inputs they share. The last one is empty, and then all
        devices have made theirs.
        """
        if adapter.tower is not None and self._tower is not None:
            yield from self._tower.pieces(adapter.tower)
        found = [(n, each) for n, each in adapter.weights.items() if each.vectors is not None]
        squares = self._room(found)
        queued = 0
        for number, weights in found:
            for count in self._measure(number, weights, squares):
                queued += count
                if queued >= _PIECE:
                    yield None
                    queued = 0
        if self._is_shared and squares.shared.numel():
            yield squares.shared
        for place, (number, weights) in enumerate(found):
            self._finish(number, weights, squares)
            if place % _SITES == _SITES - 1:
                yield None
        if self._is_shared:
            yield squares.shared[:0]

    def _room(self, found: Sequence[tuple[int, SiteWeights]]) -> "_Squares":
        measured = [
            (self._sites[number].sharding == "row", number, projection)
            for number, weights in found
            for projection, bits in _projections(self._sites[number], weights)
            if projection is not None and bits & MAGNITUDES
        ]
        widths = [(p.out_end - p.out_begin) if shares else 0 for shares, _, p in measured]
        device = self._embed.device
        shared = torch.empty(sum(widths), device=device)
        parts = shared.split(widths)
        return _Squares(
            shared,
            {
                (number, p.out_begin): part
                if shares
                else torch.empty(p.out_end - p.out_begin, device=device)
                for (shares, number, p), part in zip(measured, parts, strict=True)
            },
        )

    def _measure(self, number: int, weights: SiteWeights, squares: "_Squares") -> Iterator[int]:
        """Lengths of one site; numbers of the matrix that each step takes."""
        matrix = None
        for projection, bits in _projections(self._sites[number], weights):
            if projection is not None and bits & MAGNITUDES:
                matrix = self._matrix(number) if matrix is None else matrix
                out = squares.of_each[number, projection.out_begin]
                yield from _square(matrix, weights.a_t, projection, out)

    def _finish(self, number: int, weights: SiteWeights, squares: "_Squares") -> None:
        """Lengths of one site become factors, which B is multiplied by."""
        if weights.vectors is None:
            return
        factors, addends, *biases = weights.vectors
        linear = self._linears.get(number)
        bias = None if linear is None else linear.bias
        borders = pairwise(accumulate(self._sites[number].out_features, initial=0))
        found = _projections(self._sites[number], weights)
        for (begin, end), (projection, bits) in zip(borders, found, strict=True):
            if projection is not None and bits & MAGNITUDES:
                _scale(projection, squares.of_each[number, begin], factors)
            else:
                factors[begin:end] = 1.0
            if bias is not None:  # the product has it already
                if not bits & OWN_BIAS:
                    addends[begin:end] = bias[begin:end]
                addends[begin:end] -= factors[begin:end] * bias[begin:end]
            if projection is not None and bits & B_BIAS:
                addends[begin:end] += projection.scale * biases[0][begin:end]

    def _matrix(self, number: int) -> torch.Tensor:
        """The base's, `[out_features, in_features]`."""
        if number == self._sites.embed.number:
            return self._embed.T
        return self._linears[number].dequantised()


class _Squares(NamedTuple):
    """Squares of lengths, float32. of_each: `[outputs]`, by the site's number and the projection's
    begin.

    shared: all squares of which devices have parts, as views.
    """

    shared: torch.Tensor
    of_each: dict[tuple[int, int], torch.Tensor]


def _projections(site: Site, weights: SiteWeights) -> Iterator[tuple[Projection | None, int]]:
    """Each of the site's, None = without LoRA, and its bits."""
    of_begin = {projection.out_begin: projection for projection in weights.projections}
    begins = accumulate(site.out_features, initial=0)
    for begin, bits in zip(begins, weights.vector_bits, strict=False):
        yield of_begin.get(begin), bits


def _square(
    matrix: torch.Tensor, a_t: torch.Tensor, projection: Projection, out: torch.Tensor
) -> Iterator[int]:
    """Squares of the lengths of `W + scale * B A`. a_t: of the whole site."""
    a = a_t[:, projection.rank_begin : projection.rank_end].T.float()
    begin, end = projection.out_begin, projection.out_end
    rows = max(1, _CHUNK // matrix.shape[1])
    for first in range(begin, end, rows):
        last = min(first + rows, end)
        b = projection.b_t[:, first - begin : last - begin].T.float()
        changed = torch.addmm(matrix[first:last].float(), b, a, alpha=projection.scale)
        out[first - begin : last - begin] = torch.linalg.vector_norm(changed, dim=1).square_()
        yield changed.numel()


def _scale(projection: Projection, squares: torch.Tensor, lengths: torch.Tensor) -> None:
    """Scale B so that its outputs have the wanted lengths. lengths: of the whole site, which become
    factors. Zeros that fill a device's part up have no length, and stay zeros.
    """
    mine = lengths[projection.out_begin : projection.out_end]
    mine /= squares.sqrt().clamp_(min=_TINY)
    projection.b_t.copy_(projection.b_t.float() * mine)
