"""Biases of attention's scores by the distance of a key."""

import math

import torch

from loraplex.server.model.spec.model_spec import DistanceBias


def distance_biases(table: torch.Tensor, spec: DistanceBias, tokens: int) -> torch.Tensor:
    """Look up the bias of each distance. table: float32 `[buckets, heads]`. tokens: of the longest
    text -> float32 `[heads, 2 * tokens - 1]`, of keys `tokens - 1` before the query to as many
    behind it.
    """
    half = spec.buckets // 2
    away = torch.arange(1 - tokens, tokens)
    far, exact = away.abs(), half // 2
    logs = torch.log(far.float() / exact) / math.log(spec.most / exact) * (half - exact)
    wide = (exact + logs.clamp(min=0).long()).clamp(max=half - 1)
    buckets = torch.where(far < exact, far, wide) + (away > 0) * half
    return table[buckets].T.contiguous()


def biases_within(biases: torch.Tensor, tokens: int) -> torch.Tensor:
    """The biases of a text: `[heads, 2 * n - 1]` -> `[heads, tokens, tokens]`, a query a row."""
    places = torch.arange(tokens, device=biases.device)
    return biases[:, places - places[:, None] + biases.shape[1] // 2]
