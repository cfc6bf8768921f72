"""The seam between the decoder and the device: what a set of tensor operations must offer.

One decoder, several sets of ops: plain torch (ops_torch.py), and kernels for a GPU.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from server.model.lora import LoraBatch


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of every layer, `[layers, pages, page_size, kv_heads, head_dim]` each."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.k.shape[2]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Which tokens of a flat batch belong to which sequence.

    Slices come in the order of the batch, those of one token (decodes) first. seq_rows, starts,
    num_new: int64 `[slices]`, on the host: the slice computes tokens `start .. start + num_new`.
    token_rows, positions: int64 `[tokens]`, on the device. page_table: int64 `[rows, pages a row]`,
    on the device; entries beyond a sequence's own pages are stale and must not be followed.
    """

    seq_rows: np.ndarray
    starts: np.ndarray
    num_new: np.ndarray
    token_rows: torch.Tensor
    positions: torch.Tensor
    page_table: torch.Tensor


P = TypeVar("P")


class Ops(Protocol[P]):
    """P: what `plan` prepares once a step for `store_kv` and `attention` of every layer."""

    def plan(self, layout: StepLayout) -> P: ...

    def embed(
        self, token_ids: torch.Tensor, weight: torch.Tensor, lora: LoraBatch | None, site: int
    ) -> torch.Tensor:
        """`[tokens]` -> `[tokens, hidden]`, with the adapters' deltas."""
        ...

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lora: LoraBatch | None,
        site: int,
    ) -> torch.Tensor:
        """`x W^T + bias` plus the adapters' deltas at `site`: `[tokens, in]` -> `[tokens, out]`."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Over the last dimension, in float32; weight is broadcast to x."""
        ...

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary embedding: x `[tokens, heads, head_dim]`; cos, sin `[tokens, 1, head_dim / 2]`."""
        ...

    def store_kv(self, plan: P, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the step's keys and values `[tokens, kv_heads, head_dim]` into their pages."""
        ...

    def attention(self, plan: P, layer: int, q: torch.Tensor, window: int | None) -> torch.Tensor:
        """Causal, over the pages: q `[tokens, heads, head_dim]` -> `[tokens, heads * head_dim]`.
        window: how many latest tokens, itself included, a token sees; None = all."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` of `[tokens, 2 n]`, gate first -> `[tokens, n]`."""
        ...
