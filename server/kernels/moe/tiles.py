"""From each row's expert to tiles of rows that share an expert, in one kernel.

A row is a token and one of its experts: row `token * top_k + k`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.launch import follow

_MOST_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Rows of a batch, sorted by expert and cut into tiles. experts: int32 `[rows]`, of each row.
    order: int32 `[rows]`, rows by expert, those of one in ascending order. tiles: int32
    `[max_tiles, 3]`: expert, first position in `order`, and how many of at most `tile_rows` rows
    there are, 0 = none: such tiles come last. top_k: rows of a token.
    """

    experts: torch.Tensor
    order: torch.Tensor
    tiles: torch.Tensor
    tile_rows: int
    top_k: int


def max_tiles(rows: int, tile_rows: int, experts: int) -> int:
    """The most that any choice of experts needs."""
    return rows // tile_rows + min(rows, experts)


def expert_tiles(
    chosen: torch.Tensor, experts: int, tile_rows: int, *, programmatic_launch: bool
) -> ExpertTiles:
    """Sort rows by expert, and cut them into tiles. chosen: int32 `[tokens, top_k]`, at least one,
    contiguous; `experts` is how many there are. The result is the same for the same choice;
    nothing waits for the device.
    """
    rows, device = chosen.numel(), chosen.device
    order = torch.empty(rows, dtype=torch.int32, device=device)
    most = max_tiles(rows, tile_rows, experts)
    tiles = torch.empty(most, 3, dtype=torch.int32, device=device)
    chunk = min(_MOST_ROWS_AT_ONCE, max(16, triton.next_power_of_2(rows)))
    _tiles_kernel[(experts,)](
        chosen,
        order,
        tiles,
        rows,
        most,
        TILE_ROWS=tile_rows,
        CHUNK=chunk,
        BLOCK_E=triton.next_power_of_2(experts + 1),
        PDL=programmatic_launch,
        num_warps=4 if chunk < _MOST_ROWS_AT_ONCE else 8,
        launch_pdl=programmatic_launch,
    )
    return ExpertTiles(chosen.view(-1), order, tiles, tile_rows, chosen.shape[1])


@triton.jit(do_not_specialize=["rows", "most_tiles"])
def _tiles_kernel(
    chosen_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    rows: tl.tensor,
    most_tiles: tl.tensor,
    TILE_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program takes an expert: it counts the rows of all, then places its own."""
    follow(PDL)
    mine = tl.program_id(0)
    e, i = tl.arange(0, BLOCK_E), tl.arange(0, CHUNK)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, rows, CHUNK):
        expert = tl.load(chosen_ptr + first + i, mask=first + i < rows, other=BLOCK_E - 1)
        counts += tl.histogram(expert, BLOCK_E)
    tiles = tl.where(e < BLOCK_E - 1, (counts + TILE_ROWS - 1) // TILE_ROWS, 0)
    count = tl.sum(tl.where(e == mine, counts, 0), axis=0)
    start = tl.sum(tl.where(e < mine, counts, 0), axis=0)
    placed = start
    for first in range(0, rows, CHUNK):
        expert = tl.load(chosen_ptr + first + i, mask=first + i < rows, other=BLOCK_E - 1)
        is_mine = (expert == mine).to(tl.int32)
        at = placed + tl.cumsum(is_mine, axis=0) - is_mine
        tl.store(order_ptr + at, first + i, mask=is_mine > 0)
        placed += tl.sum(is_mine, axis=0)
    tile_ptr = tiles_ptr + tl.sum(tl.where(e < mine, tiles, 0), axis=0) * 3
    for done in range(0, count, TILE_ROWS):
        tl.store(tile_ptr, mine)
        tl.store(tile_ptr + 1, start + done)
        tl.store(tile_ptr + 2, tl.minimum(count - done, TILE_ROWS))
        tile_ptr += 3
    if mine == tl.num_programs(0) - 1:
        for first in range(tl.sum(tiles, axis=0), most_tiles, CHUNK):
            tl.store(tiles_ptr + (first + i) * 3 + 2, 0, mask=first + i < most_tiles)
