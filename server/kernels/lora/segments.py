"""From each row's adapter slot to tiles of rows that share an adapter, all on the device; and the
wrappers' checks of these.

The grids of the other kernels cover the worst case and read the number of tiles from the device, so
a captured graph stays valid for any assignment of adapters to rows. Checks are the host's: no
device sync.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.lora.table import MAX_PROJECTIONS, LoraTable
from loraplex.server.kernels.lora.tiles import record_of, widest_rank_at
from loraplex.server.kernels.lora.workspace import Workspace

MAX_FUSED_ROWS = 512
TILE_WORDS = 4  # slot, first position in `order`, rows, share
MAX_PARTS = 4
SHARED_ROWS: tl.constexpr = tl.constexpr(8)  # of more rows inputs are as much as weights

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Segments:
    """Rows grouped by adapter and cut into tiles of at most `tile_rows`. All tensors are int32.

    order `[rows]`: the batch row at each sorted position: rows of one slot are neighbours, in
    batch order; rows without an adapter come last.
    tiles `[max_tiles, 4]`: slot, first position, number of rows, share; those of rows without an
    adapter have slot -1 and come last. num_tiles `[2]`: how many have an adapter, how many there
    are. scratch `[rows]`: of the routing kernel.

    Where tiles are shared out, max_parts is MAX_PARTS, else 1: one of up to SHARED_ROWS rows is
    listed once where its adapter's widest projection has up to 16 ranks, twice up to 32, four
    times beyond, so that whoever takes tiles one by one has as much to do for each. A share is
    `part * 4 + log2(parts)`.
    """

    rows: int
    tile_rows: int
    num_slots: int
    max_parts: int
    order: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor
    scratch: torch.Tensor

    @property
    def routed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Order, tiles and their number, as kernels take them."""
        return self.order, self.tiles, self.num_tiles

    @property
    def max_tiles(self) -> int:
        return self.tiles.shape[0]


def max_tiles(rows: int, tile_rows: int, num_slots: int) -> int:
    """The most tiles that any assignment of `num_slots` adapters, or none, to `rows` rows needs."""
    return min(rows, rows // tile_rows + min(rows, num_slots + 1))


def allocate_segments(
    rows: int,
    tile_rows: int,
    num_slots: int,
    device: torch.device | str,
    *,
    shared: bool = False,
) -> Segments:
    """Buffers for batches of exactly `rows` rows, of at most MAX_FUSED_ROWS where tiles are shared
    out; tile_rows is a power of two of at least 8. Raises ValueError."""
    if rows < 0 or num_slots < 1:
        raise ValueError(f"expected rows >= 0 and num_slots >= 1, got {rows} and {num_slots}")
    if tile_rows < 8 or tile_rows & (tile_rows - 1):
        raise ValueError(f"tile_rows must be a power of two of at least 8, got {tile_rows}")
    if shared and rows > MAX_FUSED_ROWS:
        raise ValueError(f"tiles of {rows} rows, more than {MAX_FUSED_ROWS}, are not shared out")
    max_parts = MAX_PARTS if shared else 1

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    tiles = ints(max_tiles(rows, tile_rows, num_slots) * max_parts, TILE_WORDS)
    sizes = (rows, tile_rows, num_slots, max_parts)
    return Segments(*sizes, ints(rows), tiles, ints(2), ints(rows))


def route(slots: torch.Tensor, segments: Segments, table: LoraTable) -> None:
    """Fill `segments` from `slots` `[rows]` int32 (-1 = no adapter), deterministically, no sync.

    table: tells a slot's ranks, by which tiles are shared out. One kernel up to 512 rows (fit for
    a CUDA graph), a few torch operations beyond.
    """
    if slots.dtype != torch.int32 or slots.shape != (segments.rows,) or not slots.is_contiguous():
        raise ValueError(
            f"slots must be contiguous int32 [{segments.rows}], "
            f"got {slots.dtype} {list(slots.shape)}"
        )
    if slots.device != segments.order.device:
        raise ValueError(f"slots are on {slots.device}, segments on {segments.order.device}")
    table.check_slots(segments.num_slots)
    if segments.rows == 0:
        return
    if segments.rows > MAX_FUSED_ROWS:
        _route_torch(slots, segments)
        return
    block = max(16, triton.next_power_of_2(segments.rows))
    _route_kernel[(1,)](
        slots,
        segments.order,
        segments.tiles,
        segments.num_tiles,
        segments.scratch,
        table.ints,
        table.num_sites,
        segments.rows,
        TILE_ROWS=segments.tile_rows,
        MAX_PARTS=segments.max_parts,
        BLOCK=block,
        CHUNK=min(32, block),
        num_warps=8 if block >= 128 else 4,
    )


@triton.jit(do_not_specialize=["rows", "num_sites"], do_not_specialize_on_alignment=["slots_ptr"])
def _route_kernel(
    slots_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    num_tiles_ptr: tl.tensor,
    scratch_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    num_sites: tl.tensor,
    rows: tl.tensor,
    TILE_ROWS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """One program: a counting sort by comparing all pairs, then a scan over the tiles' heads."""
    last: tl.constexpr = 2147483647
    i = tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + i, mask=i < rows, other=-1)
    key = tl.where(slot >= 0, slot, last)
    group_start = tl.zeros((BLOCK,), tl.int32)
    group_size = tl.zeros((BLOCK,), tl.int32)
    rank = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, rows, CHUNK):
        j = first + tl.arange(0, CHUNK)
        other = tl.load(slots_ptr + j, mask=j < rows, other=-1)
        other_key = tl.where(other >= 0, other, last)
        real = (j < rows)[None, :]
        less = (other_key[None, :] < key[:, None]) & real
        same = (other_key[None, :] == key[:, None]) & real
        earlier = same & (j[None, :] < i[:, None])
        group_start += tl.sum(less.to(tl.int32), axis=1)
        group_size += tl.sum(same.to(tl.int32), axis=1)
        rank += tl.sum(earlier.to(tl.int32), axis=1)
    position = group_start + rank
    is_head = (i < rows) & (rank % TILE_ROWS == 0)
    tl.store(order_ptr + position, i, mask=i < rows)
    tl.store(scratch_ptr + position, tl.where(is_head, group_size - rank, 0), mask=i < rows)
    tl.debug_barrier()
    left = tl.load(scratch_ptr + i, mask=i < rows, other=0)
    head = left > 0
    row = tl.load(order_ptr + i, mask=head, other=0)
    tile_slot = tl.load(slots_ptr + row, mask=head, other=-1)
    doublings = tl.zeros((BLOCK,), tl.int32)
    if MAX_PARTS > 1:
        first_record = record_of(tile_slot, 0, num_sites)
        few = (tile_slot >= 0) & (tl.minimum(left, TILE_ROWS) <= SHARED_ROWS)
        widest = tl.load(widest_rank_at(ints_ptr, first_record), mask=few, other=0)
        doublings = (widest > 16).to(tl.int32) + (widest > 32).to(tl.int32)
    parts = tl.where(head, 1 << doublings, 0)
    tile = tl.cumsum(parts, axis=0) - parts
    for part in tl.static_range(MAX_PARTS):
        at = tiles_ptr + (tile + part) * 4
        tl.store(at, tile_slot, mask=part < parts)
        tl.store(at + 1, i, mask=part < parts)
        tl.store(at + 2, tl.minimum(left, TILE_ROWS), mask=part < parts)
        tl.store(at + 3, part * 4 + doublings, mask=part < parts)
    tl.store(num_tiles_ptr, tl.sum(tl.where(tile_slot >= 0, parts, 0), axis=0))
    tl.store(num_tiles_ptr + 1, tl.sum(parts, axis=0))


def _route_torch(slots: torch.Tensor, segments: Segments) -> None:
    num_slots, size = segments.num_slots, segments.tile_rows
    keys = torch.where(slots >= 0, slots, num_slots).long()
    order = torch.sort(keys, stable=True).indices
    segments.order.copy_(order)
    counts = torch.zeros(num_slots + 1, dtype=torch.long, device=slots.device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    starts = torch.cumsum(counts, 0) - counts
    tiles = (counts + size - 1) // size
    ends = torch.cumsum(tiles, 0)
    index = torch.arange(segments.max_tiles, device=slots.device)
    slot = torch.searchsorted(ends, index, right=True).clamp_(max=num_slots)
    done = (index - (ends - tiles)[slot]) * size
    segments.tiles[:, 0] = torch.where(slot < num_slots, slot, -1)
    segments.tiles[:, 1] = starts[slot] + done
    segments.tiles[:, 2] = (counts[slot] - done).clamp_(0, size)
    segments.tiles[:, 3] = 0
    segments.num_tiles.copy_(ends[-2:])


def check_rows(name: str, matrix: torch.Tensor, segments: Segments, workspace: Workspace) -> None:
    """Check that `matrix` holds the batch's rows, in a dtype that the kernels compute. Raises
    ValueError where it does not.
    """
    if matrix.dim() != 2 or matrix.shape[0] != segments.rows:
        raise ValueError(f"{name} must be [{segments.rows}, features], got {list(matrix.shape)}")
    if matrix.stride(1) != 1 and matrix.shape[1] > 1:
        raise ValueError(f"the last dimension of {name} must be contiguous: {matrix.stride()}")
    if matrix.dtype not in DTYPES or matrix.dtype != workspace.dtype:
        raise ValueError(f"{name} is {matrix.dtype}, the workspace for {workspace.dtype}")
    if matrix.device != segments.order.device:
        raise ValueError(f"{name} is on {matrix.device}, not {segments.order.device}")


def check_context(table: LoraTable, site: int, segments: Segments, workspace: Workspace) -> None:
    """Check that all a launch reads besides its rows fits together. Raises ValueError."""
    table.check_site(site)
    table.check_slots(segments.num_slots)
    if segments.rows > workspace.rows:
        raise ValueError(f"{segments.rows} rows, a workspace of {workspace.rows}")
    devices = {table.words.device, segments.order.device, workspace.planes.device}
    if len(devices) != 1:
        raise ValueError(f"table, segments and workspace are on {sorted(map(str, devices))}")


def check_whole_tiles(segments: Segments) -> None:
    """Check that each tile is listed once. Raises ValueError where one is not."""
    if segments.max_parts > 1:
        raise ValueError(f"tiles are shared out in up to {segments.max_parts} parts")


def padded_widths(widths: Sequence[int], features: int) -> tuple[int, int, int]:
    """Output features of a site's 1 to 3 projections, 0 for those it lacks. Raises ValueError."""
    if not 1 <= len(widths) <= MAX_PROJECTIONS or sum(widths) != features or min(widths) < 1:
        raise ValueError(f"widths {list(widths)} do not add up to {features} columns")
    first, second, third = (*widths, 0, 0)[:MAX_PROJECTIONS]
    return first, second, third
