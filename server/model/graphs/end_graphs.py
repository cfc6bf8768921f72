"""CUDA graphs of the end of captured steps: of the last layer's part behind its attention.

By padded number of the tokens whose result somebody needs, whatever number the step has: the end of
a layer is most of its work, and of a prompt one token's result is needed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from loraplex.server.model.decoder import Decoder
from loraplex.server.model.lora.lora import Reach
from loraplex.server.model.ops.capture import record
from loraplex.server.model.ops.device_lora import DeviceLora
from loraplex.server.model.ops.lora_linear import LinearOutput
from loraplex.server.model.ops.ops_cuda import CudaOps, CudaPlan
from loraplex.server.model.ops.sizes import padded_size

_NOBODY = np.zeros(0, dtype=np.int32)


class EndGraphs:
    """Captured once at start."""

    def __init__(
        self,
        decoder: Decoder[CudaPlan, DeviceLora, LinearOutput],
        ops: CudaOps,
        sizes: tuple[int, ...],
        begun: tuple[torch.Tensor, torch.Tensor],
        pool: Any,
    ) -> None:
        """begun: `[sizes[-1], heads * head_dim]` and `[sizes[-1], hidden]`, where steps leave what
        the last layer attended and the hidden states. pool: of graphs."""
        self.sizes = sizes
        self._decoder, self._ops, self._begun, self._pool = decoder, ops, begun, pool
        # Rows, then slots: one upload.
        self._packed = torch.zeros(2 * sizes[-1], dtype=torch.int32, device=ops.device)
        self._normed = torch.zeros_like(begun[1])
        self._graphs: dict[tuple[int, Reach], torch.cuda.CUDAGraph] = {}
        # Kept since graphs write to their tensors.
        self._loras: dict[tuple[int, Reach], DeviceLora] = {}

    def rehearse(self, reach: Reach) -> None:
        """Run once, outside of any graph, all that the graphs of one family will do."""
        for size in reversed(self.sizes):
            self._upload(size, _NOBODY, _NOBODY)
            self._step(size, reach)()

    def capture(self, reach: Reach) -> None:
        """One family, largest first so that the others fit in its memory. Others of as many tokens
        were rehearsed."""
        for size in reversed(self.sizes):
            graph = record(self._step(size, reach), self._pool)
            graph.replay()  # the first time takes longer
            self._graphs[size, reach] = graph

    def forward(self, rows: np.ndarray, slots: np.ndarray) -> torch.Tensor:
        """rows: int64 `[n]`, of what steps left; slots: their adapters' -> normed `[n, hidden]`,
        valid until the next call, in stream order."""
        n = len(rows)
        if n:
            size = padded_size(self.sizes, n)
            self._upload(size, rows, slots)
            self._graphs[size, self._ops.table.reach(slots)].replay()
        return self._normed[:n]

    def _upload(self, size: int, rows: np.ndarray, slots: np.ndarray) -> None:
        """Upload rows and slots. The padding is the first row, without an adapter."""
        packed = np.zeros((2, size), dtype=np.int32)
        packed[1] = -1
        packed[:, : len(rows)] = rows, slots
        upload = torch.from_numpy(packed).view(-1).pin_memory()
        self._packed[: 2 * size].copy_(upload, non_blocking=True)

    def _step(self, size: int, reach: Reach) -> Callable[[], None]:
        rows, slots = self._packed[: 2 * size].view(2, size)
        lora = None
        if reach is not Reach.NONE:
            lora = self._loras[size, reach] = self._ops.captured_lora(slots, reach, decodes=False)

        def step() -> None:
            if lora is not None:
                self._ops.route(lora)
            attended, hidden = (begun.index_select(0, rows) for begun in self._begun)
            self._normed[:size].copy_(self._decoder.end(attended, hidden, lora))

        return step
