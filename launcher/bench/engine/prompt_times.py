"""Times of the project's own attention of prompts: one layer of any shape, beside its floor.

Keys and values are random, in pages in random order. Every time is of one CUDA graph.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch

from loraplex.launcher.bench.engine.grid import matrix_rate
from loraplex.launcher.bench.engine.lora_kernels import graph_ms
from loraplex.launcher.bench.errors import BenchError
from loraplex.server.kernels.attention.pages import CachePages
from loraplex.server.kernels.attention.prompt_attention import (
    cut_prompts,
    prompt_attention,
    tile_shape,
)
from loraplex.server.kernels.attention.scores import ScoreRule

DTYPE, PAGE = torch.bfloat16, 16


@dataclass(frozen=True, slots=True)
class PromptLayer:
    """Attention of one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def rule(self) -> ScoreRule:
        return ScoreRule(self.head_dim**-0.5, self.softcap, self.window)


@dataclass(frozen=True, slots=True)
class PromptTime:
    """Chunks of `tokens` tokens, each behind `before` of its prompt. floor_ms: the operations of
    all pairs that see one another, at the matrix rate of this run."""

    chunks: int
    tokens: int
    before: int
    ms: float
    floor_ms: float


def visible_pairs(tokens: int, before: int, window: int | None) -> int:
    """Of a chunk's queries with the keys that they see."""
    seen = np.arange(before, before + tokens, dtype=np.int64) + 1
    return int((seen if window is None else np.minimum(seen, window)).sum())


def measure(
    layer: PromptLayer, points: Sequence[tuple[int, int, int]], replays: int
) -> Iterator[PromptTime]:
    """points: chunks, tokens, before. Raises BenchError where the heads do not fit or the device
    has no memory for a point."""
    if layer.heads % layer.kv_heads:
        raise BenchError(f"{layer.heads} query heads are no multiple of {layer.kv_heads} kv heads")
    rate = matrix_rate("cuda", DTYPE)
    for chunks, tokens, before in points:
        pairs = chunks * visible_pairs(tokens, before, layer.window)
        floor = 4 * layer.head_dim * layer.heads * pairs / rate
        try:
            ms = graph_ms(_launch(layer, chunks, tokens, before), replays)
        except torch.OutOfMemoryError:
            raise BenchError(f"no memory for {chunks} chunks behind {before} tokens") from None
        yield PromptTime(chunks, tokens, before, round(ms, 4), round(1e3 * floor, 4))


def _launch(layer: PromptLayer, chunks: int, tokens: int, before: int) -> "partial[None]":
    device = torch.device("cuda")
    shape = tile_shape(
        layer.heads // layer.kv_heads, layer.head_dim, torch.cuda.get_device_capability(device)
    )
    starts, num_new = np.full(chunks, before), np.full(chunks, tokens)
    tiles = torch.from_numpy(cut_prompts(np.arange(chunks), starts, num_new, shape.tokens))
    pages = -(-(before + tokens) // PAGE)
    page_table = torch.randperm(chunks * pages, device=device).view(chunks, pages)
    of_pages = (chunks * pages, PAGE, layer.kv_heads, layer.head_dim)
    k, v = (torch.randn(of_pages, dtype=DTYPE, device=device) for _ in "kv")
    q = torch.randn(chunks * tokens, layer.heads, layer.head_dim, dtype=DTYPE, device=device)
    sinks = torch.zeros(layer.heads, device=device) if layer.sinks else None
    context = (page_table, tiles.to(device), shape, layer.rule, sinks)
    return partial(prompt_attention, q, CachePages(k, v), *context, torch.empty_like(q))


def table(results: Sequence[PromptTime]) -> str:
    """For a person."""
    rows = [asdict(result) for result in results]
    lines = ["".join(f"{name:>10}" for name in rows[0])]
    lines += ["".join(f"{value:>10}" for value in row.values()) for row in rows]
    return "\n".join(lines)
