"""Adapters on the device: the byte arena, the table that finds weights in it, LoRA of one batch.

Owns where an adapter's bytes lie and what they mean; which adapter lies where is the scheduler's.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch

from adapters.base import LAYER_SITES, MODEL_SITES, SITE_PROJECTIONS, SiteKind
from adapters.manifest import SiteLayout, SlabLayout
from server.kernels.table import LoraTable
from server.model.config import ModelConfig

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Projection:
    """b_t: B transposed, `[rank, out_features]`, of one projection. rank_*: its columns of the
    site's `x A^T`; out_*: its columns of the site's output."""

    b_t: torch.Tensor
    scale: float
    rank_begin: int
    rank_end: int
    out_begin: int
    out_end: int


@dataclass(frozen=True, slots=True)
class SiteWeights:
    """a_t: A transposed, `[in_features, sum(ranks)]`. All tensors are views into the arena."""

    a_t: torch.Tensor
    projections: tuple[Projection, ...]


@dataclass(frozen=True, slots=True)
class SiteShape:
    """A fused product of the base. out_features: of its projections, side by side in the output."""

    kind: SiteKind
    in_features: int
    out_features: tuple[int, ...]


class SiteIndex:
    """Numbers the sites: four a layer (`LAYER_SITES`), then `embed_tokens`, then `lm_head`."""

    def __init__(self, config: ModelConfig) -> None:
        hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
        self._layer: dict[SiteKind, SiteShape] = {
            "qkv": SiteShape("qkv", hidden, (config.q_size, config.kv_size, config.kv_size)),
            "o": SiteShape("o", config.q_size, (hidden,)),
            "gate_up": SiteShape("gate_up", hidden, (inner, inner)),
            "down": SiteShape("down", inner, (hidden,)),
        }
        self._model: dict[SiteKind, SiteShape] = {
            "embed_tokens": SiteShape("embed_tokens", vocab, (hidden,)),
            "lm_head": SiteShape("lm_head", hidden, (vocab,)),
        }
        self.num_layers = config.num_layers
        self.embed = config.num_layers * len(LAYER_SITES)
        self.lm_head = self.embed + 1
        self.num_sites = self.embed + 2

    def layer(self, layer: int) -> int:
        """The first of a layer's sites; they follow in the order of LAYER_SITES."""
        return layer * len(LAYER_SITES)

    def widths(self, site: int) -> tuple[int, ...]:
        """Output features of the site's projections, side by side."""
        if site < self.embed:
            return self._layer[LAYER_SITES[site % len(LAYER_SITES)]].out_features
        return self._model[MODEL_SITES[site - self.embed]].out_features

    def find(self, site: SiteLayout) -> tuple[int, SiteShape]:
        """Raises ValueError for a site that this model does not have."""
        if site.kind in self._model and site.layer == -1:
            return self.embed + MODEL_SITES.index(site.kind), self._model[site.kind]
        if site.kind in self._layer and 0 <= site.layer < self.num_layers:
            offset = LAYER_SITES.index(site.kind)
            return self.layer(site.layer) + offset, self._layer[site.kind]
        raise ValueError(f"the model has no site {site.kind} in layer {site.layer}")


class Adapter:
    """An adapter in the arena. `weights`: its tensors by site, made when somebody asks, since on a
    GPU kernels find them through the device table."""

    def __init__(
        self,
        placed: "_Placed",
        sites: Sequence[tuple[int, SiteLayout, SiteShape]],
        dtype: torch.dtype,
    ) -> None:
        self.sites = frozenset(index for index, _, _ in sites)
        self._sites = sites
        self._placed = placed
        self._dtype = dtype

    @cached_property
    def weights(self) -> dict[int, SiteWeights]:
        return {
            index: _site_weights(self._placed, site, shape, self._dtype)
            for index, site, shape in self._sites
        }


class AdapterTable:
    """The arena and, for every adapter slot, where its weights lie in it.

    Steps and copies touch different slots: a slot is bound when its copy is over, and bound again
    only when no step in flight reads it.
    """

    def __init__(
        self,
        sites: SiteIndex,
        *,
        slots: int,
        extents: int,
        extent_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.sites = sites
        self.dtype = dtype
        self.extent_bytes = extent_bytes
        self.arena = torch.zeros(extents * extent_bytes, dtype=torch.uint8, device=device)
        self.device_table = LoraTable(sites.num_sites, slots, device)
        self._slots: list[Adapter | None] = [None] * slots
        self._changes_model = np.zeros(slots, dtype=bool)

    def prepare(self, slot: int, layout: SlabLayout, device_extents: Sequence[int]) -> Adapter:
        """Find an adapter's weights in the arena and write its records of the device table.

        May run beside steps that do not use the slot. Raises ValueError for a layout that does not
        fit this model or arena.
        """
        if DTYPES[layout.dtype] != self.dtype:
            raise ValueError(f"the slab is {layout.dtype}, the engine computes in {self.dtype}")
        placed = _Placed(self.arena, layout, device_extents)
        sites = [(*self.sites.find(site), site) for site in layout.sites]
        self.device_table.clear(slot)
        for index, shape, site in sites:
            self._write(slot, index, shape, site, placed)
        return Adapter(placed, [(i, site, shape) for i, shape, site in sites], self.dtype)

    def _write(
        self, slot: int, index: int, shape: SiteShape, site: SiteLayout, placed: "_Placed"
    ) -> None:
        if len(site.ranks) != len(SITE_PROJECTIONS[site.kind]):
            raise ValueError(f"{site.kind}: one rank per projection expected, got {site.ranks}")
        item, arena = self.dtype.itemsize, self.arena.data_ptr()
        a_bytes = sum(site.ranks) * shape.in_features * item
        self.device_table.write(
            slot,
            index,
            a_ptr=arena + placed.position(site.a_offset, a_bytes),
            b_ptrs=[
                arena + placed.position(offset, rank * width * item) if rank else 0
                for rank, width, offset in zip(
                    site.ranks, shape.out_features, site.b_offsets, strict=True
                )
            ],
            ranks=site.ranks,
            scales=site.scales,
        )

    def bind(self, slot: int, adapter: Adapter) -> None:
        """Let steps launched from now on use the slot. Between steps only."""
        self.device_table.upload(slot)
        self._slots[slot] = adapter
        self._changes_model[slot] = any(site >= self.sites.embed for site in adapter.sites)

    def changes_model(self, token_slots: np.ndarray) -> bool:
        """Whether some adapter of a batch changes the embedding or the head."""
        used = token_slots[token_slots >= 0]
        return bool(self._changes_model[used].any())

    def batch(self, token_slots: np.ndarray) -> "LoraBatch | None":
        """token_slots: int64 `[tokens]`, -1 = the base; equal neighbours form one segment.
        None where no token has an adapter."""
        if not token_slots.size or token_slots.max() < 0:
            return None
        changes = np.flatnonzero(np.diff(token_slots)) + 1
        borders = [0, *changes.tolist(), len(token_slots)]
        segments = tuple(
            Segment(begin, end, self._weights(token_slots[begin]))
            for begin, end in pairwise(borders)
            if token_slots[begin] >= 0
        )
        sites = frozenset[int]().union(*(s.weights for s in segments))
        return LoraBatch(segments, sites, torch.from_numpy(token_slots))

    def _weights(self, slot: int) -> dict[int, SiteWeights]:
        adapter = self._slots[slot]
        return {} if adapter is None else adapter.weights


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens begin .. end of a batch use one adapter."""

    begin: int
    end: int
    weights: dict[int, SiteWeights]


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """Adapters of one batch. sites: those that some adapter of it changes; others cost nothing.
    token_slots: int64 `[tokens]` on the host, for kernels that route by token."""

    segments: tuple[Segment, ...]
    sites: frozenset[int]
    token_slots: torch.Tensor

    def add(self, site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """y += scale (x A^T) B^T of each token's adapter; x `[tokens, in]`, y `[tokens, out]`."""
        if site not in self.sites:
            return
        for segment in self.segments:
            weights = segment.weights.get(site)
            if weights is not None:
                bridge = x[segment.begin : segment.end] @ weights.a_t
                _expand(weights, bridge, y[segment.begin : segment.end])

    def add_embedding(self, site: int, token_ids: torch.Tensor, y: torch.Tensor) -> None:
        """The same for an embedding: a token's row of A^T is gathered."""
        if site not in self.sites:
            return
        for segment in self.segments:
            weights = segment.weights.get(site)
            if weights is not None:
                bridge = weights.a_t[token_ids[segment.begin : segment.end]]
                _expand(weights, bridge, y[segment.begin : segment.end])


def _expand(weights: SiteWeights, bridge: torch.Tensor, y: torch.Tensor) -> None:
    for p in weights.projections:
        if p.out_end - p.out_begin == y.shape[1]:
            y.addmm_(bridge, p.b_t, alpha=p.scale)
            continue
        y[:, p.out_begin : p.out_end].addmm_(
            bridge[:, p.rank_begin : p.rank_end], p.b_t, alpha=p.scale
        )


class _Placed:
    """A slab's bytes, found through the runs of extents that hold them."""

    def __init__(self, arena: torch.Tensor, layout: SlabLayout, extents: Sequence[int]) -> None:
        if len(extents) != len(layout.runs):
            raise ValueError(f"expected {len(layout.runs)} runs of extents, got {len(extents)}")
        self.arena = arena
        self.arena_bytes = arena.numel()
        self.extents = extents
        self.extent_bytes = layout.extent_bytes
        self.starts = [0, *accumulate(layout.runs)]

    def position(self, offset: int, nbytes: int) -> int:
        """Of the arena's byte where a tensor begins. Raises ValueError when the tensor leaves its
        run, or its run the arena."""
        run = bisect_right(self.starts, offset // self.extent_bytes) - 1
        if not 0 <= run < len(self.extents):
            raise ValueError(f"offset {offset} lies outside the slab")
        inside = offset - self.starts[run] * self.extent_bytes
        if inside + nbytes > (self.starts[run + 1] - self.starts[run]) * self.extent_bytes:
            raise ValueError(f"a tensor of {nbytes} bytes at {offset} leaves its run of extents")
        begin = self.extents[run] * self.extent_bytes + inside
        if begin < 0 or begin + nbytes > self.arena_bytes:
            raise ValueError(f"extent {self.extents[run]} lies outside the device arena")
        return begin

    def view(self, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        nbytes = shape[0] * shape[1] * dtype.itemsize
        begin = self.position(offset, nbytes)
        return self.arena[begin : begin + nbytes].view(dtype).view(shape)


def _site_weights(
    placed: _Placed, site: SiteLayout, shape: SiteShape, dtype: torch.dtype
) -> SiteWeights:
    total = sum(site.ranks)
    columns = list(accumulate((0, *site.ranks)))
    outputs = list(accumulate((0, *shape.out_features)))
    if site.kind == "embed_tokens":  # stored transposed
        a_t = placed.view(site.a_offset, (shape.in_features, total), dtype)
    else:
        a_t = placed.view(site.a_offset, (total, shape.in_features), dtype).T
    projections = tuple(
        Projection(
            b_t=placed.view(offset, (shape.out_features[i], rank), dtype).T,
            scale=scale,
            rank_begin=columns[i],
            rank_end=columns[i + 1],
            out_begin=outputs[i],
            out_end=outputs[i + 1],
        )
        for i, (rank, scale, offset) in enumerate(
            zip(site.ranks, site.scales, site.b_offsets, strict=True)
        )
        if rank
    )
    return SiteWeights(a_t, projections)
