"""Attention to latents, and attention with vectors of distances, by torch.

`kv_b` is absorbed. A head's query meets latents in place of keys, `q K`, and what the head reads of
latents becomes its value, `V o`. LoRA of `kv_b` is absorbed likewise. Queries and keys of distances
are made by matrices that adapters may change: each adapter of a step has its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from loraplex.server.model.latent_weights import LatentWeights
from loraplex.server.model.lora.arena_weights import SiteWeights
from loraplex.server.model.lora.lora import LoraBatch, Segment
from loraplex.server.model.lora.sites import Site
from loraplex.server.model.ops.ops import DistanceProduct
from loraplex.server.model.ops.products_torch import rms_norm
from loraplex.server.model.ops.rope import rotate
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.ops.turned_heads import StepTurns
from loraplex.server.model.spec.model_spec import AttentionSpec, DistanceVectors


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


def rows_of_distances(of: DistanceVectors, tokens: int) -> torch.Tensor:
    """Find the row of each distance: int64 `[2 * tokens - 1]`, of keys `tokens - 1` behind the
    query to as many before it.
    """
    away = torch.arange(1 - tokens, tokens)
    middle = of.buckets // 2
    if middle:
        far = away.abs().clamp(min=middle)
        whole = torch.log(torch.tensor((of.most - 1) / middle))
        parts = torch.ceil(torch.log(far / middle) / whole * (middle - 1))
        shared = (parts.long() + middle) * away.sign()
        away = torch.where(away.abs() <= middle, away, shared)
    return (away + of.span).clamp(0, 2 * of.span - 1)


def attend_distances(
    specs: tuple[AttentionSpec, DistanceVectors],
    qkv: torch.Tensor,
    texts: Sequence[slice],
    vectors: DistanceProduct,
    lora: LoraBatch | None,
) -> torch.Tensor:
    """Compute attention as `Ops.attend_distances` says. texts: tokens of each."""
    spec, of = specs
    heads = qkv.view(len(qkv), -1, spec.head_dim).transpose(0, 1)
    out = heads.new_empty(spec.num_heads, len(qkv), spec.head_dim)
    longest = max((text.stop - text.start for text in texts), default=1)
    rows = rows_of_distances(of, longest)
    first, last = int(rows[0]), int(rows[-1])  # rows rise with distances
    table = vectors.table[first : last + 1]
    rows = to_device(rows.sub_(first).numpy(), qkv.device)
    product = vectors.linear.run(table)
    segments = () if lora is None else lora.segments
    for number, group in groupby(texts, lambda text: _adapter_of(text, segments)):
        made = product
        if number >= 0:
            made = segments[number].added(vectors.site, table, product.clone())
        q_and_k = made.view(len(table), -1, spec.head_dim).transpose(0, 1)
        for text in group:
            count = text.stop - text.start
            near = torch.arange(count, device=rows.device)
            own = rows[near[:, None] - near + longest - 1]
            out[:, text] = _attended(spec, of, heads[:, text], q_and_k, own)
    return out.transpose(0, 1).flatten(1)


def _adapter_of(text: slice, segments: Sequence[Segment]) -> int:
    """The number of the segment that has the text; -1 = none has."""
    found = (n for n, each in enumerate(segments) if each.begin <= text.start < each.end)
    return next(found, -1)


def _attended(
    spec: AttentionSpec,
    of: DistanceVectors,
    qkv: torch.Tensor,
    q_and_k: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Compute one text. qkv: `[3 heads, tokens, head_dim]`; q_and_k: of distances, `[heads or more,
    rows, head_dim]`, queries first where there are both; rows: int64 `[tokens, tokens]`, of each
    pair, a query a row.
    """
    q, k, v = qkv.chunk(3)
    of_both = q_and_k.split(spec.num_heads)[:2]
    scores = q @ k.transpose(1, 2)
    if of.meets_queries:
        found = q @ of_both[-1].transpose(1, 2)
        scores = scores + found.gather(2, rows.expand_as(scores))
    if of.meets_keys:
        found = k @ of_both[0].transpose(1, 2)
        scores = scores + found.gather(2, rows.T.expand_as(scores)).transpose(1, 2)
    weights = (scores * spec.scale).softmax(-1, dtype=torch.float32)
    return weights.to(v.dtype) @ v
