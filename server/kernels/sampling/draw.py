"""Sampling on the device: temperature, top_k, top_p, min_p and the draw, without sorting.

What top_k and top_p keep is all that reaches some logit. That logit is searched for by the bits of
its number, two at a time: each pass adds up, for three logits in question, what lies at or above
each of them (how many ids for top_k, which mass for top_p). One program does a whole row in one
order, so that neither batch nor neighbours change a draw. The draw is an inverse CDF in the order
of ids, of the same random number as `loraplex.server.model.sampling.sampling`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.sampling import draw_columns
from loraplex.server.kernels.sampling.greedy import (
    SPLITS,
    DrawMasks,
    GreedyScratch,
    allowed,
    best_of_splits,
    find_best,
    mask_arguments,
)

_BLOCK = 8192
_WARPS = 16
# Low bits of a logit's float32 that its own dtype never uses; the rest is even in number.
_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 12, torch.float32: 0}

# What a compiled kernel may read of a module.
_COLUMNS = tl.constexpr(draw_columns.DRAW_COLUMNS)
_TEMPERATURE = tl.constexpr(draw_columns.TEMPERATURE)
_TOP_P = tl.constexpr(draw_columns.TOP_P)
_MIN_P = tl.constexpr(draw_columns.MIN_P)
_TOP_K = tl.constexpr(draw_columns.TOP_K)
_SEED_LOW = tl.constexpr(draw_columns.SEED_LOW)
_SEED_HIGH = tl.constexpr(draw_columns.SEED_HIGH)
_CHOICE = tl.constexpr(draw_columns.CHOICE)
_PROMPT_LEN = tl.constexpr(draw_columns.PROMPT_LEN)


@dataclass(frozen=True, slots=True)
class DrawRows:
    """Rows to draw for; all on the device. The tensors are int32 `[n]`.

    sources: the logits' row of each. rows: whose parameters and tokens. places: where its token
    goes; also gives the index of the draw, which counts from the row's prompt. masks: ids that each
    of the n may choose; None = any id.
    """

    sources: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor
    masks: DrawMasks | None = None


def draw_append(
    logits: torch.Tensor,
    of: DrawRows,
    parameters: torch.Tensor,
    tokens: torch.Tensor,
    scratch: GreedyScratch,
    *,
    finite: bool,
) -> torch.Tensor:
    """Draws an id for each of `of` and writes it to `tokens[rows[i], places[i]]`.

    logits: `[m, vocab]`. parameters: int32 `[rows, 8]`, see `draw_columns`; a temperature of 0
    takes the lowest id of the largest logit. tokens: int32 `[rows, length]`. finite: whether a
    logit of minus infinity is an error, as NaN and infinity are, or an id that cannot be chosen.
    Logits of ids that a mask leaves out are looked at for errors alone. Returns int32 `[n]`: the
    ids, -1 where a logit is an error or none can be chosen (then 0 is written). Two kernels.
    """
    (n,), (_, vocab) = of.rows.shape, logits.shape
    drawn = torch.empty_like(of.rows)
    find_best(logits, of.sources, of.masks, scratch, finite=finite)
    bits, masks, stride_bits = mask_arguments(of.masks)
    _draw_kernel[(n,)](
        logits,
        of.sources,
        bits,
        masks,
        scratch.tensors,
        parameters,
        of.rows,
        of.places,
        tokens,
        drawn,
        logits.stride(0),
        stride_bits,
        vocab,
        tokens.stride(0),
        UNUSED=_UNUSED_BITS[logits.dtype],
        SPLITS=SPLITS,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)),
        num_warps=_WARPS,
    )
    return drawn


# Where a step's rows begin in their upload depends on their number; it must not be compiled anew.
@triton.jit(
    do_not_specialize=["stride_bits", "vocab"],
    do_not_specialize_on_alignment=["sources_ptr", "masks_ptr", "rows_ptr", "places_ptr"],
)
def _draw_kernel(
    logits_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    bits_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    scratch: tl.tuple,
    parameters_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    places_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    drawn_ptr: tl.tensor,
    stride: tl.tensor,
    stride_bits: tl.tensor,
    vocab: tl.tensor,
    stride_tokens: tl.tensor,
    UNUSED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i = tl.program_id(0)
    best, token = best_of_splits(scratch, i, SPLITS)
    row = tl.load(rows_ptr + i).to(tl.int64)
    place = tl.load(places_ptr + i)
    own = parameters_ptr + row * _COLUMNS
    temperature = tl.load(own + _TEMPERATURE).to(tl.float32, bitcast=True)
    if (token >= 0) & (temperature > 0):
        # To the base 2; a tiny temperature must not overflow where it meets the best, which is 0.
        scale = 1.4426950408889634 / tl.maximum(temperature, 1e-30)
        source = tl.load(sources_ptr + i).to(tl.int64)
        row_ptr = logits_ptr + source * stride
        if bits_ptr is not None:
            mask = tl.load(masks_ptr + i)
            bits_ptr += tl.maximum(mask, 0).to(tl.int64) * stride_bits
        else:
            mask = tl.full((), -1, tl.int32)
        top_p = tl.load(own + _TOP_P).to(tl.float32, bitcast=True)
        min_p = tl.load(own + _MIN_P).to(tl.float32, bitcast=True)
        top_k = tl.load(own + _TOP_K)
        of_row = _Row(row_ptr, bits_ptr, mask, vocab, best, scale)
        floor = tl.full((), -2147483648 >> UNUSED, tl.int32)
        if (top_k > 0) & (top_k < vocab):
            goal = top_k.to(tl.float32)
            floor = _lowest_kept(of_row, floor, goal, False, UNUSED, BLOCK)
        if top_p < 1:
            mass = _mass(of_row, floor, 0.0, UNUSED, BLOCK)
            goal = mass.to(tl.float32) * top_p
            floor = _lowest_kept(of_row, floor, goal, True, UNUSED, BLOCK)
        mass = _mass(of_row, floor, min_p, UNUSED, BLOCK)
        target = mass * _uniform(own, place)
        found = _at_mass(of_row, floor, min_p, target, UNUSED, BLOCK)
        token = tl.where(found >= 0, found, token)
    tl.store(drawn_ptr + i, token)
    tl.store(tokens_ptr + row * stride_tokens + place, tl.maximum(token, 0))


@triton.jit
def _uniform(own: tl.tensor, place: tl.tensor) -> tl.tensor:
    """float64 in (0, 1), 52 bits fine."""
    seed = tl.load(own + _SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed |= tl.load(own + _SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    choice = tl.load(own + _CHOICE)
    index = place - tl.load(own + _PROMPT_LEN)
    zero = index * 0
    first, second, _, _ = tl.philox(seed, index, choice, zero, zero)
    bits = (first.to(tl.uint64) << 20) | (second.to(tl.uint64) >> 12)
    return (bits.to(tl.float64) + 0.5) * (1.0 / 4503599627370496.0)


class _Row(NamedTuple):
    """A row of logits. bits_ptr, mask: what it may choose, as of `allowed`, or None; best: its
    largest logit; scale: of a logit's distance from that, to the base 2."""

    ptr: Any
    bits_ptr: Any
    mask: Any
    vocab: Any
    best: Any
    scale: Any


@triton.jit
def _load(
    row: _Row, begin: tl.tensor, UNUSED: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A block's ids, int32 keys that order logits as their values do, and probabilities.

    A probability is relative to that of the best. Ids that the row's mask leaves out are minus
    infinity.
    """
    ids = begin + tl.arange(0, BLOCK)
    live = ids < row.vocab
    x = tl.load(row.ptr + ids, mask=live, other=float("-inf")).to(tl.float32)
    if row.bits_ptr is not None:
        x = tl.where(allowed(row.bits_ptr, row.mask, ids, live), x, float("-inf"))
    x = tl.where(x == 0, 0.0, x)  # one zero, whatever its sign
    bits = x.to(tl.int32, bitcast=True)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> UNUSED
    return ids, keys, tl.exp2((x - row.best) * row.scale)


@triton.jit
def _lowest_kept(
    row: _Row,
    floor: tl.tensor,
    goal: tl.tensor,
    BY_MASS: tl.constexpr,
    UNUSED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The largest key such that what has it or a larger one, and at least `floor`, amounts to
    `goal`: so many ids, or so much probability."""
    key = tl.full((), -2147483648 >> UNUSED, tl.int32)
    step = tl.full((), 1 << (30 - UNUSED), tl.int32)
    for _ in range((32 - UNUSED) // 2):
        one = tl.zeros((BLOCK,), tl.float32)
        two, three = one, one
        for begin in range(0, row.vocab, BLOCK):
            ids, keys, weights = _load(row, begin, UNUSED, BLOCK)
            if not BY_MASS:
                weights = tl.full((BLOCK,), 1.0, tl.float32)
            counted = tl.where((keys >= floor) & (ids < row.vocab), weights, 0.0)
            one += tl.where(keys >= key + step, counted, 0.0)
            two += tl.where(keys >= key + step + step, counted, 0.0)
            three += tl.where(keys >= key + step + step + step, counted, 0.0)
        # One by one: three steps of 2^30 are more than an int32 holds.
        key += tl.where(tl.sum(one) >= goal, step, 0)
        key += tl.where(tl.sum(two) >= goal, step, 0)
        key += tl.where(tl.sum(three) >= goal, step, 0)
        step = step >> 2
    return tl.maximum(key, floor)


@triton.jit
def _kept(
    row: _Row,
    begin: tl.tensor,
    floor: tl.tensor,
    min_p: tl.tensor,
    UNUSED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """A block's ids, and their probabilities where they are not cut off."""
    ids, keys, weights = _load(row, begin, UNUSED, BLOCK)
    return ids, tl.where((keys >= floor) & (weights >= min_p), weights, 0.0)


@triton.jit
def _mass(
    row: _Row,
    floor: tl.tensor,
    min_p: tl.tensor,
    UNUSED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """float64, of all that is kept."""
    mass = tl.zeros((), tl.float64)
    for begin in range(0, row.vocab, BLOCK):
        _, kept = _kept(row, begin, floor, min_p, UNUSED, BLOCK)
        mass += tl.sum(kept).to(tl.float64)
    return mass


@triton.jit
def _at_mass(
    row: _Row,
    floor: tl.tensor,
    min_p: tl.tensor,
    target: tl.tensor,
    UNUSED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The first id at which the kept mass passes `target`; -1 if it never does."""
    found = tl.full((), -1, tl.int32)
    before = tl.zeros((), tl.float64)
    for begin in range(0, row.vocab, BLOCK):
        ids, kept = _kept(row, begin, floor, min_p, UNUSED, BLOCK)
        after = before + tl.sum(kept).to(tl.float64)
        if (found < 0) & (after > target):
            passed = before + tl.cumsum(kept, axis=0).to(tl.float64) > target
            first = tl.min(tl.where(passed & (kept > 0), ids, 2147483647))
            # The sums round differently: what they differ by belongs to the block's last.
            last = tl.max(tl.where(kept > 0, ids, -1))
            found = tl.minimum(first, last)
        before = after
    return found
