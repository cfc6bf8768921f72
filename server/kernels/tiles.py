"""What kernels that go through tiles of rows share."""

from typing import Any

import triton
import triton.language as tl


@triton.jit
def load_tile(tiles_ptr: tl.tensor, tile: tl.tensor, live: tl.tensor) -> tuple[Any, Any, Any]:
    """Slot, first sorted position and rows of a tile (zeros where not live)."""
    slot = tl.load(tiles_ptr + tile * 4, mask=live, other=0)
    start = tl.load(tiles_ptr + tile * 4 + 1, mask=live, other=0)
    return slot, start, tl.load(tiles_ptr + tile * 4 + 2, mask=live, other=0)


@triton.constexpr_function
def small_tile(block_m: int) -> int:
    """A tile of at most so many rows is computed as if tiles were no larger. Where tiles are the
    smallest, that is one row, which is done without tensor cores; where they are larger, one
    of the smallest: steps of prompts have decodes, and most adapters of those have few rows."""
    return 16 if block_m > 16 else 1


@triton.jit
def tile_rows(
    order_ptr: tl.tensor, row: tl.tensor, length: tl.tensor, BLOCK_M: tl.constexpr
) -> Any:
    """The batch rows of a tile, `[BLOCK_M]` (0 beyond `length`), or its only one, which is known
    already."""
    if BLOCK_M == 1:
        return row
    else:
        m = tl.arange(0, BLOCK_M)
        return tl.load(order_ptr + m, mask=m < length, other=0)
