"""LoRA's second half: `y += scale * v B^T`, in place, with v from the workspace's bridge.

The projections of a fused site lie side by side in y; one flat list of column blocks covers
them, so a narrow k or v costs no idle programs. Formulas: Punica, arXiv:2310.18547; ragged ranks:
S-LoRA, arXiv:2311.03285.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from server.kernels.checks import check_launch
from server.kernels.configs import ExpandConfig
from server.kernels.segments import Segments
from server.kernels.table import MAX_PROJECTIONS, LoraTable
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
    after_gemm: bool = False,
) -> None:
    """`y[order[p], slice_i] += scale_i * bridge[p, ranks_i] B_i^T` for each projection i.

    y: `[rows, sum(widths)]`, any row stride, in the workspace's dtype: the base's output, changed
    in place; widths: output features of the site's 1 to 3 projections, in order. Call it after
    `shrink` of the same site. Rows in no tile and projections of rank 0 are neither read nor
    written. Accumulates in float32. One kernel on the current stream, no allocation.

    after_gemm: the kernel before it on this stream wrote y and nothing else that expand reads;
    expand may then start, and fetch weights, while that one drains (programmatic dependent launch).
    Raises ValueError on a mismatch.
    """
    check_launch("y", y, table, site, segments, workspace)
    if not 1 <= len(widths) <= MAX_PROJECTIONS or sum(widths) != y.shape[1] or min(widths) < 1:
        raise ValueError(f"widths {list(widths)} do not add up to y's {y.shape[1]} columns")
    if segments.rows == 0:
        return
    w0, w1, w2 = (*widths, 0, 0)[:MAX_PROJECTIONS]
    blocks = sum(triton.cdiv(width, config.block_n) for width in widths)
    pdl = after_gemm and y.device.type == "cuda"
    _expand_kernel[(min(segments.max_tiles * blocks, config.num_programs),)](
        y,
        workspace.bridge,
        segments.order,
        segments.tiles,
        segments.num_tiles,
        table.words,
        table.ints,
        table.floats,
        site,
        table.num_sites,
        y.stride(0),
        workspace.bridge.stride(0),
        W0=w0,
        W1=w1,
        W2=w2,
        BLOCK_M=segments.tile_rows,
        BLOCK_N=config.block_n,
        PRECISION="ieee" if y.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=config.num_warps,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["site"])
def _expand_kernel(
    y_ptr: tl.tensor,
    bridge_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    num_tiles_ptr: tl.tensor,
    words_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    floats_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    stride_y: tl.tensor,
    stride_bridge: tl.tensor,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """An item is (tile, block of columns); programs take items round robin."""
    N0: tl.constexpr = (W0 + BLOCK_N - 1) // BLOCK_N
    N1: tl.constexpr = (W1 + BLOCK_N - 1) // BLOCK_N
    BLOCKS: tl.constexpr = N0 + N1 + (W2 + BLOCK_N - 1) // BLOCK_N
    items = tl.load(num_tiles_ptr) * BLOCKS
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile_ptr = tiles_ptr + item // BLOCKS * 4
        block = item % BLOCKS
        record = tl.load(tile_ptr).to(tl.int64) * num_sites + site
        p = (block >= N0).to(tl.int32) + (block >= N0 + N1).to(tl.int32)
        rank = tl.load(ints_ptr + record * 16 + 8 + p)
        if rank > 0:
            start = tl.load(tile_ptr + 1)
            length = tl.load(tile_ptr + 2)
            first = tl.load(ints_ptr + record * 16 + 8, mask=p > 0, other=0)
            first += tl.load(ints_ptr + record * 16 + 9, mask=p > 1, other=0)
            scale = tl.load(floats_ptr + record * 16 + 12 + p)
            b_ptr = tl.load(words_ptr + record * 8 + 1 + p)
            b_ptr = tl.multiple_of(b_ptr.to(tl.pointer_type(y_ptr.dtype.element_ty)), 16)
            width = tl.where(p == 0, W0, tl.where(p == 1, W1, W2))
            y_slice = y_ptr + tl.where(p == 0, 0, tl.where(p == 1, W0, W0 + W1))
            col = (block - tl.where(p == 0, 0, tl.where(p == 1, N0, N0 + N1))) * BLOCK_N
            v_ptr = bridge_ptr + start * stride_bridge
            order = order_ptr + start
            # Whole vectors of 8 may be loaded where every row of B starts at one.
            if (rank | first) % 8 != 0:
                _expand_tile(
                    y_slice, stride_y, order, length, v_ptr + first, stride_bridge, b_ptr, rank,
                    scale, col, width, BLOCK_M, BLOCK_N, 16, PRECISION, PDL,
                )  # fmt: skip
            elif rank <= 16:
                _expand_tile(
                    y_slice, stride_y, order, length, v_ptr + first // 8 * 8, stride_bridge, b_ptr,
                    rank // 8 * 8, scale, col, width, BLOCK_M, BLOCK_N, 16, PRECISION, PDL,
                )  # fmt: skip
            else:
                _expand_tile(
                    y_slice, stride_y, order, length, v_ptr + first // 8 * 8, stride_bridge, b_ptr,
                    rank // 8 * 8, scale, col, width, BLOCK_M, BLOCK_N, 64, PRECISION, PDL,
                )  # fmt: skip


@triton.jit
def _expand_tile(
    y_ptr: tl.tensor,
    stride_y: tl.tensor,
    order_ptr: tl.tensor,
    length: tl.tensor,
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    b_ptr: tl.tensor,
    rank: tl.tensor,
    scale: tl.tensor,
    col: tl.tensor,
    width: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    # A wide block is taken in pieces, to fit the registers.
    PIECE: tl.constexpr = min(BLOCK_N, 128)
    ROW_PIECE: tl.constexpr = min(BLOCK_N, 8192 // BLOCK_R)
    if length == 1:
        y_row = y_ptr + tl.load(order_ptr).to(tl.int64) * stride_y
        _expand_row(y_row, v_ptr, b_ptr, rank, scale, col, width, BLOCK_N, ROW_PIECE, BLOCK_R, PDL)
    else:
        m = tl.arange(0, BLOCK_M)
        rows = tl.load(order_ptr + m, mask=m < length, other=0).to(tl.int64)
        _expand_rows(
            y_ptr + rows * stride_y, m < length, v_ptr, stride_v, b_ptr, rank, scale, col, width,
            BLOCK_M, BLOCK_N, PIECE, BLOCK_R, PRECISION, PDL,
        )  # fmt: skip


@triton.jit
def _expand_row(
    y_row: tl.tensor,
    v_ptr: tl.tensor,
    b_ptr: tl.tensor,
    rank: tl.tensor,
    scale: tl.tensor,
    col: tl.tensor,
    width: tl.tensor,
    BLOCK_N: tl.constexpr,
    SUB_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One row: multiply and add in registers; a tensor core would idle on 15 of 16 rows."""
    for sub in tl.range(0, BLOCK_N, SUB_N, num_stages=1):
        n = col + sub + tl.arange(0, SUB_N)
        inside = n < width
        acc = tl.zeros((SUB_N,), tl.float32)
        for k in tl.range(0, rank, BLOCK_R, num_stages=1):
            r = k + tl.arange(0, BLOCK_R)
            live = inside[:, None] & (r < rank)[None, :]
            b = tl.load(b_ptr + n[:, None] * rank + r[None, :], mask=live, other=0.0)
            if PDL:
                tl.extra.cuda.gdc_wait()
            v = tl.load(v_ptr + r, mask=r < rank, other=0.0)
            acc += tl.sum(b.to(tl.float32) * v.to(tl.float32)[None, :], axis=1)
        y = tl.load(y_row + n, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_row + n, (y + scale * acc).to(y_row.dtype.element_ty), mask=inside)


@triton.jit
def _expand_rows(
    y_rows: tl.tensor,
    live_rows: tl.tensor,
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    b_ptr: tl.tensor,
    rank: tl.tensor,
    scale: tl.tensor,
    col: tl.tensor,
    width: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUB_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A tile of rows on tensor cores."""
    m = tl.arange(0, BLOCK_M)
    for sub in tl.range(0, BLOCK_N, SUB_N, num_stages=1):
        n = col + sub + tl.arange(0, SUB_N)
        inside = n < width
        acc = tl.zeros((BLOCK_M, SUB_N), tl.float32)
        for k in tl.range(0, rank, BLOCK_R, num_stages=1):
            r = k + tl.arange(0, BLOCK_R)
            live = inside[:, None] & (r < rank)[None, :]
            b = tl.load(b_ptr + n[:, None] * rank + r[None, :], mask=live, other=0.0)
            if PDL:
                tl.extra.cuda.gdc_wait()
            live_v = live_rows[:, None] & (r < rank)[None, :]
            v = tl.load(v_ptr + m[:, None] * stride_v + r[None, :], mask=live_v, other=0.0)
            acc = tl.dot(v, tl.trans(b), acc, input_precision=PRECISION)
        at = y_rows[:, None] + n[None, :]
        live_y = live_rows[:, None] & inside[None, :]
        y = tl.load(at, mask=live_y, other=0.0).to(tl.float32)
        tl.store(at, (y + scale * acc).to(y_rows.dtype.element_ty), mask=live_y)
