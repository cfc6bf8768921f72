"""The best id of each row, checked; in a decode graph also written behind the row's input."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_BLOCK = 1024
# Programs that share a row: many for few rows, so that the device is busy in any case.
SPLITS = 32


@dataclass(frozen=True, slots=True)
class DrawMasks:
    """Ids that rows may choose; on the device.

    bits: int32 `[masks, ceil(vocab / 32)]`; bit i % 32 of word i // 32 is set where id i may be
    chosen. of: int32 `[n]`, each row's mask, -1 = it may choose any id.
    """

    bits: torch.Tensor
    of: torch.Tensor


def mask_arguments(
    masks: DrawMasks | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Arguments of a kernel for masks: bits, each row's mask, words of a mask."""
    return (None, None, 0) if masks is None else (masks.bits, masks.of, masks.bits.stride(0))


class GreedyScratch:
    """Partial results of up to `rows` rows; allocated once."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.best = torch.empty(rows, SPLITS, dtype=torch.float32, device=device)
        self.ids = torch.empty(rows, SPLITS, dtype=torch.int32, device=device)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensors of the scratch, as kernels take them."""
        return self.best, self.ids


def greedy_append(
    logits: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor,
    sampled: torch.Tensor,
    scratch: GreedyScratch,
) -> None:
    """Choose the most likely token of each row: `sampled[i]` = the lowest id of the largest logit,
    or -1 if any logit is not finite.

    logits: `[n, vocab]`. rows, places: int32 `[n]`; the id (0 for -1) is also written to
    `tokens[rows[i], places[i]]` (int32) unless the place is -1. sampled: int32 `[n]`. Two kernels.
    """
    find_best(logits, None, None, scratch, finite=True)
    _append_kernel[(len(rows),)](
        scratch.tensors,
        rows,
        places,
        tokens,
        sampled,
        tokens.stride(0),
        SPLITS=SPLITS,
        num_warps=1,
    )


def find_best(
    logits: torch.Tensor,
    sources: torch.Tensor | None,
    masks: DrawMasks | None,
    scratch: GreedyScratch,
    *,
    finite: bool,
) -> None:
    """Fills `scratch` for `best_of_splits`. logits: `[m, vocab]`. sources: int32 `[n]`, the rows
    that are meant; None = all. masks: what they may choose; None = any id. finite: whether a logit
    of minus infinity is an error, masked or not."""
    rows, vocab = logits.shape
    n = rows if sources is None else len(sources)
    bits, of, stride_bits = mask_arguments(masks)
    _best_kernel[(n, SPLITS)](
        logits,
        sources,
        bits,
        of,
        scratch.tensors,
        logits.stride(0),
        stride_bits,
        vocab,
        FINITE=finite,
        SPAN=triton.cdiv(triton.cdiv(vocab, SPLITS), _BLOCK) * _BLOCK,
        SPLITS=SPLITS,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit(
    do_not_specialize=["stride_bits", "vocab"],
    do_not_specialize_on_alignment=["sources_ptr", "masks_ptr"],
)
def _best_kernel(
    logits_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    bits_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    scratch: tl.tuple,
    stride: tl.tensor,
    stride_bits: tl.tensor,
    vocab: tl.tensor,
    FINITE: tl.constexpr,
    SPAN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A split's best logit and its id: the largest int32 if all are minus infinity, -1 if one is
    an error."""
    i = tl.program_id(0)
    row = i.to(tl.int64)
    if sources_ptr is not None:
        row = tl.load(sources_ptr + i).to(tl.int64)
    if bits_ptr is not None:
        mask = tl.load(masks_ptr + i)
        bits_ptr += tl.maximum(mask, 0).to(tl.int64) * stride_bits
    begin = tl.program_id(1) * SPAN
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    ids = tl.full((BLOCK,), 2147483647, tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for step in range(0, SPAN, BLOCK):
        at = begin + step + tl.arange(0, BLOCK)
        live = at < vocab
        x = tl.load(logits_ptr + row * stride + at, mask=live, other=0.0).to(tl.float32)
        size = tl.abs(x) if FINITE else x
        bad |= (live & ~(size < float("inf"))).to(tl.int32)
        better = live & (x > best)
        if bits_ptr is not None:
            better &= allowed(bits_ptr, mask, at, live)
        best = tl.where(better, x, best)
        ids = tl.where(better, at, ids)
    top = tl.max(best, axis=0)
    first = tl.min(tl.where(best == top, ids, 2147483647), axis=0)
    out = i * SPLITS + tl.program_id(1)
    tl.store(scratch[0] + out, top)
    tl.store(scratch[1] + out, tl.where(tl.max(bad, axis=0) > 0, -1, first))


@triton.jit
def allowed(bits_ptr: tl.tensor, mask: tl.tensor, ids: tl.tensor, live: tl.tensor) -> tl.tensor:
    """Which ids a row may choose. bits_ptr: of its mask; any mask's where `mask` is negative: then
    it has none."""
    words = tl.load(bits_ptr + (ids >> 5), mask=live, other=0)
    return (((words >> (ids & 31)) & 1) != 0) | (mask < 0)


@triton.jit
def best_of_splits(
    scratch: tl.tuple, i: tl.tensor, SPLITS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """A row's best logit, and its id: -1 if a logit is an error or none can be chosen."""
    at = i * SPLITS + tl.arange(0, SPLITS)
    best, ids = tl.load(scratch[0] + at), tl.load(scratch[1] + at)
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, ids, 2147483647), axis=0)
    none = (tl.min(ids, axis=0) < 0) | (token == 2147483647)
    return top, tl.where(none, -1, token)


@triton.jit
def _append_kernel(
    scratch: tl.tuple,
    rows_ptr: tl.tensor,
    places_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    sampled_ptr: tl.tensor,
    stride_tokens: tl.tensor,
    SPLITS: tl.constexpr,
) -> None:
    i = tl.program_id(0)
    _, token = best_of_splits(scratch, i, SPLITS)
    tl.store(sampled_ptr + i, token)
    row = tl.load(rows_ptr + i).to(tl.int64)
    place = tl.load(places_ptr + i)
    tl.store(tokens_ptr + row * stride_tokens + place, tl.maximum(token, 0), mask=place >= 0)
