"""Shared parts of kernels that go through tiles of rows."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from loraplex.server.kernels.lora.low_rank import LoraB, LowRank, Shrunk
from loraplex.server.kernels.lora.record import b_at, ranks_at, record_of, scales_at


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
