"""Pages of one layer's keys and values, in the dtype of queries or in FP8."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.attention.scores import ScoreRule

_FP8_MOST = tl.constexpr(448.0)
_WIDENED_BLOCK = 4096


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


def widen_pages(cache: CachePages, page_list: torch.Tensor, out: torch.Tensor) -> None:
    """Copy keys and values of some pages, times their scales, one page after the other. page_list:
    int32 `[n]`. out: `[2, at least n, page_size, kv_heads, head_dim]`, contiguous: keys, then
    values. One kernel. Raises ValueError where out is for other pages.
    """
    if out.shape[2:] != cache.k.shape[1:] or out.shape[1] < len(page_list):
        raise ValueError(f"{list(out.shape)} has no room for {len(page_list)} pages of the cache")
    size = cache.k[0].numel()
    if len(page_list):
        _widen_kernel[(len(page_list), triton.cdiv(size, _WIDENED_BLOCK))](
            cache.k,
            cache.v,
            cache.k_scale,
            cache.v_scale,
            cache.stride,
            page_list,
            out,
            out.stride(0),
            SIZE=size,
            BLOCK=_WIDENED_BLOCK,
        )


@triton.jit(
    do_not_specialize=["k_scale", "v_scale", "stride_out"],
    do_not_specialize_on_alignment=["page_list_ptr"],
)
def _widen_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    stride: tl.tensor,
    page_list_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_out: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program takes a part of a page."""
    place = tl.program_id(0).to(tl.int64)
    page = tl.load(page_list_ptr + place).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.load(k_ptr + page * stride + at, mask=at < SIZE, other=0.0).to(tl.float32) * k_scale
    v = tl.load(v_ptr + page * stride + at, mask=at < SIZE, other=0.0).to(tl.float32) * v_scale
    to = out_ptr + place * SIZE + at
    tl.store(to, k.to(out_ptr.dtype.element_ty), mask=at < SIZE)
    tl.store(to + stride_out, v.to(out_ptr.dtype.element_ty), mask=at < SIZE)


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
