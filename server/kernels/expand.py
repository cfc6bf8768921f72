"""LoRA's second half: `y += scale * v B^T`, in place, with v from the workspace.

The projections of a fused site lie side by side in y; one flat list of column blocks covers them,
so a narrow k or v costs no idle programs. Formulas: Punica, arXiv:2310.18547; ragged ranks: S-LoRA,
arXiv:2311.03285.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from server.kernels.checks import check_context, check_rows, padded_widths
from server.kernels.configs import ExpandConfig
from server.kernels.expand_block import expand_ranks
from server.kernels.launch import load_first
from server.kernels.segments import Segments
from server.kernels.table import LoraTable
from server.kernels.tiles import cut_columns, load_projection, load_tile, small_tile, tile_rows
from server.kernels.workspace import Workspace


def expand(
    y: torch.Tensor,
    widths: Sequence[int],
    table: LoraTable,
    site: int,
    segments: Segments,
    workspace: Workspace,
    config: ExpandConfig,
    *,
    accumulate: bool = True,
    after_gemm: bool = False,
) -> None:
    """`y[order[p], slice_i] += scale_i * v[p, ranks_i] B_i^T` for each projection i.

    y: `[rows, sum(widths)]`, any row stride, in the adapters' dtype: the base's output, changed in
    place; widths: output features of the site's 1 to 3 projections, in order. Call it after the
    site's `shrink`. Rows in no tile and projections of rank 0 are neither read nor written. Sums in
    float32; one kernel on the current stream, no allocation. Raises ValueError on a mismatch.

    accumulate: False writes instead of adding, for a delta that the kernel after the base's GEMM
    adds (`PendingDelta`); both halves of LoRA can then run beside that GEMM.
    after_gemm: what it reads was written by the kernel before it on this stream, or earlier; expand
    starts while that one drains and waits for it in time (programmatic dependent launch).
    """
    check_rows("y", y, segments, workspace)
    check_context(table, site, segments, workspace)
    padded = padded_widths(widths, y.shape[1])
    if segments.rows == 0:
        return
    blocks = sum(triton.cdiv(width, config.piece) for width in widths)
    pdl = after_gemm and config.programmatic_launch
    _expand_kernel[(min(segments.max_tiles * blocks, config.num_programs),)](
        y,
        workspace.planes,
        workspace.splits,
        segments.order,
        segments.tiles,
        segments.num_tiles,
        table.words,
        table.ints,
        table.floats,
        site,
        table.num_sites,
        y.stride(0),
        workspace.planes.stride(1),
        workspace.planes.stride(0),
        config.num_programs,
        *padded,
        MAX_SPLIT=workspace.max_split,
        BLOCK_M=segments.tile_rows,
        PIECE=config.piece,
        MAX_PIECES=config.max_pieces,
        STAGES=config.num_stages,
        PRECISION="ieee" if y.dtype == torch.float32 else "tf32",
        ACCUMULATE=accumulate,
        PDL=pdl,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["site", "num_sites", "target_items"])
def _expand_kernel(
    y_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    splits_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    num_tiles_ptr: tl.tensor,
    words_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    floats_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    stride_y: tl.tensor,
    stride_v: tl.tensor,
    stride_plane: tl.tensor,
    target_items: tl.tensor,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """An item is (tile, block of columns), round robin; all else is fetched ahead as in shrink."""
    tiles = tl.load(num_tiles_ptr)
    block_n, n0, n01, blocks = cut_columns(tiles, target_items, W0, W1, W2, PIECE, MAX_PIECES)
    items = tiles * blocks
    item, step = tl.program_id(0), tl.num_programs(0)
    records = (words_ptr, ints_ptr, floats_ptr, site, num_sites)
    slot, start, length = load_tile(tiles_ptr, item // blocks, item < items)
    rank, first, scale, address, row = load_projection(
        records, order_ptr, slot, start, item % blocks, n0, n01
    )
    ahead = item + step
    slot, next_start, next_length = load_tile(tiles_ptr, ahead // blocks, ahead < items)
    splits = load_first(splits_ptr, PDL)
    for item in range(tl.program_id(0), items, step):
        next_rank, next_first, next_scale, next_address, next_row = load_projection(
            records, order_ptr, slot, next_start, (item + step) % blocks, n0, n01
        )
        ahead = item + 2 * step
        slot, later_start, later_length = load_tile(tiles_ptr, ahead // blocks, ahead < items)
        if rank > 0:
            v = (planes_ptr + start * stride_v + first, stride_v, stride_plane, splits, length)
            _expand_item(
                (y_ptr, stride_y), (order_ptr + start, row, length), v, (address, rank), scale,
                (item % blocks, n0, n01, block_n),
                W0, W1, W2, MAX_SPLIT, BLOCK_M, PIECE, STAGES, PRECISION, ACCUMULATE,
            )  # fmt: skip
        rank, first, scale, address, row = next_rank, next_first, next_scale, next_address, next_row
        start, length, next_start, next_length = next_start, next_length, later_start, later_length


@triton.jit
def _expand_item(
    target: tl.tuple,
    tile: tl.tuple,
    v: tl.tuple,
    b: tl.tuple,
    scale: tl.tensor,
    cut: tl.tuple,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    ACCUMULATE: tl.constexpr,
) -> None:
    """Where the block lies; few rows or many."""
    y_ptr, stride_y = target
    order_ptr, row, length = tile
    block, n0, n01, block_n = cut
    q, k = block < n0, block < n01
    y_slice = y_ptr + tl.where(q, 0, tl.where(k, W0, W0 + W1))
    width = tl.where(q, W0, tl.where(k, W1, W2))
    col = (block - tl.where(q, 0, tl.where(k, n0, n01))) * block_n
    end = tl.minimum(width, col + block_n)
    b_ptr = tl.multiple_of(b[0].to(tl.pointer_type(y_ptr.dtype.element_ty)), 16)
    SMALL: tl.constexpr = small_tile(BLOCK_M)
    if length <= SMALL:
        few = tile_rows(order_ptr, row, length, SMALL).to(tl.int64)
        expand_ranks(
            y_slice + few * stride_y, v, (b_ptr, b[1]), scale, col, end,
            MAX_SPLIT, SMALL, PIECE, STAGES, PRECISION, ACCUMULATE,
        )  # fmt: skip
    else:
        many = tile_rows(order_ptr, row, length, BLOCK_M).to(tl.int64)
        expand_ranks(
            y_slice + many * stride_y, v, (b_ptr, b[1]), scale, col, end,
            MAX_SPLIT, BLOCK_M, PIECE, STAGES, PRECISION, ACCUMULATE,
        )  # fmt: skip
