"""Attention whose scores are also of tokens with vectors of distances, in torch.

Queries and keys of distances are made by matrices that adapters may change: each adapter of a step
has its own.
"""

from collections.abc import Sequence
from itertools import groupby

import torch

from loraplex.server.model.lora.lora import LoraBatch, Segment
from loraplex.server.model.ops.ops import DistanceProduct
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.spec.model_spec import AttentionSpec, DistanceVectors


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
