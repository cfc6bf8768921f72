"""Pages of one layer's keys and values, in the dtype of queries or in FP8."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.attention.scores import ScoreRule

_FP8_MOST = tl.constexpr(448.0)


class CachePages(NamedTuple):
    """Pages of one layer's keys and values. k, v: `[pages, page_size, kv_heads, head_dim]`, each
    page contiguous, of one stride from page to page; both of the queries' dtype, or both FP8
    (E4M3): then keys are `k * k_scale`, values `v * v_scale`.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def stride(self) -> int:
        """Numbers from one page to the next."""
        return self.k.stride(0)

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, float, float, float, int]:
        """Arguments of a kernel: k, v, the factors of new keys and of new values, that of sums of
        values, and the stride.
        """
        return self.k, self.v, 1 / self.k_scale, 1 / self.v_scale, self.v_scale, self.stride

    def scored(self, rule: ScoreRule) -> ScoreRule:
        """The rule for keys as they are stored."""
        return rule if self.k_scale == 1.0 else replace(rule, scale=rule.scale * self.k_scale)


@triton.jit
def place_in_pages(
    page: tl.tensor,
    offset: tl.tensor,
    stride: tl.tensor,
    TOKEN: tl.constexpr,
) -> Any:
    """Where a token's keys and values lie in their pages, for the first head. page: int64, and so
    is the place; offset: in the page; stride: from page to page; TOKEN: from token to token."""
    return page * stride + offset * TOKEN


@triton.jit
def as_stored(x: tl.tensor, factor: tl.tensor, pages_ptr: tl.tensor) -> Any:
    """New keys or values in the pages' dtype; the largest that FP8 has in place of larger ones."""
    dtype: tl.constexpr = pages_ptr.dtype.element_ty
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32) * factor, -_FP8_MOST), _FP8_MOST)
    return x.to(dtype)
