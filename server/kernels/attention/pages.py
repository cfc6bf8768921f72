"""Pages of one layer's keys and values, in the dtype of queries, in FP8 or in int8."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.attention.scores import ScoreRule
from loraplex.server.kernels.linear.round_rows import whole, within_fp8

# What the largest number of a head becomes.
_INT8_MOST = tl.constexpr(127.0)
_FLOAT16_MOST = tl.constexpr(65504.0)
# Four int8 as float16: 0x6400 | byte is 1024 + byte.
_WIDEN = tl.constexpr("""{
    .reg .b32 bytes, less;
    mov.b32 less, 0x64806480;
    xor.b32 bytes, $2, 0x80808080;
    prmt.b32 $0, bytes, 0x64646464, 0x4140;
    prmt.b32 $1, bytes, 0x64646464, 0x4342;
    sub.rn.f16x2 $0, $0, less;
    sub.rn.f16x2 $1, $1, less;
    }""")
_WIDENED_BLOCK = 4096


class CachePages(NamedTuple):
    """Pages of one layer's keys and values. k, v: `[pages, page_size, kv_heads, head_dim]`, each
    page contiguous, of one stride from page to page; both of the queries' dtype, or both FP8
    (E4M3): then keys are `k * k_scale`, values `v * v_scale`. In int8 each head of a token has a
    further factor: k_scales, v_scales, float32 `[pages, kv_heads, page_size]`, as contiguous.
    parts: of the layer's product: 3 = q, k and v; 2 = q and k, which is v before norm and rotation;
    1 = q alone, and new keys and values are in their pages already.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    parts: int = 3

    def heads(self, features: int) -> int:
        """Heads of q in a product of so many features."""
        kv_heads, head_dim = self.k.shape[2:]
        return features // head_dim - (self.parts - 1) * kv_heads

    @property
    def stride(self) -> int:
        """Numbers from one page to the next."""
        return self.k.stride(0)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of a kernel: k, v, the factors of new keys and of new values, that of sums of
        values, the stride, and `token_scales`.
        """
        factors = (1 / self.k_scale, 1 / self.v_scale, self.v_scale)
        return self.k, self.v, *factors, self.stride, self.token_scales

    @property
    def token_scales(self) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """Arguments of a kernel for int8: scales of keys, of values, and the stride of both."""
        if self.k_scales is None or self.v_scales is None:
            return None
        return self.k_scales, self.v_scales, self.k_scales.stride(0)

    def scored(self, rule: ScoreRule) -> ScoreRule:
        """The rule for keys as they are stored."""
        return rule if self.k_scale == 1.0 else replace(rule, scale=rule.scale * self.k_scale)


def widen_pages(cache: CachePages, page_list: torch.Tensor, out: torch.Tensor) -> None:
    """Copy keys and values of pages, times their scales, one page after the other. page_list:
    int32 `[n]`. out: `[2, at least n, page_size, kv_heads, head_dim]`, contiguous: keys, then
    values. One kernel. Raises ValueError where out is for other pages.
    """
    if out.shape[2:] != cache.k.shape[1:] or out.shape[1] < len(page_list):
        raise ValueError(f"{list(out.shape)} has no room for {len(page_list)} pages of the cache")
    size = cache.k[0].numel()
    page_size, kv_heads, head_dim = cache.k.shape[1:]
    if len(page_list):
        _widen_kernel[(len(page_list), triton.cdiv(size, _WIDENED_BLOCK))](
            cache.k,
            cache.v,
            cache.k_scale,
            cache.v_scale,
            cache.stride,
            cache.token_scales,
            page_list,
            out,
            out.stride(0),
            SIZE=size,
            HEAD_DIM=head_dim,
            KV_HEADS=kv_heads,
            PAGE_SIZE=page_size,
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
    token_scales: tl.tuple,
    page_list_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_out: tl.tensor,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program takes a part of a page."""
    place = tl.program_id(0).to(tl.int64)
    page = tl.load(page_list_ptr + place).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.load(k_ptr + page * stride + at, mask=at < SIZE, other=0.0).to(tl.float32) * k_scale
    v = tl.load(v_ptr + page * stride + at, mask=at < SIZE, other=0.0).to(tl.float32) * v_scale
    if token_scales is not None:
        head = at // HEAD_DIM
        of_token = page * token_scales[2] + head % KV_HEADS * PAGE_SIZE + head // KV_HEADS
        k *= tl.load(token_scales[0] + of_token, mask=at < SIZE, other=0.0)
        v *= tl.load(token_scales[1] + of_token, mask=at < SIZE, other=0.0)
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
        x = within_fp8(x.to(tl.float32) * factor)
    return x.to(dtype)


@triton.jit
def for_pages(q: tl.tensor, pages_ptr: tl.tensor) -> Any:
    """Queries in the dtype of products with what is stored. Numbers of eight bits become float16
    in fewer instructions than bfloat16."""
    if pages_ptr.dtype.element_ty.primitive_bitwidth == 8 and q.dtype == tl.bfloat16:
        wide = q.to(tl.float32)
        return tl.minimum(tl.maximum(wide, -_FLOAT16_MOST), _FLOAT16_MOST).to(tl.float16)
    else:
        return q


@triton.jit
def widened(x: tl.tensor, dtype: tl.constexpr) -> Any:
    """Keys or values as they are stored, in the dtype of `for_pages`."""
    if x.dtype == tl.int8 and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            _WIDEN, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        return x.to(dtype)


@triton.jit
def scaled_weights(weights: tl.tensor, scales: tl.tensor) -> Any:
    """Weights of values in int8 times their scales, at most the largest float16."""
    return tl.minimum(weights * scales, _FLOAT16_MOST)


@triton.jit
def head_scales(first: tl.tensor, second: tl.tensor) -> Any:
    """Scales of heads in int8, `[n, 1]`, from halves `[n, m]`, 0 where nothing lies."""
    largest = tl.maximum(tl.abs(first.to(tl.float32)), tl.abs(second.to(tl.float32)))
    largest = tl.max(largest, axis=1)[:, None]
    return tl.where(largest > 0.0, largest / _INT8_MOST, 1.0)


@triton.jit
def as_whole(x: tl.tensor, scales: tl.tensor) -> Any:
    """Keys or values in int8, by `head_scales`; halves go to even."""
    return whole(x.to(tl.float32) / scales).to(tl.int8)
