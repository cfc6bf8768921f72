"""FlashInfer's attention of prompts: causal, over all of a context."""

from typing import Any

import flashinfer
import numpy as np
import torch

from loraplex.server.kernels.attention.decode_inputs import gather_pages
from loraplex.server.model.ops.memory import split_prompts_bytes
from loraplex.server.model.ops.ops import KVCache, StepLayout
from loraplex.server.model.ops.sizes import MAX_PROMPTS, PromptRoom
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.spec.model_spec import ModelSpec

_LEAST_WORKSPACE_BYTES = 1 << 20
_INT_WORKSPACE_BYTES = 8 << 20
# A plan's upload may still be on its way while the next is made.
_PLAN_BUFFERS = 3


class FlashInferPrompts:
    """Owns its workspace. One step at a time is planned; several may be in flight."""

    def __init__(
        self, model: ModelSpec, cache: KVCache, backend: str, captured: PromptRoom | None
    ) -> None:
        """captured: a graph launches it, and its first plan is of the most tokens."""
        self._model, self._cache = model, cache
        self._device = cache.k.device
        self._captured = captured is not None
        nbytes = _LEAST_WORKSPACE_BYTES  # FA3 leaves nothing in it
        if backend == "fa2":
            processors = torch.cuda.get_device_properties(self._device).multi_processor_count
            nbytes += split_prompts_bytes(model, processors)
        workspace = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._pinned = [
            torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True)
            for _ in range(_PLAN_BUFFERS)
        ]
        self._plans = 0
        buffers: dict[str, Any] = {}
        if captured is not None:
            lengths = {
                "qo_indptr_buf": MAX_PROMPTS + 1,
                "paged_kv_indptr_buf": MAX_PROMPTS + 1,
                "paged_kv_indices_buf": captured.pages,
                "paged_kv_last_page_len_buf": MAX_PROMPTS,
            }
            buffers["use_cuda_graph"] = True
            for name, length in lengths.items():
                buffers[name] = torch.zeros(length, dtype=torch.int32, device=self._device)
        self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend=backend, **buffers
        )

    def plan(self, layout: StepLayout) -> None:
        """As of `PromptAttention`."""
        seq_rows, starts, num_new = layout.prompts
        if self._captured:
            # What pads has no tokens and no pages.
            missing = MAX_PROMPTS - len(num_new)
            seq_rows, starts, num_new = (
                np.pad(a, (0, missing)) for a in (seq_rows, starts, num_new)
            )
        size, dtype, model = self._cache.page_size, self._cache.k.dtype, self._model
        contexts = starts + num_new
        counts = -(-contexts // size)
        indptr = _pinned_indptr(counts)
        last = np.where(counts > 0, contexts - (counts - 1) * size, 0).astype(np.int32)
        # Real pages even where kernels are compiled and not launched.
        pages = torch.zeros(int(counts.sum()), dtype=torch.int32, device=self._device)
        rows = to_device(seq_rows, self._device)
        # Layers that see all are in the first group.
        table = layout.page_table[0]
        gather_pages(rows, indptr.to(self._device, non_blocking=True), table, pages)
        self._plans += 1
        # Its upload goes by way of pinned memory that no plan in flight uses.
        wrapper = self._wrapper
        wrapper._pin_memory_int_workspace_buffer = self._pinned[self._plans % _PLAN_BUFFERS]
        heads = (model.num_heads, model.num_kv_heads, model.head_dim, size)
        wrapper.plan(
            _pinned_indptr(num_new),
            indptr,
            pages,
            torch.from_numpy(last).pin_memory(),
            *heads,
            causal=True,
            sm_scale=1.0,  # each layer's own comes with it
            q_data_type=dtype,
            kv_data_type=dtype,
            max_token_per_sequence=int(num_new.max()),
        )

    def run(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None
    ) -> None:
        """As of `PromptAttention`. Raises ValueError for sinks."""
        if sinks is not None:
            raise ValueError("FlashInfer's module has no sinks")
        scale = self._model.layers[layer].attention.scale
        pages = self._cache.of(layer)
        self._wrapper.run(q, pages, out=out, q_scale=scale)


def _pinned_indptr(counts: np.ndarray) -> torch.Tensor:
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    return torch.from_numpy(indptr).pin_memory()
