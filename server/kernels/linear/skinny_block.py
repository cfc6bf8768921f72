"""The arithmetic of a product of few rows: some of its output features.

What goes together goes in tuples. `of_out`: address of the weights, which of their rows, where
these end, input features. `of_x`: addresses of the rows, which are real, input features.
"""

from typing import Any

import triton
import triton.language as tl


@triton.jit
def load_weights(of_out: tl.tuple, k: tl.tensor, EVEN: tl.constexpr) -> Any:
    """`[BLOCK_N, BLOCK_K]`. EVEN: all are real."""
    weight_ptr, n, end, in_features = of_out
    at = weight_ptr + n.to(tl.int64)[:, None] * in_features + k[None, :]
    if EVEN:
        return tl.load(at)
    else:
        live = (n < end)[:, None] & (k < in_features)[None, :]
        return tl.load(at, mask=live, other=0.0)


@triton.jit
def weigh(
    first: tl.tensor,
    of_out: tl.tuple,
    of_x: tl.tuple,
    begin: tl.tensor,
    end: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> Any:
    """`W x^T` over input features begin .. end, float32 `[BLOCK_N, BLOCK_M]`. first: weights of the
    first step, asked for before x was there."""
    k = begin + tl.arange(0, BLOCK_K)
    if BLOCK_M == 1:
        # Multiply and add in registers: a tensor core would idle on 7 of 8 rows.
        parts = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for step in tl.range(BLOCK_K, end - begin, BLOCK_K, num_stages=STAGES):
            x = _load_rows(of_x, step + k, EVEN).to(tl.float32)
            parts += load_weights(of_out, step + k, EVEN).to(tl.float32) * x
        parts += first.to(tl.float32) * _load_rows(of_x, k, EVEN).to(tl.float32)
        return tl.sum(parts, axis=1)[:, None]
    else:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for step in tl.range(BLOCK_K, end - begin, BLOCK_K, num_stages=STAGES):
            x = _load_rows(of_x, step + k, EVEN)
            weights = load_weights(of_out, step + k, EVEN)
            acc = tl.dot(weights, tl.trans(x), acc, input_precision=PRECISION)
        x = _load_rows(of_x, k, EVEN)
        return tl.dot(first, tl.trans(x), acc, input_precision=PRECISION)


@triton.jit
def _load_rows(of_x: tl.tuple, k: tl.tensor, EVEN: tl.constexpr) -> Any:
    """`[BLOCK_M, BLOCK_K]`."""
    row_ptr, live, in_features = of_x
    known = live[:, None]
    if not EVEN:
        known = known & (k < in_features)[None, :]
    return tl.load(row_ptr[:, None] + k[None, :], mask=known, other=0.0)


@triton.jit
def store_product(
    to_out: tl.tuple, acc: tl.tensor, n: tl.tensor, end: tl.tensor, BIAS: tl.constexpr
) -> None:
    """acc: float32 `[BLOCK_N, BLOCK_M]`. to_out: addresses of the rows, which are real, bias."""
    row_ptr, live, bias_ptr = to_out
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < end, other=0.0).to(tl.float32)[:, None]
    at = row_ptr[None, :] + n[:, None]
    tl.store(at, acc.to(row_ptr.dtype.element_ty), mask=live[None, :] & (n < end)[:, None])
