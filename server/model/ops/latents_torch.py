"""Attention to latents by torch: what lies before and behind its pass over the pages.

`kv_b` is absorbed. A head's query meets latents in place of keys, `q K`, and what the head reads of
latents becomes its value, `V o`. LoRA of `kv_b` is absorbed likewise.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from loraplex.server.model.latent_weights import LatentWeights
from loraplex.server.model.lora.arena_weights import SiteWeights
from loraplex.server.model.lora.lora import LoraBatch
from loraplex.server.model.lora.sites import Site
from loraplex.server.model.ops.pointwise import rms_norm
from loraplex.server.model.ops.rope import rotate
from loraplex.server.model.ops.turned_heads import StepTurns


@dataclass(frozen=True, slots=True)
class AbsorbedKeys:
    """A layer's `kv_b` with a batch's adapters. site: of kv_b."""

    weights: LatentWeights
    lora: LoraBatch | None
    site: Site

    def queries_and_keys(
        self, q: torch.Tensor, kept: torch.Tensor, turns: StepTurns
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute queries, `[tokens, 1, heads, latent + turned]`, and keys, `[tokens, 1, latent +
        turned]`. q, kept: as of `Ops.attend_latents`, complete.
        """
        spec = self.weights.spec
        plain, turned = q.view(len(q), -1, spec.nope + spec.turned).split(
            (spec.nope, spec.turned), dim=-1
        )
        latent, part = kept.split((spec.latent, spec.turned), dim=-1)
        latent, part = rms_norm(latent, self.weights.latent_norm)[:, None], part[:, None]
        if spec.rope is not None:
            angles = turns.rope[spec.rope, spec.head_dim]
            turned, part = (rotate(each, *angles, spec.rope) for each in (turned, part))
        queries = torch.cat((self._absorbed(plain), turned), dim=-1)
        if spec.q_scale is not None:
            queries = queries * turns.q_scales[spec.q_scale]
        return queries[:, None], torch.cat((latent, part), dim=-1)

    def _absorbed(self, q: torch.Tensor) -> torch.Tensor:
        """`[tokens, heads, nope]` -> `[tokens, heads, latent]`."""
        keys, nope = self.weights.keys, self.weights.spec.nope
        scaled = q
        for rows, of in self._of_segments():
            if of.vectors is not None:  # what is added to all keys alike changes no score
                scaled = scaled.clone() if scaled is q else scaled
                scaled[rows] *= self._by_head(of.vectors[0])[:, :nope].to(q.dtype)
        found = torch.einsum("thn,hnl->thl", scaled, keys)
        for rows, of in self._of_segments():
            for projection in of.projections:
                b = self._by_head(projection.b_t.T)[:, :nope]
                bridge = torch.einsum("thn,hnr->thr", q[rows], b)
                found[rows] += projection.scale * (bridge @ of.a_t.T)
        return found

    def values(self, read: torch.Tensor) -> torch.Tensor:
        """Compute heads' results. read: what they read of latents, `[tokens, heads, latent]` ->
        `[tokens, heads * value_dim]`.
        """
        nope = self.weights.spec.nope
        found = torch.einsum("thl,hvl->thv", read, self.weights.values)
        for rows, of in self._of_segments():
            if of.vectors is not None:
                factors, addends = (self._by_head(each)[:, nope:] for each in of.vectors[:2])
                found[rows] = torch.addcmul(addends, found[rows], factors).to(found.dtype)
            for projection in of.projections:
                b = self._by_head(projection.b_t.T)[:, nope:]
                bridge = read[rows] @ of.a_t
                found[rows] += projection.scale * torch.einsum("thr,hvr->thv", bridge, b)
        result: torch.Tensor = found.flatten(1)
        return result

    def _by_head(self, of_outputs: torch.Tensor) -> torch.Tensor:
        """`[outputs, ...]` of kv_b -> `[heads, nope + value_dim, ...]`."""
        head = self.weights.spec.nope + self.weights.spec.value_dim
        return of_outputs.reshape(-1, head, *of_outputs.shape[1:])

    def _of_segments(self) -> Iterator[tuple[slice, SiteWeights]]:
        """Rows of each adapter that changes kv_b, and its weights."""
        for segment in () if self.lora is None else self.lora.segments:
            weights = segment.weights.get(self.site.number)
            if weights is not None:
                yield slice(segment.begin, segment.end), weights
