"""The sites of a model, and where an adapter's matrices of them lie in the device's arena.

Everything of one adapter at once, in arrays: a load must not keep the step loop from the
interpreter.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from adapters.base import LAYER_SITES, MODEL_SITES, SiteKind
from adapters.manifest import SiteLayout, SlabLayout
from server.kernels.lora.table import MAX_PROJECTIONS
from server.model.checkpoint.config import ModelConfig


@dataclass(frozen=True, slots=True)
class SiteShape:
    """A fused product of the base. out_features: of its projections, side by side in the output."""

    kind: SiteKind
    in_features: int
    out_features: tuple[int, ...]


class SiteIndex:
    """Numbers the sites: four a layer (`LAYER_SITES`), then `embed_tokens`, then `lm_head`.

    in_features: int64 `[sites]`. out_features: int64 `[sites, 3]`, 0 = no such projection.
    """

    def __init__(self, config: ModelConfig) -> None:
        hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
        layer = (
            SiteShape("qkv", hidden, (config.q_size, config.kv_size, config.kv_size)),
            SiteShape("o", config.q_size, (hidden,)),
            SiteShape("gate_up", hidden, (inner, inner)),
            SiteShape("down", inner, (hidden,)),
        )
        model = (
            SiteShape("embed_tokens", vocab, (hidden,)),
            SiteShape("lm_head", hidden, (vocab,)),
        )
        self._shapes = layer * config.num_layers + model
        self.embed = config.num_layers * len(LAYER_SITES)
        self.lm_head = self.embed + 1
        self.num_sites = self.embed + 2
        places = [(n, kind) for n in range(config.num_layers) for kind in LAYER_SITES]
        places += [(-1, kind) for kind in MODEL_SITES]
        self._numbers = {place: number for number, place in enumerate(places)}
        self.in_features = np.array([shape.in_features for shape in self._shapes])
        self.out_features = np.zeros((self.num_sites, MAX_PROJECTIONS), dtype=np.int64)
        for number, shape in enumerate(self._shapes):
            self.out_features[number, : len(shape.out_features)] = shape.out_features

    def layer(self, layer: int) -> int:
        """The first of a layer's sites; they follow in the order of LAYER_SITES."""
        return layer * len(LAYER_SITES)

    def shape(self, site: int) -> SiteShape:
        return self._shapes[site]

    def widths(self, site: int) -> tuple[int, ...]:
        """Output features of the site's projections, side by side."""
        return self._shapes[site].out_features

    def find(self, site: SiteLayout) -> int:
        """Raises ValueError for a site that this model does not have, or of other projections."""
        number = self._numbers.get((site.layer, site.kind))
        if number is None:
            raise ValueError(f"the model has no site {site.kind} in layer {site.layer}")
        projections = len(self._shapes[number].out_features)
        if not len(site.ranks) == len(site.scales) == len(site.b_offsets) == projections:
            raise ValueError(f"{site.kind}: one rank per projection expected, got {site.ranks}")
        return number


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
    index: SiteIndex,
    layout: SlabLayout,
    extents: Sequence[int],
    *,
    item_bytes: int,
    arena_bytes: int,
) -> PlacedAdapter:
    """extents: the first of each run. Raises ValueError for what does not fit model or arena."""
    sites = _int64([index.find(site) for site in layout.sites])
    outputs = index.out_features[sites]
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
    a = find(a_offsets, ranks.sum(axis=1) * index.in_features[sites] * item_bytes)
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
