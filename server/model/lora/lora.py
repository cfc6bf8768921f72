"""Adapters on the device: the byte arena, the table that finds weights in it, LoRA of one batch.

Owns where an adapter's bytes lie; which adapter lies where is the scheduler's. DoRA
(arXiv:2402.09353): the rows of `W + scale * B A` get the lengths that the adapter says. So `W x` is
multiplied by `length / |W + scale * B A|`, row by row, and so is B; a bias is not. Biases of the
adapter are added, less those of the base that it replaces.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, auto
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
import torch

from loraplex.adapters.manifest import SlabLayout
from loraplex.adapters.peft.lora_tensors import B_BIAS, MAGNITUDES, OWN_BIAS
from loraplex.server.kernels.lora.table import MAX_RANK, RANK_BLOCKS, LoraTable, VectorTable
from loraplex.server.model.linear.linear import Linear
from loraplex.server.model.lora.arena_weights import DTYPES, Adapter, Projection, SiteWeights
from loraplex.server.model.lora.own_rows import OwnParts, OwnSegment
from loraplex.server.model.lora.sites import PlacedAdapter, Site, Sites, TowerSites, place
from loraplex.server.model.weights import ModelWeights, ScoreTensors

# Of a matrix, in float32 at once; a piece is what is queued at once beside running steps.
_CHUNK, _PIECE = 1 << 23, 1 << 26
# That are finished at once.
_SITES = 4
_TINY = torch.finfo(torch.float32).tiny


class Reach(IntEnum):
    """The most that the adapters of a batch may change in layers: nothing, as there are none;
    linears; experts or what chooses them as well; the base's own products as well, by factors and
    addends; norms as well."""

    NONE = 0
    LAYERS = auto()
    EXPERTS = auto()
    OUTPUTS = auto()
    NORMS = auto()


class AdapterTable:
    """The arena and, for every adapter slot, where its weights lie in it.

    Steps and copies touch different slots: a slot is bound when its copy is usable, and bound again
    only when no step in flight reads it.
    """

    def __init__(
        self,
        sites: Sites,
        *,
        slots: int,
        extents: int,
        extent_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        tower: TowerSites | None = None,
    ) -> None:
        """Allocate the arena. tower: sites of what reads pictures; None = nothing does."""
        self.sites, self.tower = sites, tower
        self.dtype = dtype
        self.extent_bytes = extent_bytes
        self.arena = torch.zeros(extents * extent_bytes, dtype=torch.uint8, device=device)
        self.device_table = LoraTable(len(sites), slots, device)
        self.vector_table = VectorTable(len(sites), slots, device)
        self._slots: list[Adapter | None] = [None] * slots
        # Of each slot; the last is that of slot -1.
        self._reaches = np.full(slots + 1, Reach.LAYERS)
        self._reaches[-1] = Reach.NONE
        # As of `_reaches`, by LoRA or by own rows: the embedding or the head; the embedding.
        self._changes_model, self._changes_embedding = np.zeros((2, slots + 1), dtype=bool)
        self._widest = np.zeros(slots, dtype=np.int64)
        self._own: list[OwnParts] = [OwnParts({}, {}) for _ in range(slots)]
        self._with_own = 0  # slots
        self._has_vectors = np.zeros(slots + 1, dtype=bool)  # the last as of `_reaches`
        self._is_wide = np.zeros(slots + 1, dtype=bool)  # likewise

    def prepare(self, slot: int, layout: SlabLayout, device_extents: Sequence[int]) -> Adapter:
        """Find an adapter's weights in the arena and write its records of the device table.

        May run beside steps that do not use the slot. Raises ValueError for a layout that does not
        fit this model or arena.
        """
        if DTYPES[layout.dtype] != self.dtype:
            raise ValueError(f"the slab is {layout.dtype}, the engine computes in {self.dtype}")
        of_tower = None
        if self.tower is not None:
            layout, beside = self.tower.split(layout)
            if beside.sites:
                at = self._place(self.tower, beside, device_extents)
                of_tower = Adapter(at, self.tower, self.arena, self.dtype)
        placed = self._place(self.sites, layout, device_extents)
        start = self.arena.data_ptr()
        self.device_table.clear(slot)
        self.device_table.write(
            slot,
            placed.sites,
            start + placed.a,
            start + placed.b,
            placed.ranks,
            placed.scales,
            placed.a_ranks,
        )
        has = placed.has_vectors
        self.vector_table.write(slot, placed.sites[has], start + placed.vectors[has])
        return Adapter(placed, self.sites, self.arena, self.dtype, of_tower)

    def _place(
        self, sites: Sites, layout: SlabLayout, device_extents: Sequence[int]
    ) -> PlacedAdapter:
        sizes = {"item_bytes": self.dtype.itemsize, "arena_bytes": self.arena.numel()}
        return place(sites, layout, device_extents, **sizes)

    def scale(self, slot: int, source_slot: int, scale: float) -> None:
        """Let what is launched from now on find in `slot` the adapter of `source_slot`, of LoRA
        alone, with all that it adds multiplied. No step in flight uses the slot.

        Raises ValueError where no adapter is bound to `source_slot`.
        """
        source = self._slots[source_slot]
        if source is None:
            raise ValueError(f"slot {source_slot} has no adapter to scale")
        placed = replace(source.placed, scales=source.placed.scales * scale)
        self.device_table.scale(slot, source_slot, scale)
        self.bind(slot, Adapter(placed, self.sites, self.arena, self.dtype))

    def bind(self, slot: int, adapter: Adapter) -> None:
        """Let what is launched from now on use the slot, which no step in flight does."""
        self.device_table.upload(slot)
        self._slots[slot] = adapter
        placed = adapter.placed
        only_tower = adapter.tower is not None and not placed.sites.size
        self._reaches[slot] = Reach.NONE if only_tower else self._reach(placed)
        self._changes_model[slot] = self.sites.outside[placed.sites].any()
        self._changes_embedding[slot] = self.sites.embed.number in placed.sites
        has_vectors = placed.has_vectors.any()
        if has_vectors or self._has_vectors[slot]:
            self.vector_table.upload(slot)
        self._has_vectors[slot] = has_vectors
        before, self._own[slot] = self._own[slot], OwnParts(adapter.own_rows(), adapter.own_norms())
        self._with_own += any(self._own[slot]) - any(before)
        vocab = self.sites.vocab_size
        self._is_wide[slot] = any(table.size > vocab for table in placed.tables)
        ranks = placed.ranks[~self.sites.of_experts[placed.sites]]
        self._widest[slot] = MAX_RANK if (ranks % 8).any() else ranks.max(initial=0)

    def _reach(self, placed: PlacedAdapter) -> Reach:
        if placed.norms is not None:
            return Reach.NORMS
        if placed.has_vectors.any():
            return Reach.OUTPUTS
        sites = placed.sites
        has_experts = (self.sites.of_experts[sites] | self.sites.routers[sites]).any()
        return Reach.EXPERTS if has_experts else Reach.LAYERS

    def reach(self, token_slots: np.ndarray) -> Reach:
        """Return the parts of the model that the tokens' adapters change. token_slots: int `[n]`,
        -1 = no adapter.
        """
        return Reach(int(self._reaches[token_slots].max(initial=Reach.NONE)))

    def changes_model(self, token_slots: np.ndarray) -> bool:
        """Whether some adapter of a batch changes the embedding or the head."""
        return bool(self._changes_model[token_slots].any())

    def changes_embedding(self, token_slots: np.ndarray) -> bool:
        return bool(self._changes_embedding[token_slots].any())

    def changes_outputs(self, token_slots: np.ndarray) -> bool:
        """Whether some adapter of a batch changes the base's own products."""
        return bool(self._has_vectors[token_slots].any())

    def is_wide(self, token_slots: np.ndarray) -> np.ndarray:
        """Say which adapters of a batch have ids behind the base's tables, bool `[n]`."""
        found: np.ndarray = self._is_wide[token_slots]
        return found

    def own_segments(self, token_slots: np.ndarray) -> tuple[OwnSegment, ...]:
        """Segments of a batch whose adapters have rows or norms of their own.

        token_slots: as of `batch`.
        """
        if not self._with_own:
            return ()
        return tuple(
            OwnSegment(begin, end, *self._own[slot])
            for begin, end, slot in _segments(token_slots)
            if any(self._own[slot])
        )

    def head(self, slot: int) -> ScoreTensors:
        """Tensors of the score head that the adapter in a slot has of its own; empty without."""
        adapter = self._slots[slot] if slot >= 0 else None
        return {} if adapter is None else adapter.head()

    def of_tower(self, slot: int, scale: float) -> dict[int, SiteWeights]:
        """Weights that the adapter in a slot has for what reads pictures, by the site's number;
        empty without. scale: multiplies what they add."""
        adapter = self._slots[slot] if slot >= 0 else None
        if adapter is None or adapter.tower is None:
            return {}
        found = adapter.tower.weights
        return found if scale == 1 else {n: each.scaled(scale) for n, each in found.items()}

    def rank_block(self, token_slots: np.ndarray) -> int | None:
        """The smallest of RANK_BLOCKS for all ranks of a batch's adapters; None: some rank is
        larger, or no multiple of 8."""
        widest = self._widest[token_slots[token_slots >= 0]].max()
        return next((block for block in RANK_BLOCKS if widest <= block), None)

    def batch(self, token_slots: np.ndarray) -> "LoraBatch | None":
        """Group tokens by adapter. token_slots: int64 `[tokens]`, -1 = the base; equal neighbours
        form one segment. None where no token has an adapter.
        """
        if self.reach(token_slots) is Reach.NONE:
            return None
        segments = tuple(
            Segment(begin, end, self._weights(slot)) for begin, end, slot in _segments(token_slots)
        )
        sites = frozenset[int]().union(*(s.weights for s in segments))
        own = self.own_segments(token_slots)
        return LoraBatch(segments, sites, torch.from_numpy(token_slots), own)

    def _weights(self, slot: int) -> dict[int, SiteWeights]:
        adapter = self._slots[slot]
        return {} if adapter is None else adapter.weights


def _segments(token_slots: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Iterate over runs of neighbours with one adapter: begin, end and slot."""
    changes = np.flatnonzero(np.diff(token_slots)) + 1
    for begin, end in pairwise([0, *changes.tolist(), len(token_slots)]):
        if token_slots[begin] >= 0:
            yield begin, end, int(token_slots[begin])


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens begin .. end of a batch use one adapter."""

    begin: int
    end: int
    weights: dict[int, SiteWeights]

    def added(self, site: Site, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add the adapter's LoRA of any rows, as `LoraBatch.add` of tokens. Returns y."""
        weights = self.weights.get(site.number)
        if weights is not None:
            _scale_and_expand(weights, x @ weights.a_t, y)
        return y


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """Adapters of one batch. sites: numbers of those that some adapter of it changes; others
    cost nothing.
    token_slots: int64 `[tokens]` on the host, for kernels that route by token. own: those with rows
    of their own in the embedding or the head, or norms."""

    segments: tuple[Segment, ...]
    sites: frozenset[int]
    token_slots: torch.Tensor
    own: tuple[OwnSegment, ...] = ()

    def add(self, site: Site, x: torch.Tensor, y: torch.Tensor) -> None:
        """y += scale (x A^T) B^T of each token's adapter; x `[tokens, in]`, y `[tokens, out]`, of
        the base."""
        if site.number not in self.sites:
            return
        for segment in self.segments:
            segment.added(site, x[segment.begin : segment.end], y[segment.begin : segment.end])

    def add_expert(
        self, site: Site, expert: int, tokens: torch.Tensor, x: torch.Tensor, y: torch.Tensor
    ) -> None:
        """Add LoRA of one expert to the rows that it has. tokens: int64 `[rows]`, ascending, their
        places in the batch; x `[rows, in]`, y `[rows, out]`.
        """
        if site.number not in self.sites:
            return
        for segment in self.segments:
            weights = segment.weights.get(site.number)
            if weights is None:
                continue
            borders = torch.tensor((segment.begin, segment.end), device=tokens.device)
            rows = slice(*torch.searchsorted(tokens, borders).tolist())
            of_expert = weights.of_expert(expert)
            _expand(of_expert, x[rows] @ of_expert.a_t, y[rows])

    def add_embedding(self, site: Site, token_ids: torch.Tensor, y: torch.Tensor) -> None:
        """Add LoRA to an embedding, as `add` does: a token's row of A^T is gathered."""
        if site.number not in self.sites:
            return
        for segment in self.segments:
            weights = segment.weights.get(site.number)
            if weights is not None:
                bridge = weights.a_t[token_ids[segment.begin : segment.end]]
                _scale_and_expand(weights, bridge, y[segment.begin : segment.end])


def _scale_and_expand(weights: SiteWeights, bridge: torch.Tensor, y: torch.Tensor) -> None:
    if weights.vectors is not None:
        factors, addends, *_ = weights.vectors
        y.copy_(torch.addcmul(addends, y, factors))
    _expand(weights, bridge, y)


def _expand(weights: SiteWeights, bridge: torch.Tensor, y: torch.Tensor) -> None:
    """Expand into y, which may be in float32 where the adapter is not."""
    bridge = bridge.to(y.dtype)
    for p in weights.projections:
        b_t = p.b_t.to(y.dtype)
        if p.out_end - p.out_begin == y.shape[1]:
            y.addmm_(bridge, b_t, alpha=p.scale)
            continue
        y[:, p.out_begin : p.out_end].addmm_(
            bridge[:, p.rank_begin : p.rank_end], b_t, alpha=p.scale
        )


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
        for index, (number, weights) in enumerate(found):
            self._finish(number, weights, squares)
            if index % _SITES == _SITES - 1:
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
