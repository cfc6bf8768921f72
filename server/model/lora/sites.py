"""The sites of a model, and where an adapter's matrices of them lie in the device's arena.

Everything of one adapter at once, in arrays: a load must not keep the step loop from the
interpreter.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from adapters.base import SiteKind
from adapters.manifest import SiteLayout, SlabLayout
from server.kernels.lora.table import MAX_PROJECTIONS
from server.model.spec import LinearSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Site:
    """One fused product of the base, which adapters may change.

    number: its record in the device's table. layer: 0-based, -1 outside the layers. out_features:
    of its projections, side by side in the output.
    """

    number: int
    layer: int
    kind: SiteKind
    in_features: int
    out_features: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerSites:
    """The sites of one layer, in the order of `LayerSpec.linears`."""

    qkv: Site
    o: Site
    gate_up: Site
    down: Site


class Sites:
    """All sites of a model, numbered layer by layer, then `embed_tokens`, then `lm_head`.

    in_features: int64 `[sites]`. out_features: int64 `[sites, 3]`, 0 = no such projection.
    outside: bool `[sites]`, True for the embedding and the head.
    """

    def __init__(self, model: ModelSpec) -> None:
        self._all: list[Site] = []
        self.layers = tuple(
            LayerSites(*(self._add(number, linear) for linear in layer.linears))
            for number, layer in enumerate(model.layers)
        )
        embedding = model.embedding
        self.embed = self._new(-1, "embed_tokens", embedding.vocab_size, (embedding.size,))
        self.lm_head = self._add(-1, model.head.linear)
        self._places = {(site.layer, site.kind): site for site in self._all}
        self.in_features = np.array([site.in_features for site in self._all])
        self.out_features = np.zeros((len(self), MAX_PROJECTIONS), dtype=np.int64)
        for site in self._all:
            self.out_features[site.number, : len(site.out_features)] = site.out_features
        self.outside = np.array([site.layer < 0 for site in self._all])

    def _add(self, layer: int, linear: LinearSpec) -> Site:
        return self._new(layer, linear.kind, linear.in_features, linear.widths)

    def _new(
        self, layer: int, kind: SiteKind, in_features: int, out_features: tuple[int, ...]
    ) -> Site:
        self._all.append(Site(len(self._all), layer, kind, in_features, out_features))
        return self._all[-1]

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> Site:
        return self._all[number]

    def find(self, layout: SiteLayout) -> Site:
        """Raises ValueError for a site that this model does not have, or of other projections."""
        site = self._places.get((layout.layer, layout.kind))
        if site is None:
            raise ValueError(f"the model has no site {layout.kind} in layer {layout.layer}")
        projections = len(site.out_features)
        if not len(layout.ranks) == len(layout.scales) == len(layout.b_offsets) == projections:
            raise ValueError(f"{site.kind}: one rank per projection expected, got {layout.ranks}")
        return site


@dataclass(frozen=True, slots=True)
class PlacedAdapter:
    """Where one adapter's matrices begin in the arena.

    sites: int64 `[n]`, those that it changes. a: int64 `[n]`, bytes from the arena's start.
    b: int64 `[n, 3]`, the same of each projection. ranks: int64 `[n, 3]`; scales: float64 `[n, 3]`.
    What has rank 0 has no B.
    """

    sites: np.ndarray
    a: np.ndarray
    b: np.ndarray
    ranks: np.ndarray
    scales: np.ndarray


def place(
    known: Sites,
    layout: SlabLayout,
    extents: Sequence[int],
    *,
    item_bytes: int,
    arena_bytes: int,
) -> PlacedAdapter:
    """extents: the first of each run. Raises ValueError for what does not fit model or arena."""
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
    a = find(a_offsets, ranks.sum(axis=1) * known.in_features[sites] * item_bytes)
    b[used] = find(b_offsets[used], (ranks * outputs)[used] * item_bytes)
    return PlacedAdapter(sites, a, b, ranks, scales)


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
        """Where matrices begin in the arena. Raises ValueError when one leaves its run, or its run
        the arena."""
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
