"""Greedy sampling inside a decode graph: the best id of each row, checked and written behind its
input."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024
# Programs that share a row: many for few rows, so that the device is busy in any case.
_SPLITS = 32


class GreedyScratch:
    """Partial results of up to `rows` rows; allocated once."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.best = torch.empty(rows, _SPLITS, dtype=torch.float32, device=device)
        self.ids = torch.empty(rows, _SPLITS, dtype=torch.int32, device=device)


def greedy_append(
    logits: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor,
    sampled: torch.Tensor,
    scratch: GreedyScratch,
) -> None:
    """`sampled[i]` = the lowest id of the largest logit, or -1 if any logit is not finite.

    logits: `[n, vocab]`. rows, places: int32 `[n]`; the id (0 for -1) is also written to
    `tokens[rows[i], places[i]]` (int32) unless the place is -1. sampled: int32 `[n]`. Two kernels.
    """
    n, vocab = logits.shape
    span = triton.cdiv(triton.cdiv(vocab, _SPLITS), _BLOCK) * _BLOCK
    _best_kernel[(n, _SPLITS)](
        logits,
        scratch.best,
        scratch.ids,
        logits.stride(0),
        vocab,
        SPAN=span,
        SPLITS=_SPLITS,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    _append_kernel[(n,)](
        scratch.best,
        scratch.ids,
        rows,
        places,
        tokens,
        sampled,
        tokens.stride(0),
        SPLITS=_SPLITS,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["vocab"])
def _best_kernel(
    logits_ptr: tl.tensor,
    best_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    SPAN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A split's best logit and its id; the id is -1 where a logit is not finite."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * SPAN
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    ids = tl.full((BLOCK,), 2147483647, tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for step in range(0, SPAN, BLOCK):
        at = begin + step + tl.arange(0, BLOCK)
        live = at < vocab
        x = tl.load(logits_ptr + row * stride + at, mask=live, other=0.0).to(tl.float32)
        bad |= (live & ~(tl.abs(x) < float("inf"))).to(tl.int32)
        better = live & (x > best)
        best = tl.where(better, x, best)
        ids = tl.where(better, at, ids)
    top = tl.max(best, axis=0)
    first = tl.min(tl.where(best == top, ids, 2147483647), axis=0)
    out = row * SPLITS + tl.program_id(1)
    tl.store(best_ptr + out, top)
    tl.store(ids_ptr + out, tl.where(tl.max(bad, axis=0) > 0, -1, first))


@triton.jit
def _append_kernel(
    best_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    places_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    sampled_ptr: tl.tensor,
    stride_tokens: tl.tensor,
    SPLITS: tl.constexpr,
) -> None:
    i = tl.program_id(0)
    at = i * SPLITS + tl.arange(0, SPLITS)
    best = tl.load(best_ptr + at)
    ids = tl.load(ids_ptr + at)
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, ids, 2147483647), axis=0)
    token = tl.where(tl.min(ids, axis=0) < 0, -1, token)
    tl.store(sampled_ptr + i, token)
    row = tl.load(rows_ptr + i).to(tl.int64)
    place = tl.load(places_ptr + i)
    tl.store(tokens_ptr + row * stride_tokens + place, tl.maximum(token, 0), mask=place >= 0)
