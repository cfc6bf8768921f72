"""Attention of whole texts against the obvious attention in float64."""

import numpy as np
import pytest
import torch

from loraplex.server.kernels.attention.scores import ScoreRule
from loraplex.server.kernels.attention.whole_attention import cut_texts, whole_attention

LENGTHS = [1, 70, 3, 64, 129]
PLAIN = ScoreRule(0.3)


def expected(
    qkv: torch.Tensor, heads: tuple[int, int], rule: ScoreRule, biases: torch.Tensor | None
) -> torch.Tensor:
    """Of one text."""
    q, k, v = (x.double().transpose(0, 1) for x in qkv.split((heads[0], heads[1], heads[1]), dim=1))
    k, v = (x.repeat_interleave(heads[0] // heads[1], dim=0) for x in (k, v))
    scores = q @ k.mT * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    places = torch.arange(len(qkv))
    away = places - places[:, None]
    if biases is not None:
        scores = scores + biases.double()[:, away + biases.shape[1] // 2]
    if rule.window is not None:
        scores = scores.masked_fill(away.abs() >= rule.window, -torch.inf)
    out: torch.Tensor = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    return out


def run(
    heads: tuple[int, int], head_dim: int, rule: ScoreRule, biased: bool, device: torch.device
) -> float:
    """The largest error, of texts of all lengths."""
    torch.manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), heads[0] + 2 * heads[1], head_dim, device=device)
    biases = torch.randn(heads[0], 2 * max(LENGTHS) - 1, device=device) if biased else None
    out = torch.full((len(qkv), heads[0] * head_dim), float("nan"), device=device)
    cut = np.pad(cut_texts(np.array(LENGTHS)), ((0, 2), (0, 0)))  # two of no text
    tiles = torch.from_numpy(cut).to(device)
    whole_attention(qkv, heads, tiles, rule, biases, out)
    texts, found = qkv.cpu().split(LENGTHS), out.cpu().split(LENGTHS)
    of_cpu = None if biases is None else biases.cpu()
    pairs = zip(texts, found, strict=True)
    return max(float((ours - expected(x, heads, rule, of_cpu)).abs().max()) for x, ours in pairs)


@pytest.mark.parametrize(
    ("heads", "head_dim", "rule", "biased"),
    [
        ((3, 3), 16, PLAIN, False),
        ((4, 2), 48, ScoreRule(0.2, window=5), False),
        ((2, 1), 32, ScoreRule(0.2, softcap=3.0), True),
        ((1, 1), 256, ScoreRule(0.1, window=70), False),
    ],
)
def test_against_the_obvious(
    heads: tuple[int, int], head_dim: int, rule: ScoreRule, biased: bool, device: torch.device
) -> None:
    # A GPU's float32 products are exact here: "ieee".
    assert run(heads, head_dim, rule, biased, device) < 1e-5
