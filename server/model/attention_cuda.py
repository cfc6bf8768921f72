"""FlashInfer's paged attention: plans of mixed steps, and plans that a captured graph reads.

A plan is made on the host from lengths that the host knows; page lists are gathered on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flashinfer
import numpy as np
import torch

from server.kernels.decode_inputs import gather_pages
from server.model.config import ModelConfig
from server.model.ops import KVCache, StepLayout

_WORKSPACE_BYTES = 256 << 20
_INT_WORKSPACE_BYTES = 8 << 20
# A plan's upload may still be on its way while the next is made: two a step, three steps.
_PLAN_BUFFERS = 6
_HEAD_DIMS = (64, 128, 256)
# Above so many sequences a decode fills the device without cutting contexts in pieces.
_SPLIT_BATCH = 48
# Without pieces, one context so much longer than the rest would be waited for.
_LONG_CONTEXT = 4096
_SKEW = 8


def unsupported(model: ModelConfig, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Why FlashInfer cannot serve this model on a device of this compute capability, or None."""
    if capability < (8, 0):
        found = ".".join(map(str, capability))
        return f"FlashInfer needs compute capability 8.0, this GPU has {found}"
    if dtype == torch.float32:
        return "FlashInfer computes in bfloat16 and float16, not in float32"
    if model.head_dim not in _HEAD_DIMS:
        return f"FlashInfer has head sizes {_HEAD_DIMS}, the model {model.head_dim}"
    if any(window is not None for window in model.windows):
        return "sliding windows are left to the reference attention"
    return None


@dataclass(frozen=True, slots=True)
class Attention:
    """Decodes are the first `num_decodes` tokens; None where a step has no such slices."""

    num_decodes: int
    decode: Any
    prefill: Any


class PagedAttention:
    """Owns the workspaces. One step at a time is planned; several may be in flight."""

    def __init__(self, model: ModelConfig, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.k.device
        capability = torch.cuda.get_device_capability(self.device)
        self.prefill_backend = "fa3" if capability == (9, 0) else "fa2"
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        # A mixed step has two plans at once.
        self._decode_plan, self._prefill_plan = (
            torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
            for _ in range(2)
        )
        self._pinned = [
            torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True)
            for _ in range(_PLAN_BUFFERS)
        ]
        self._plans = 0
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=True
        )
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "NHD", backend=self.prefill_backend
        )

    def plan(self, layout: StepLayout) -> Attention:
        """Of a step outside graphs."""
        decodes = int((layout.num_new == 1).sum())
        first, rest = slice(0, decodes), slice(decodes, None)
        decode = prefill = None
        if decodes:
            decode = self._next(self._decode, self._decode_plan)
            indptr, last, pages = self._page_lists(layout, first)
            decode.plan(indptr, pages, last, *self._heads(), **self._dtypes())
        if decodes < len(layout.num_new):
            prefill = self._next(self._prefill, self._prefill_plan)
            indptr, last, pages = self._page_lists(layout, rest)
            qo_indptr = _pinned_indptr(layout.num_new[rest])
            prefill.plan(
                qo_indptr, indptr, pages, last, *self._heads(), causal=True, **self._dtypes()
            )
        return Attention(decodes, decode, prefill)

    def run(self, plan: Attention, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q `[tokens, heads, head_dim]` -> the same shape."""
        cache = (self.cache.k[layer], self.cache.v[layer])
        out = torch.empty_like(q)
        n = plan.num_decodes
        if plan.decode is not None:
            plan.decode.run(q[:n], cache, out=out[:n])
        if plan.prefill is not None:
            plan.prefill.run(q[n:], cache, out=out[n:])
        return out

    def _page_lists(
        self, layout: StepLayout, part: slice
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        size = self.cache.page_size
        contexts = layout.starts[part] + layout.num_new[part]
        counts = -(-contexts // size)
        indptr = _pinned_indptr(counts)
        last = torch.from_numpy((contexts - (counts - 1) * size).astype(np.int32)).pin_memory()
        pages = torch.empty(int(counts.sum()), dtype=torch.int32, device=self.device)
        rows = torch.from_numpy(layout.seq_rows[part]).pin_memory()
        gather_pages(
            rows.to(self.device, non_blocking=True),
            indptr.to(self.device, non_blocking=True),
            layout.page_table,
            pages,
        )
        return indptr, last, pages

    def _heads(self) -> tuple[int, int, int, int]:
        model = self.model
        return model.num_heads, model.num_kv_heads, model.head_dim, self.cache.page_size

    def _dtypes(self) -> dict[str, torch.dtype]:
        return {"q_data_type": self.cache.k.dtype, "kv_data_type": self.cache.k.dtype}

    def _next(self, wrapper: Any, plan: torch.Tensor) -> Any:
        """The wrapper, to be planned into `plan` by way of pinned memory that no plan in flight
        uses."""
        wrapper._int_workspace_buffer = plan
        wrapper._pin_memory_int_workspace_buffer = self._next_pinned()
        return wrapper

    def _next_pinned(self) -> torch.Tensor:
        self._plans += 1
        return self._pinned[self._plans % _PLAN_BUFFERS]


class GraphAttention:
    """Decode attention of one batch size inside a graph. Plan it before every replay."""

    def __init__(
        self,
        attention: PagedAttention,
        kv_indptr: torch.Tensor,
        last_page_len: torch.Tensor,
        page_lists: torch.Tensor,
    ) -> None:
        """kv_indptr int32 `[batch + 1]`, last_page_len int32 `[batch]`: device memory that the
        caller fills before a replay; page_lists is filled inside the graph."""
        self.batch = len(last_page_len)
        self._attention = attention
        self._qo_indptr = torch.arange(self.batch + 1, dtype=torch.int32)
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            attention._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=kv_indptr,
            paged_kv_indices_buffer=page_lists,
            paged_kv_last_page_len_buffer=last_page_len,
        )
        attention._next(self._wrapper, attention._decode_plan)
        ones = torch.ones(self.batch, dtype=torch.int32)
        dtypes = attention._dtypes()
        self._wrapper.plan(self._qo_indptr, page_lists[:0], ones, *attention._heads(), **dtypes)
        self._wrapper._plan_info = self.plan(self._qo_indptr, ones)

    @property
    def step(self) -> Attention:
        return Attention(self.batch, self._wrapper, None)

    def plan(self, kv_indptr: torch.Tensor, lengths: torch.Tensor) -> Any:
        """Host tensors, int32 `[batch + 1]` and `[batch]`. FlashInfer's own `plan` walks over the
        lengths in Python and copies what is on its way already: this calls what lies below it.

        A large batch is not cut in pieces, and then its grid depends on its size alone: it needs
        none of the padding that plans for graphs have, whose idle programs only pieces can mark.
        """
        attention = self._attention
        heads, kv_heads, head_dim, page_size = attention._heads()
        in_pieces = self.batch < _SPLIT_BATCH
        return self._wrapper._cached_module.plan(
            attention._workspace,
            attention._decode_plan,
            attention._next_pinned(),
            self._qo_indptr,
            kv_indptr,
            lengths,
            self.batch,
            self.batch,
            heads,
            kv_heads,
            page_size,
            in_pieces,  # enable_cuda_graph
            head_dim,
            head_dim,
            False,  # causal
            -1,  # window_left
            -1,  # fixed_split_size
            not in_pieces,  # disable_split_kv
            0,  # num_colocated_ctas
        )


def is_balanced(contexts: np.ndarray) -> bool:
    """Whether decodes of these contexts may run without cutting the longest in pieces."""
    longest = int(contexts.max())
    if len(contexts) < _SPLIT_BATCH or longest <= _LONG_CONTEXT:
        return True
    return longest <= _SKEW * float(contexts.mean())


def _pinned_indptr(counts: Sequence[int] | np.ndarray) -> torch.Tensor:
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    return torch.from_numpy(indptr).pin_memory()
