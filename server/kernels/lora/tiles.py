"""Shared parts of kernels that go through tiles of rows: `v B^T` (v from the workspace's planes, B
of one projection), and where the parts of a record of the device table lie (`table.LoraTable` says
what).

ints_ptr, floats_ptr, words_ptr: the table, as int32, float32 and int64.
"""

from typing import Any, NamedTuple

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


class Shrunk(NamedTuple):
    """Result of shrink for one tile. v: what shrink left for one tile. ptr: its first row and rank;
    splits: how many planes there are; rows: how many the tile has.
    """

    ptr: Any
    row_stride: Any
    plane_stride: Any
    splits: Any
    rows: Any


class LoraB(NamedTuple):
    """B of one projection: `[out_features, rank]`."""

    ptr: Any
    rank: Any


class LowRank(NamedTuple):
    """`scale * v B^T` of one projection."""

    v: Shrunk
    b: LoraB
    scale: Any


@triton.jit
def even_rank(low: LowRank) -> Any:
    """The same, whose rank is a multiple of 8; see `in_eights`."""
    return LowRank(low.v, even(low.b), low.scale)


@triton.jit
def even(b: LoraB) -> Any:
    """The same B, whose rank is a multiple of 8; see `in_eights`."""
    return LoraB(b.ptr, in_eights(b.rank))


@triton.jit
def in_eights(rank: tl.tensor) -> Any:
    """The same rank, a multiple of 8, as which the compiler then knows it: it starts every row of B
    at 16 bytes, and they are loaded at once."""
    return rank // 8 * 8


@triton.jit
def low_rank(
    v: Shrunk,
    b0: LoraB,
    b1: LoraB,
    n: tl.tensor,
    end: tl.tensor,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[Any, Any]:
    """`v B^T` of two projections at columns n, float32 `[BLOCK_M, BLOCK_N]`."""
    acc0 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc1 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in tl.range(0, tl.maximum(b0.rank, b1.rank), 16, num_stages=1):
        r = first + tl.arange(0, 16)
        # Both on their way before the sums that wait for v.
        weights0, weights1 = load_b(b0, n, r, end), load_b(b1, n, r, end)
        v0 = load_v(v, r, b0.rank, MAX_SPLIT, BLOCK_M)
        v1 = load_v(columns_from(v, b0.rank), r, b1.rank, MAX_SPLIT, BLOCK_M)
        acc0 += product(v0, weights0, BLOCK_M, PRECISION)
        acc1 += product(v1, weights1, BLOCK_M, PRECISION)
    return acc0, acc1


@triton.jit
def low_rank_one(
    v: Shrunk,
    b: LoraB,
    n: tl.tensor,
    end: tl.tensor,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
) -> Any:
    """`v B^T` of one projection, BLOCK_R ranks at a time; as in `low_rank`."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in tl.range(0, b.rank, BLOCK_R, num_stages=1):
        r = first + tl.arange(0, BLOCK_R)
        weights = load_b(b, n, r, end)
        acc += product(load_v(v, r, b.rank, MAX_SPLIT, BLOCK_M), weights, BLOCK_M, PRECISION)
    return acc


@triton.jit
def load_b(
    b: LoraB, n: tl.tensor, r: tl.tensor, end: tl.tensor, WHOLE: tl.constexpr = False
) -> Any:
    """Columns r of B's rows n, `[len(n), len(r)]`. WHOLE: all n are before the end."""
    live = (r < b.rank)[None, :]
    if not WHOLE:
        live &= (n < end)[:, None]
    return tl.load(b.ptr + n[:, None] * b.rank + r[None, :], mask=live, other=0.0)


@triton.jit
def columns_from(v: Shrunk, first: tl.tensor) -> Any:
    """v from rank `first` on."""
    return Shrunk(v.ptr + first, v.row_stride, v.plane_stride, v.splits, v.rows)


@triton.jit
def load_v(
    v: Shrunk,
    r: tl.tensor,
    rank: tl.tensor,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> Any:
    """Columns r of v, `[BLOCK_M, BLOCK_R]`: planes in order."""
    m = tl.arange(0, BLOCK_M)
    at = v.ptr + m[:, None] * v.row_stride + r[None, :]
    live = (m < v.rows)[:, None] & (r < rank)[None, :]
    AT_ONCE: tl.constexpr = planes_at_once(MAX_SPLIT, BLOCK_M * r.shape[0])
    total = tl.zeros((BLOCK_M, r.shape[0]), tl.float32)
    if AT_ONCE == MAX_SPLIT:
        # The number of planes is loaded at the same time.
        for split in tl.static_range(MAX_SPLIT):
            part = tl.load(at + split * v.plane_stride, mask=live, other=0.0)
            total += tl.where(split < v.splits, part, 0.0)
    else:
        planes = tl.where(live, v.splits, 0)
        for base in range(0, v.splits, AT_ONCE):
            for split in tl.static_range(AT_ONCE):
                part = at + (base + split) * v.plane_stride
                total += tl.load(part, mask=planes > base + split, other=0.0)
    return total


@triton.constexpr_function
def planes_at_once(max_split: int, elements: int) -> int:
    """Loads in flight, few enough for the registers."""
    return min(max_split, 8 if elements <= 128 else 4)


@triton.jit
def product(v: tl.tensor, b: tl.tensor, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr) -> Any:
    """`v b^T`, float32 `[BLOCK_M, len(b)]`. Few rows are the tensor cores' 8 columns, not their 16
    rows, of which all warps would have the same."""
    low = v.to(b.dtype)
    if BLOCK_M <= 16:
        return tl.trans(tl.dot(b, tl.trans(low), input_precision=PRECISION))
    else:
        return tl.dot(low, tl.trans(b), input_precision=PRECISION)


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


class Tile(NamedTuple):
    """Rows that share an adapter: first sorted position, how many, and the share of the work."""

    start: Any
    length: Any
    share: Any


class Records(NamedTuple):
    """The table, and the site of which its records are read."""

    words_ptr: Any
    ints_ptr: Any
    floats_ptr: Any
    site: Any
    num_sites: Any


class ProjectionRecord(NamedTuple):
    """A projection's record: rank (0 without an adapter), first rank among the site's, scale,
    address of B.

    The address is an integer.
    """

    rank: Any
    first: Any
    scale: Any
    address: Any


@triton.jit
def load_tile(
    tiles_ptr: tl.tensor, tile: tl.tensor, live: tl.tensor, MAX_PARTS: tl.constexpr = 1
) -> tuple[Any, Any]:
    """Slot of a tile, and the tile: zeros where not live."""
    at = tiles_ptr + tile * 4
    slot, start = tl.load(at, mask=live, other=0), tl.load(at + 1, mask=live, other=0)
    length = tl.load(at + 2, mask=live, other=0)
    if MAX_PARTS > 1:
        return slot, Tile(start, length, tl.load(at + 3, mask=live, other=0))
    else:
        return slot, Tile(start, length, slot * 0)


@triton.jit
def split_share(share: tl.tensor) -> tuple[Any, Any]:
    """Which part of its tile it is, and the logarithm of how many there are (segments.py)."""
    return share // 4, share % 4


@triton.jit
def cut_ranks(total: tl.tensor, share: tl.tensor) -> tuple[Any, Any]:
    """First rank of a share, and how many it has: none or less where others took all."""
    part, doublings = split_share(share)
    most = tl.cdiv((total + (1 << doublings) - 1) >> doublings, 16) * 16
    first = part * most
    return first, tl.minimum(total - first, most)


@triton.jit
def take_range(units: tl.tensor) -> tuple[Any, Any]:
    """Where this program's part of so many units begins and ends; parts differ by one at most."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    each, more = units // programs, units % programs
    begin = program * each + tl.minimum(program, more)
    return begin, begin + each + (program < more).to(tl.int32)


@triton.constexpr_function
def small_tile(block_m: int) -> int:
    """A tile of at most so many rows is computed as if tiles were no larger: decodes, which steps
    of prompts have as well, have few rows of most adapters."""
    return 16 if block_m > 16 else 8


@triton.jit
def tile_rows(order_ptr: tl.tensor, length: tl.tensor, BLOCK_M: tl.constexpr) -> Any:
    """The batch rows of a tile, int64 `[BLOCK_M]`, 0 beyond `length`."""
    m = tl.arange(0, BLOCK_M)
    return tl.load(order_ptr + m, mask=m < length, other=0).to(tl.int64)


@triton.jit
def load_projection(records: Records, slot: tl.tensor, p: tl.tensor) -> Any:
    """Projection p of a slot's adapter."""
    record = record_of(slot, records.site, records.num_sites)
    ranks_ptr = ranks_at(records.ints_ptr, record)
    rank = tl.load(ranks_ptr + p, mask=slot >= 0, other=0)
    first = tl.load(ranks_ptr, mask=p > 0, other=0)
    first += tl.load(ranks_ptr + 1, mask=p > 1, other=0)
    scale = tl.load(scales_at(records.floats_ptr, record) + p)
    return ProjectionRecord(rank, first, scale, tl.load(b_at(records.words_ptr, record) + p))


@triton.jit
def low_rank_of(
    projection: ProjectionRecord,
    tile: Tile,
    workspace: tl.tuple,
    splits: tl.tensor,
    DTYPE: tl.constexpr,
) -> Any:
    """The addition of the projection to a tile's rows. workspace: as of `Workspace.arguments`.

    splits: how many of its planes there are. DTYPE: of B.
    """
    b_ptr = tl.multiple_of(projection.address.to(tl.pointer_type(DTYPE)), 16)
    planes_ptr, _, row_stride, plane_stride = workspace
    v_ptr = planes_ptr + tile.start * row_stride + projection.first
    v = Shrunk(v_ptr, row_stride, plane_stride, splits, tile.length)
    return LowRank(v, LoraB(b_ptr, projection.rank), projection.scale)
