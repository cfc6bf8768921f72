"""FlashInfer's operations in plain torch, and just enough of CUDA, for the GPU path on a CPU."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from loraplex.server.model import graphs, ops


class BatchPrefillWithPagedKVCacheWrapper:
    """In graphs a plan is of as many prompts as its buffers are for, the first one is of the most
    tokens, and others may be of fewer than `run` was captured with."""

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        self._captured = options.get("use_cuda_graph", False)
        self._prompts = len(options["qo_indptr_buf"]) - 1 if self._captured else 0
        self._most_tokens = 0

    def plan(
        self, qo_indptr: Any, indptr: Any, pages: Any, last: Any, *heads: int, **options: Any
    ) -> None:
        assert options["causal"]
        assert options["sm_scale"] == 1.0
        assert self._prompts in (0, len(last))
        self._page_size = heads[3]
        self._bounds = qo_indptr.tolist()
        self._most_tokens = self._most_tokens or self._bounds[-1]
        assert not self._captured or self._bounds[-1] <= self._most_tokens
        self._indptr, self._indices, self._last = indptr.tolist(), pages, last.tolist()

    def run(
        self,
        q: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        q_scale: float,
    ) -> None:
        assert self._bounds[-1] == len(q) or (self._captured and self._bounds[-1] < len(q))
        for i, last in enumerate(self._last):
            pages = self._indices[self._indptr[i] : self._indptr[i + 1]].long()
            if not len(pages):
                continue
            context = (len(pages) - 1) * self._page_size + last
            rows = slice(self._bounds[i], self._bounds[i + 1])
            out[rows] = _attend(q[rows], cache, pages, context, q_scale)


def _attend(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    pages: torch.Tensor,
    context: int,
    scale: float,
) -> torch.Tensor:
    """q `[n, heads, head_dim]`: the last n tokens of a context."""
    group = q.shape[1] // cache[0].shape[2]
    k, v = (
        c[pages].flatten(0, 1)[:context].repeat_interleave(group, dim=1).transpose(0, 1)
        for c in cache
    )
    seen = torch.arange(context) <= torch.arange(context - len(q), context)[:, None]
    attended = functional.scaled_dot_product_attention(
        q.transpose(0, 1), k, v, attn_mask=seen, scale=scale
    )
    return attended.transpose(0, 1)


class Stream:
    def wait_stream(self, other: "Stream") -> None: ...


class Replay:
    """A graph that runs its step again."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = step


def forget() -> None:
    """Of the modules that bound FlashInfer's names when they were imported, and what tests set."""
    of_ops = (
        *("attention_cuda", "prompt_attention", "flashinfer_prompts", "graph_attention"),
        *("lora_strategy", "device_lora", "lora_linear", "experts_cuda", "ops_cuda"),
    )
    of_graphs = ("decode_graphs", "token_graphs", "end_graphs", "fast_path")
    for room, names in ((ops, of_ops), (graphs, of_graphs)):
        for name in names:
            sys.modules.pop(f"{room.__name__}.{name}", None)
            if hasattr(room, name):
                delattr(room, name)


def install(patch: pytest.MonkeyPatch) -> None:
    """Until the test ends, the GPU path can be imported and run on tensors of the CPU."""
    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    patch.setitem(sys.modules, "flashinfer", module)
    forget()
    patch.setattr(torch, "zeros", _unpinned(torch.zeros))
    patch.setattr(torch, "empty", _unwritten(_unpinned(torch.empty)))
    patch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(torch.cuda, "Stream", lambda device=None: Stream())
    patch.setattr(torch.cuda, "current_stream", Stream)
    patch.setattr(torch.cuda, "stream", _use_stream)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    patch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    properties = SimpleNamespace(multi_processor_count=108)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@contextlib.contextmanager
def _use_stream(stream: Stream) -> Iterator[None]:
    yield


def _unwritten(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Whatever is read before it is written is seen in the results. Memory as it comes would also
    have signalling NaN, of which numpy warns."""

    def made(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = make(*shape, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    return made


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*shape, **options)

    return made
