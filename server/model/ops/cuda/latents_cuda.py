"""Attention to latents on a GPU: `kv_b` absorbed in queries and in results, or keys and values of
prompts unfolded by it, with LoRA.

`latents_torch.py` defines what is computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from loraplex.server.kernels.attention.latent_append import LatentNorm, NewTokens, latent_append
from loraplex.server.kernels.attention.rope_append import Rotation
from loraplex.server.kernels.attention.unfolded_attention import (
    UnfoldedKeys,
    unfolded_prompts,
    unfolded_tiles,
)
from loraplex.server.kernels.lora.expand import scale_outputs
from loraplex.server.kernels.lora.latent_lora import (
    MOST_ABSORBED,
    AbsorbedLora,
    HeadRows,
    LatentProduct,
    absorb,
)
from loraplex.server.kernels.lora.table import LoraTable
from loraplex.server.model.latent_weights import LatentWeights
from loraplex.server.model.lora.sites import Site
from loraplex.server.model.ops.attention.score_rules import score_rule
from loraplex.server.model.ops.attention.unfolding import (
    KeyPiece,
    are_unfolded,
    cut_pieces,
    leaves_graphs,
)
from loraplex.server.model.ops.cuda.device_lora import DeviceLora, LoraBatches
from loraplex.server.model.ops.ops import KVCache, StepLayout
from loraplex.server.model.ops.sizes import padded, row_sizes
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.spec.latent_spec import LatentSpec
from loraplex.server.model.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class AbsorbedProducts:
    """A layer's `kv_b` with a batch's adapters. site: of kv_b. early: programmatic launch."""

    weights: LatentWeights
    lora: DeviceLora | None
    table: LoraTable
    site: Site
    early: bool

    @property
    def _rows(self) -> HeadRows:
        return HeadRows(self.weights.spec.nope, self.weights.spec.value_dim)

    def _lora(self, count: int) -> AbsorbedLora | None:
        """Adapters of the first tokens."""
        if self.lora is None:
            return None
        return AbsorbedLora(self.lora.slots[:count], self.table, self.site.number, self._rows)

    def _of_few(self, weight: torch.Tensor, count: int) -> LatentProduct | None:
        """The product of the first tokens in one kernel, where these are few and no adapter changes
        the base's own. weight: `[heads, in, out]`."""
        is_plain = self.lora is None or self.lora.vectors is None
        if not (is_plain and 0 < count <= MOST_ABSORBED):
            return None
        return LatentProduct(weight, self._lora(count), self.early)

    def append(
        self,
        q: torch.Tensor,
        kept: torch.Tensor,
        pages: torch.Tensor,
        rotation: Rotation,
        new: NewTokens,
        count: int,
    ) -> torch.Tensor:
        """Write latents and rotated parts to pages, as `latent_append` does. Returns queries,
        rotated; of the first `count` tokens they have absorbed `kv_b`."""
        spec, keys = self.weights.spec, self.weights.keys
        queries = q.new_empty(len(q), len(keys), spec.head_dim)
        product = self._of_few(keys, count) if count == len(q) else None
        if product is None and count:
            scales = rotation.q_scale
            scales = None if scales is None else scales[new.turns[:count]]
            self._absorb(q[:count], scales, queries[:count])
        norm = LatentNorm(*self.weights.latent_norm)
        latent_append(q, kept, queries, pages, norm, rotation, new, product)
        return queries

    def _absorb(self, q: torch.Tensor, scales: torch.Tensor | None, found: torch.Tensor) -> None:
        """Compute queries but for the rotated part. q: `[tokens, heads * (nope + turned)]`; found:
        `[tokens, heads, latent + turned]`. scales: factors of tokens, float32 `[tokens]`."""
        spec, keys = self.weights.spec, self.weights.keys
        plain = q.view(len(q), len(keys), -1)[..., : spec.nope]
        scaled, lora = plain, self._lora(len(q))
        if self.lora is not None and self.lora.vectors is not None:
            scaled = self._scaled(plain, self.lora)
        latents = found[..., : spec.latent]
        torch.bmm(scaled.transpose(0, 1), keys, out=latents.transpose(0, 1))
        if lora is not None:
            absorb(plain, latents, LatentProduct(None, lora), "keys")
        if scales is not None:
            latents.mul_(scales[:, None, None])

    def values(self, read: torch.Tensor, out: torch.Tensor) -> None:
        """Compute results: read `[tokens, heads, latent]`, out `[tokens, heads, value_dim]`."""
        values = self.weights.values.transpose(1, 2)
        product, lora = self._of_few(values, len(read)), self._lora(len(read))
        if product is not None:
            absorb(read, out, product, "values")
        elif len(read):
            torch.bmm(read.transpose(0, 1), values, out=out.transpose(0, 1))
            if self.lora is not None and self.lora.vectors is not None:
                nope = self.weights.spec.nope
                whole = out.new_zeros(*out.shape[:2], sum(self._rows))
                whole[..., nope:] = out
                out.copy_(self._changed(whole, self.lora)[..., nope:])
            if lora is not None:
                absorb(read, out, LatentProduct(None, lora), "values")

    def _scaled(self, q: torch.Tensor, lora: DeviceLora) -> torch.Tensor:
        """Queries times the factors of keys. What is added to all keys alike changes no score."""
        whole = q.new_zeros(*q.shape[:2], sum(self._rows))
        added = self._changed(whole.clone(), lora)
        whole[..., : q.shape[2]] = q
        return (self._changed(whole, lora) - added)[..., : q.shape[2]]

    def _changed(self, whole: torch.Tensor, lora: DeviceLora) -> torch.Tensor:
        """Apply factors and addends to outputs of kv_b, `[tokens, heads, nope + value_dim]`."""
        assert lora.vectors is not None
        scale_outputs(whole.flatten(1), lora.slots[: len(whole)], lora.vectors, self.site.number)
        return whole


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A `KeyPiece` on the device. pages: int64 `[groups, keys]`, of each key; offsets: int64
    `[keys]`, places in these; tokens: int64 `[keys]`, in the flat batch, each of a key's prompt.
    tiles: as of `KeyPiece`, by tokens of prompts."""

    pages: torch.Tensor
    offsets: torch.Tensor
    tokens: torch.Tensor
    tiles: torch.Tensor


class Unfolding:
    """The prompts of a step whose keys and values are unfolded. absorbed: so many of the flat
    batch's first tokens are not all of such prompts."""

    def __init__(self, absorbed: int, pieces: Sequence[PlacedPiece], batches: LoraBatches) -> None:
        self.absorbed, self.pieces = absorbed, pieces
        self._batches = batches
        self._loras: list[DeviceLora] | None = None

    def loras(self, lora: DeviceLora | None) -> Sequence[DeviceLora | None]:
        """Return the adapters of each piece's keys. lora: of the step, the same in all layers."""
        if lora is None:
            return [None] * len(self.pieces)
        if self._loras is None:
            self._loras = [self._batches.like(lora, lora.slots[p.tokens]) for p in self.pieces]
        return self._loras


Product = Callable[[torch.Tensor, DeviceLora | None], torch.Tensor]


class Unfolder:
    """Plans which prompts' keys and values are unfolded, and attends to these."""

    def __init__(
        self, model: ModelSpec, cache: KVCache, batches: LoraBatches, max_tokens: int
    ) -> None:
        """Prepare for a model, which may keep no latents. max_tokens: of a step; as many keys are
        unfolded at once."""
        attentions = model.attentions.values()
        self._spec = next((of for of in attentions if isinstance(of, LatentSpec)), None)
        self._cache, self._batches = cache, batches
        self._room, self._sizes = max_tokens, row_sizes(1, max_tokens)
        if self._spec is not None:
            capability = torch.cuda.get_device_capability(cache.pool.device)
            self._shape = unfolded_tiles(self._spec.nope, self._spec.value_dim, capability)
            self._outer = score_rule(self._spec, cache.pool.device).outer

    def leaves_graphs(self, prompts: Sequence[tuple[int, int]]) -> bool:
        """Say whether a step is faster outside graphs, as of `unfolding.py`. prompts: of each the
        first token that is computed, and how many are."""
        if self._spec is None or not prompts:
            return False
        return leaves_graphs(self._spec, *np.array(prompts).T)

    def plan(self, layout: StepLayout) -> Unfolding | None:
        """Plan a step outside graphs. None where no prompt's keys are unfolded."""
        rows, starts, num_new = layout.prompts
        if self._spec is None or not len(rows):
            return None
        chosen = are_unfolded(self._spec, starts, num_new)
        if not chosen.any():
            return None
        ends = layout.num_decodes + np.cumsum(num_new)
        absorbed = int(ends[~chosen].max(initial=layout.num_decodes))
        pieces = cut_pieces(starts, num_new, chosen, self._shape.tokens, self._room)
        placed = [self._placed(layout, piece, ends - num_new) for piece in pieces]
        return Unfolding(absorbed, placed, self._batches)

    def _placed(self, layout: StepLayout, piece: KeyPiece, firsts: np.ndarray) -> PlacedPiece:
        """firsts: int64 `[prompts]`, each prompt's first token in the flat batch."""
        rows, _, _ = layout.prompts
        size, device = self._cache.page_size, self._cache.pool.device
        prompts, positions = (padded(of, self._sizes) for of in (piece.prompts, piece.positions))
        columns = (rows[prompts], positions // size, positions % size, firsts[prompts])
        of_row, pages, offsets, tokens = to_device(np.stack(columns), device)
        found = layout.page_table[:, of_row, pages]
        return PlacedPiece(found, offsets, tokens, to_device(piece.tiles, device))

    def attend(
        self,
        unfolding: Unfolding,
        layer: int,
        queries: tuple[torch.Tensor, torch.Tensor],
        product: Product,
        lora: DeviceLora | None,
        out: torch.Tensor,
    ) -> None:
        """Compute attention of the step's unfolded prompts. queries: of prompts, as q and turned of
        `unfolded_prompts`. product: of latents with `kv_b`. out: of prompts, `[tokens, heads,
        value_dim]`."""
        assert self._spec is not None
        kept = self._cache.of(layer)[0][:, :, 0]
        latents, parts = kept.split((self._spec.latent, self._spec.turned), dim=-1)
        group, heads = self._cache.groups.group(layer), out.shape[1]
        sums = out.new_empty(out.shape[:2], dtype=torch.float32)
        for piece, of in zip(unfolding.pieces, unfolding.loras(lora), strict=True):
            places = piece.pages[group], piece.offsets
            kv = product(latents[places], of).view(len(piece.offsets), heads, -1)
            keys = UnfoldedKeys(kv, parts[places])
            results = sums, out
            unfolded_prompts(*queries, keys, piece.tiles, self._shape, self._outer, *results)
