"""The sites of a model, and where an adapter's matrices of them lie in the device's arena.

Everything of one adapter at once, in arrays: a load must not keep the step loop from the
interpreter.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import prod

import numpy as np
from msgspec.structs import replace

from loraplex.adapters.base import (
    MAX_NEW_IDS,
    MODEL_SITES,
    WHOLE,
    Role,
    Shard,
    Sharding,
    ids_of_shard,
    rows_of_each,
)
from loraplex.adapters.manifest import SiteLayout, SlabLayout
from loraplex.adapters.slab.layout import num_vectors
from loraplex.server.kernels.lora.table import MAX_PROJECTIONS
from loraplex.server.model.spec.linear_spec import LinearSpec
from loraplex.server.model.spec.model_spec import ModelSpec, StepSpec

_FLOAT32_BYTES = 4
# Offsets and bytes of matrices -> where they begin in the arena.
_Find = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Site:
    """One fused product of the base, which adapters may change.

    number: its record in the device's table. layer: 0-based, -1 outside the layers. out_features:
    of its projections, side by side in the output. experts: how many such products there are; 0 =
    it is an ordinary one. sharding: how devices share it; of "row" they sum the outputs. turn: 0 or
    1, of a sum that the norm behind may make, never that of the sum before; None = of no such sum.
    """

    number: int
    layer: int
    role: Role
    in_features: int
    out_features: tuple[int, ...]
    experts: int = 0
    sharding: Sharding = "none"
    turn: int | None = None


# The sites of one branch, in the order of its `linears`.
BranchSites = tuple[Site, ...]


class Sites:
    """All sites of a model, numbered layer by layer, then `embed_tokens`, then others outside of
    layers, by role (`beside`), then `lm_head`.

    in_features: int64 `[sites]`. out_features: int64 `[sites, 3]`, 0 = no such projection.
    branches: those of each step of the model, branch by branch. norms: of weights, then of biases,
    by place (`norm_place`); None = there is none.
    outside: bool `[sites]`, True for the embedding and the head. products: int64 `[sites]`, how
    many there are, one for each expert. of_experts, routers: bool `[sites]`. vocab_size: of the
    whole model.
    """

    def __init__(self, model: ModelSpec, shard: Shard = WHOLE, first_layer: int = 0) -> None:
        """Number the sites of a model. model: the part of the device with this shard. first_layer:
        the number of its first layer."""
        self.vocab_size, self.shard = model.vocab_size, shard
        self._all: list[Site] = []
        layers = enumerate(model.layers, first_layer)
        steps = [(layer, step) for layer, of in layers for step in of.steps]
        self.branches = tuple(
            self._of_step(layer, step, number % 2) for number, (layer, step) in enumerate(steps)
        )
        embedding = model.embedding
        self.embed = self._new(
            -1, "embed_tokens", embedding.num_rows, (embedding.size,), sharding="row"
        )
        self.beside = {linear.role: self._add(-1, linear) for linear in model.beside}
        self.lm_head = self._add(-1, model.head.linear)
        self._add_beside(model, first_layer + model.num_layers)
        norms = model.placed_norms
        self.norms = (*norms, *(norm if norm and norm.bias else None for norm in norms))
        self.norm_size = max((norm.numbers for norm in norms if norm), default=0)
        self._score = model.score
        self._places = {(site.layer, site.role): site for site in self._all}
        self.in_features = np.array([site.in_features for site in self._all])
        self.out_features = np.zeros((len(self), MAX_PROJECTIONS), dtype=np.int64)
        for site in self._all:
            self.out_features[site.number, : len(site.out_features)] = site.out_features
        self.outside = np.array([site.role in MODEL_SITES for site in self._all])
        self.of_experts = np.array([site.experts > 0 for site in self._all])
        self.routers = np.array([site.role == "router" for site in self._all])
        self.products = np.array([max(site.experts, 1) for site in self._all])

    def _add_beside(self, model: ModelSpec, layer: int) -> None:
        """Number further sites behind those of layers."""

    def _of_step(self, layer: int, step: StepSpec, turn: int) -> tuple[BranchSites, ...]:
        """Number the sites of one step. turn: of its sum, where one branch gives all of that."""
        alone = turn if len(step.branches) == 1 else None
        return tuple(
            tuple(self._add(layer, linear, alone) for linear in branch.linears)
            for branch in step.branches
        )

    def _add(self, layer: int, linear: LinearSpec, turn: int | None = None) -> Site:
        experts = linear.experts if linear.stored is not None else 0
        sums = linear.sharding == "row" and not experts
        return self._new(
            layer,
            linear.role,
            linear.in_features,
            linear.widths,
            experts,
            linear.sharding,
            turn if sums else None,
        )

    def _new(
        self,
        layer: int,
        role: Role,
        in_features: int,
        out_features: tuple[int, ...],
        experts: int = 0,
        sharding: Sharding = "none",
        turn: int | None = None,
    ) -> Site:
        site = Site(len(self._all), layer, role, in_features, out_features, experts, sharding, turn)
        self._all.append(site)
        return site

    def score_tensors(
        self, labels: int, *, of_tokens: bool
    ) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and shapes of an adapter's score head, as of `ScoreSpec.tensors`."""
        score = self._score(of_tokens=of_tokens)
        return tuple(score.tensors(labels, self.lm_head.in_features))

    def table_width(self, site: int) -> int:
        """Features of a row of the embedding or of the head, as of the site's number."""
        head = self.lm_head.number
        width = self.in_features[head] if site == head else self.out_features[site, 0]
        return int(width)

    @property
    def summed_outputs(self) -> int:
        """Outputs of the sites whose inputs devices share out; 0 where there is one device."""
        if self.shard.count == 1:
            return 0
        shared = (site for site in self._all if site.sharding == "row" and not site.experts)
        return sum(sum(site.out_features) for site in shared)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Site]:
        return iter(self._all)

    def __getitem__(self, number: int) -> Site:
        return self._all[number]

    def find(self, layout: SiteLayout) -> Site:
        """Return the site that the layout describes. Raises ValueError for a site that this model
        does not have, or of other projections.
        """
        site = self._places.get((layout.layer, layout.role))
        if site is None:
            raise ValueError(f"the model has no site {layout.role} in layer {layout.layer}")
        projections = len(site.out_features)
        if not len(layout.ranks) == len(layout.scales) == len(layout.b_offsets) == projections:
            raise ValueError(f"{site.role}: one rank per projection expected, got {layout.ranks}")
        return site


class TowerSites(Sites):
    """Sites of an encoder of pictures, with numbers of their own. Its layers are numbered behind
    those of the text part, and behind them each product outside of layers.

    first_layer: its number. mergers: of `MergerSpec.linears`. patches: of the product of patches.
    """

    first_layer: int
    mergers: tuple[Site, ...]
    patches: Site

    def _add_beside(self, model: ModelSpec, layer: int) -> None:
        self.first_layer, linears = layer - model.num_layers, model.head.linears
        self.mergers = tuple(
            self._new(number, "merger", linear.in_features, linear.widths)
            for number, linear in enumerate(linears, layer)
        )
        embedding = model.embedding
        sizes = (embedding.vocab_size, (embedding.size,))
        self.patches = self._new(layer + len(linears), "merger", *sizes)

    def split(self, layout: SlabLayout) -> tuple[SlabLayout, SlabLayout]:
        """Divide a layout into what changes the text part, and what changes the encoder."""
        text = tuple(site for site in layout.sites if site.layer < self.first_layer)
        mine = tuple(site for site in layout.sites if site.layer >= self.first_layer)
        return replace(layout, sites=text), replace(layout, sites=mine, head=None, norms=None)


@dataclass(frozen=True, slots=True)
class PlacedTable:
    """Rows in place of the base's, those that the device has. site: its number. begin: bytes from
    the arena's start. ids: the token of each, as the device counts them
    (`loraplex.adapters.base`); None = all tokens. size: of the adapter's vocabulary."""

    site: int
    begin: int
    rows: int
    ids: tuple[int, ...] | None
    size: int


@dataclass(frozen=True, slots=True)
class PlacedHead:
    """A score head. begin: of the weight of its labels, bytes from the arena's start. of_tokens: as
    of OwnHead. others: numbers of its other tensors, and where they begin."""

    begin: int
    labels: int
    of_tokens: bool = False
    others: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PlacedNorms:
    """Weights and biases of norms. begin: bytes from the arena's start. places: as of
    `BaseNorm`."""

    begin: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlacedAdapter:
    """Place of one adapter's matrices in the arena.

    sites: int64 `[n]`, those that it changes. a: int64 `[n]`, bytes from the arena's start. b:
    int64 `[n, 3]`, the same of each projection. ranks: int64 `[n, 3]`; scales: float64 `[n, 3]`.
    What has rank 0 has no B. a_ranks: int64 `[n]`, rows of A: the sum of the ranks, or their
    largest where all projections share one A. At a site of experts each matrix is followed by those
    of the other experts. vectors: int64 `[n]`, where what it has for each output begins; -1 = it
    has nothing. vector_bits: int64 `[n, 3]`, as in `SiteLayout.vectors`. tables: of the embedding
    and the head. head: of a classifier. norms: in place of the base's.
    """

    sites: np.ndarray
    a: np.ndarray
    b: np.ndarray
    ranks: np.ndarray
    scales: np.ndarray
    a_ranks: np.ndarray
    vectors: np.ndarray
    vector_bits: np.ndarray
    tables: tuple[PlacedTable, ...] = ()
    head: PlacedHead | None = None
    norms: PlacedNorms | None = None

    @property
    def has_vectors(self) -> np.ndarray:
        """Say at which sites it changes the base's own product, bool `[n]`. Where it has all rows
        of a table there is none of that: `OwnRows` adds its bias."""
        whole = [table.site for table in self.tables if table.ids is None]
        return (self.vectors >= 0) & ~np.isin(self.sites, whole)


def place(
    known: Sites,
    layout: SlabLayout,
    extents: Sequence[int],
    *,
    item_bytes: int,
    arena_bytes: int,
) -> PlacedAdapter:
    """Compute the places of an adapter's matrices. extents: the first of each run. Raises
    ValueError for what does not fit model or arena.
    """
    sites = _int64([known.find(site).number for site in layout.sites])
    outputs = known.out_features[sites]
    ranks, b_offsets = np.zeros((2, *outputs.shape), dtype=np.int64)
    exists = outputs > 0
    ranks[exists] = _int64(chain.from_iterable(site.ranks for site in layout.sites))
    b_offsets[exists] = _int64(chain.from_iterable(site.b_offsets for site in layout.sites))
    scales = np.zeros(outputs.shape)
    scales[exists] = [*chain.from_iterable(site.scales for site in layout.sites)]
    a_offsets = _int64(site.a_offset for site in layout.sites)
    find = _Runs(layout, extents, arena_bytes).find
    used = ranks != 0
    b = np.zeros_like(b_offsets)
    shares_a = np.array([site.shares_a for site in layout.sites], dtype=bool)
    a_ranks = np.where(shares_a, ranks.max(axis=1, initial=0), ranks.sum(axis=1))
    of_one = known.products[sites] * item_bytes
    a = find(a_offsets, a_ranks * known.in_features[sites] * of_one)
    b[used] = find(b_offsets[used], (ranks * outputs * of_one[:, None])[used])
    vectors, bits = _place_vectors(layout, outputs, find)
    tables = tuple(_place_tables(known, layout, item_bytes, find))
    head = _place_head(known, layout, item_bytes, find)
    norms = _place_norms(known, layout, item_bytes, find)
    return PlacedAdapter(sites, a, b, ranks, scales, a_ranks, vectors, bits, tables, head, norms)


def _place_tables(
    known: Sites, layout: SlabLayout, item_bytes: int, find: _Find
) -> Iterator[PlacedTable]:
    vocab = known.vocab_size
    for site in layout.sites:
        if site.table_offset < 0:
            continue
        size = site.table_size or vocab
        if not 0 < size <= vocab + MAX_NEW_IDS:
            raise ValueError(f"{site.role}: a table of {size} rows")
        if site.role not in MODEL_SITES or not all(0 <= each < size for each in site.table_ids):
            raise ValueError(f"{site.role}: rows of tokens that the model does not have")
        ids = ids_of_shard(site.table_ids, vocab, known.shard) if site.table_ids else None
        rows = rows_of_each(size, vocab, known.shard.count) if ids is None else len(ids)
        number = known.find(site).number
        nbytes = rows * known.table_width(number) * item_bytes
        (begin,) = find(_int64([site.table_offset]), _int64([nbytes]))
        yield PlacedTable(number, int(begin), rows, ids, size)


def _place_norms(
    known: Sites, layout: SlabLayout, item_bytes: int, find: _Find
) -> PlacedNorms | None:
    if layout.norms is None:
        return None
    places = layout.norms.places
    there = range(len(known.norms))
    if not all(place in there and known.norms[place] is not None for place in places):
        raise ValueError("weights of norms that the model does not have")
    nbytes = len(places) * known.norm_size * item_bytes
    (begin,) = find(_int64([layout.norms.offset]), _int64([nbytes]))
    return PlacedNorms(int(begin), places)


def _place_head(
    known: Sites, layout: SlabLayout, item_bytes: int, find: _Find
) -> PlacedHead | None:
    if layout.head is None:
        return None
    head = layout.head
    shapes = [shape for _, shape in known.score_tensors(head.labels, of_tokens=head.of_tokens)]
    if not all(0 < number < len(shapes) for number in head.numbers):
        raise ValueError("a score head of parts that the model does not have")
    numbers = (0, *head.numbers)
    nbytes = _int64(prod(shapes[number]) * item_bytes for number in numbers)
    begin, *begins = find(_int64((head.offset, *head.offsets)), nbytes).tolist()
    others = tuple(zip(head.numbers, begins, strict=True))
    return PlacedHead(begin, head.labels, head.of_tokens, others)


def _place_vectors(
    layout: SlabLayout, outputs: np.ndarray, find: _Find
) -> tuple[np.ndarray, np.ndarray]:
    """`vectors` and `vector_bits` of a PlacedAdapter. outputs: int64 `[n, 3]`, of projections."""
    begins, bits = np.full(len(outputs), -1), np.zeros_like(outputs)
    has = np.array([bool(site.vectors) for site in layout.sites], dtype=bool)
    if not has.any():
        return begins, bits
    for row, site in enumerate(layout.sites):
        if site.vectors and len(site.vectors) != (outputs[row] > 0).sum():
            raise ValueError(f"{site.role}: one entry per projection expected, got {site.vectors}")
        bits[row, : len(site.vectors)] = site.vectors
    offsets = _int64(site.vectors_offset for site in layout.sites)
    rows = _int64(num_vectors(site.vectors) for site in layout.sites)
    begins[has] = find(offsets[has], (rows * _FLOAT32_BYTES * outputs.sum(axis=1))[has])
    return begins, bits


class _Runs:
    """A slab's bytes, found through the runs of extents that hold them."""

    def __init__(self, layout: SlabLayout, extents: Sequence[int], arena_bytes: int) -> None:
        if len(extents) != len(layout.runs):
            raise ValueError(f"expected {len(layout.runs)} runs of extents, got {len(extents)}")
        size = layout.extent_bytes
        self._arena_bytes = arena_bytes
        self._extents = extents
        self._starts = _int64(size * start for start in accumulate(layout.runs, initial=0))
        self._begins = _int64(size * extent for extent in extents)

    def find(self, offsets: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """Return the places of matrices in the arena. Raises ValueError when one leaves its run, or
        its run the arena.
        """
        runs = np.searchsorted(self._starts, offsets, side="right") - 1
        for i in _first((runs < 0) | (runs >= len(self._begins))):
            raise ValueError(f"offset {offsets[i]} lies outside the slab")
        inside = offsets - self._starts[runs]
        for i in _first(inside + nbytes > self._starts[runs + 1] - self._starts[runs]):
            raise ValueError(
                f"a tensor of {nbytes[i]} bytes at {offsets[i]} leaves its run of extents"
            )
        begins: np.ndarray = self._begins[runs] + inside
        for i in _first((begins < 0) | (begins > self._arena_bytes - nbytes)):
            raise ValueError(f"extent {self._extents[runs[i]]} lies outside the device arena")
        return begins


def _first(wrong: np.ndarray) -> list[int]:
    """The place of the first True, if any."""
    return [int(i) for i in np.flatnonzero(wrong)[:1]]


def _int64(values: Iterable[int]) -> np.ndarray:
    try:
        return np.array([*values], dtype=np.int64)
    except OverflowError:
        raise ValueError("a rank, offset or extent of the slab is out of range") from None
