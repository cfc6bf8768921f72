"""Where the parts of a record of the device table lie, for kernels (`table.LoraTable` says what).

ints_ptr, floats_ptr, words_ptr: the table, as int32, float32 and int64.
"""

from typing import Any

import triton
import triton.language as tl

from loraplex.server.kernels.lora.table import (
    FLOAT32_SCALES,
    INT32_RANKS,
    MAX_PROJECTIONS,
    RECORD_WORDS,
    WIDEST,
)

# What a compiled kernel may read of a module.
_WORDS = tl.constexpr(RECORD_WORDS)
_HALVES = tl.constexpr(2 * RECORD_WORDS)
_RANKS = tl.constexpr(INT32_RANKS)
_TOTAL = tl.constexpr(INT32_RANKS + MAX_PROJECTIONS)
_SCALES = tl.constexpr(FLOAT32_SCALES)
_WIDEST = tl.constexpr(WIDEST)


@triton.jit
def record_of(slot: tl.tensor, site: tl.tensor, num_sites: tl.tensor) -> Any:
    """The number of a slot's record for a site, int64. Without an adapter (slot -1) the record is
    slot 0's: it may be read, and means nothing."""
    return tl.maximum(slot, 0).to(tl.int64) * num_sites + site


@triton.jit
def ranks_at(ints_ptr: tl.tensor, record: tl.tensor) -> Any:
    """The address of the projections' ranks, one after the other."""
    return ints_ptr + record * _HALVES + _RANKS


@triton.jit
def touches(
    slot_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    projection: tl.tensor,
) -> Any:
    """Whether a row's adapter touches a projection of the site."""
    slot = tl.load(slot_ptr).to(tl.int64)
    rank = tl.load(ranks_at(ints_ptr, record_of(slot, site, num_sites)) + projection)
    return (slot >= 0) & (rank > 0)


@triton.jit
def total_rank_at(ints_ptr: tl.tensor, record: tl.tensor) -> Any:
    return ints_ptr + record * _HALVES + _TOTAL


@triton.jit
def widest_rank_at(ints_ptr: tl.tensor, record: tl.tensor) -> Any:
    """record: of the slot's first site."""
    return ints_ptr + record * _HALVES + _WIDEST


@triton.jit
def rank_pair_at(words_ptr: tl.tensor, record: tl.tensor) -> Any:
    """Ranks of the first two projections in one word, the first in its low half."""
    return words_ptr + record * _WORDS + _RANKS // 2


@triton.jit
def scales_at(floats_ptr: tl.tensor, record: tl.tensor) -> Any:
    """The address of the projections' scales, one after the other."""
    return floats_ptr + record * _HALVES + _SCALES


@triton.jit
def a_at(words_ptr: tl.tensor, record: tl.tensor) -> Any:
    """The address of the stacked A."""
    return words_ptr + record * _WORDS


@triton.jit
def b_at(words_ptr: tl.tensor, record: tl.tensor) -> Any:
    """Addresses of B, of the projections, one after the other."""
    return words_ptr + record * _WORDS + 1
