"""What both kinds of CUDA graphs do alike: which sizes are captured, and how."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def sizes_up_to(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Those of `sizes`, ascending, that steps of up to `most` need; the first in any case."""
    return tuple(size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < most)


def padded_size(sizes: Sequence[int], wanted: int) -> int:
    """The smallest of `sizes`, ascending, that takes `wanted`."""
    return next(size for size in sizes if size >= wanted)


def record(step: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """step: has run before, so that nothing is compiled in it. pool: a
    `graph_pool_handle`, of graphs that are never replayed at once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph
