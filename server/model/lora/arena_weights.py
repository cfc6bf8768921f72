"""One adapter in the arena: where its tensors lie, as views. Owns what its bytes mean."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from loraplex.adapters.slab.layout import num_vectors
from loraplex.server.model.lora.own_rows import NormParts, OwnRows, ids_on, norms_of
from loraplex.server.model.lora.sites import PlacedAdapter, Site, Sites
from loraplex.server.model.weights import ScoreTensors

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Projection:
    """LoRA weights of one projection. b_t: B transposed, `[rank, out_features]`, of one projection.
    rank_*: its columns of the site's `x A^T`; out_*: its columns of the site's output.
    """

    b_t: torch.Tensor
    scale: float
    rank_begin: int
    rank_end: int
    out_begin: int
    out_end: int


@dataclass(frozen=True, slots=True)
class SiteWeights:
    """LoRA weights of one site. a_t: A transposed, `[in_features, sum(ranks)]`, or of the one rank
    that all projections share. All tensors are views into the arena; at a site of experts each
    has the experts in front. vectors: float32 `[2 or 3, out_features]` of the whole site,
    factors of the base's product and what is then added; None = it has none. vector_bits: as in
    `SiteLayout.vectors`.
    """

    a_t: torch.Tensor
    projections: tuple[Projection, ...]
    vectors: torch.Tensor | None = None
    vector_bits: tuple[int, ...] = ()

    def scaled(self, scale: float) -> "SiteWeights":
        """The same, which adds so many times as much."""
        scaled = tuple(replace(p, scale=p.scale * scale) for p in self.projections)
        return replace(self, projections=scaled)

    def of_expert(self, expert: int) -> "SiteWeights":
        projections = tuple(replace(p, b_t=p.b_t[expert]) for p in self.projections)
        return SiteWeights(self.a_t[expert], projections)


class Adapter:
    """An adapter in the arena. `weights`: its tensors by the site's number, made when somebody
    asks, since on a GPU kernels find them through the device table. tower: the part of it that
    changes what reads pictures; None = there is none."""

    def __init__(
        self,
        placed: PlacedAdapter,
        sites: Sites,
        arena: torch.Tensor,
        dtype: torch.dtype,
        tower: "Adapter | None" = None,
    ) -> None:
        self.placed = placed
        self.tower = tower
        self._sites = sites
        self._arena = arena
        self._dtype = dtype

    @cached_property
    def weights(self) -> dict[int, SiteWeights]:
        placed = self.placed
        columns = (
            placed.sites,
            placed.a,
            placed.b,
            placed.ranks,
            placed.scales,
            placed.a_ranks,
            placed.vectors,
            placed.vector_bits,
        )
        return {
            number: self._site_weights(self._sites[number], *found)
            for number, *found in zip(*(column.tolist() for column in columns), strict=True)
        }

    def _site_weights(
        self,
        site: Site,
        a: int,
        b: list[int],
        ranks: list[int],
        scales: list[float],
        a_rank: int,
        *vectors: Any,
    ) -> SiteWeights:
        """View one site's weights. vectors: where its own begin, and their bits."""
        shares_a = a_rank < sum(ranks)
        columns = [0] * len(ranks) if shares_a else list(accumulate((0, *ranks)))
        outputs = list(accumulate((0, *site.out_features)))
        experts = (site.experts,) if site.experts else ()
        if site.role == "embed_tokens":  # stored transposed
            a_t = self._view(a, (site.in_features, a_rank))
        else:
            a_t = self._view(a, (*experts, a_rank, site.in_features)).mT
        projections = tuple(
            Projection(
                b_t=self._view(b[i], (*experts, width, ranks[i])).mT,
                scale=scales[i],
                rank_begin=columns[i],
                rank_end=columns[i] + ranks[i],
                out_begin=outputs[i],
                out_end=outputs[i + 1],
            )
            for i, width in enumerate(site.out_features)
            if ranks[i]
        )
        return SiteWeights(a_t, projections, *self._vectors(site, *vectors))

    def _vectors(
        self, site: Site, begin: int, bits: list[int]
    ) -> tuple[torch.Tensor | None, tuple[int, ...]]:
        if begin < 0:
            return None, ()
        shape = (num_vectors(bits), sum(site.out_features))
        return self._view(begin, shape, torch.float32), tuple(bits[: len(site.out_features)])

    def own_rows(self) -> dict[int, OwnRows]:
        """The adapter's own rows by the site's number. Copies ids on the current stream."""
        return {
            table.site: OwnRows(
                self._view(table.begin, (table.rows, self._sites.table_width(table.site))),
                ids_on(self._arena.device, table.ids),
                table.size,
                self._addends(table.site),
            )
            for table in self.placed.tables
        }

    def _addends(self, number: int) -> torch.Tensor | None:
        """View what is added to the outputs of a site; None = nothing is."""
        place = self.placed.sites.tolist().index(number)
        begin, bits = (
            each[place].tolist() for each in (self.placed.vectors, self.placed.vector_bits)
        )
        vectors, _ = self._vectors(self._sites[number], begin, bits)
        return None if vectors is None else vectors[1]

    def own_norms(self) -> dict[int, NormParts]:
        """The adapter's own norms by place. Queues work on the current stream."""
        placed = self.placed.norms
        if placed is None:
            return {}
        rows = self._view(placed.begin, (len(placed.places), self._sites.norm_size))
        return norms_of(rows, placed.places, self._sites.norms)

    def head(self) -> ScoreTensors:
        """Tensors of a score head of its own, views into the arena."""
        head = self.placed.head
        if head is None:
            return {}
        named = self._sites.score_tensors(head.labels, of_tokens=head.of_tokens)
        places = ((0, head.begin), *head.others)
        return {named[number][0]: self._view(at, named[number][1]) for number, at in places}

    def _view(
        self, begin: int, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """View a tensor in the arena. dtype: None = that of the slab."""
        dtype = dtype or self._dtype
        end = begin + math.prod(shape) * dtype.itemsize
        return self._arena[begin:end].view(dtype).view(shape)
