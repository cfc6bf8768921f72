"""How CUDA graphs are captured."""

from collections.abc import Callable
from typing import Any

import torch


def record(step: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Capture a step as a CUDA graph. step: what it launches was launched before, since no kernel
    is compiled or loaded here. pool: a `graph_pool_handle`, of graphs that are never replayed at
    once.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph
