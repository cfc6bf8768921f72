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
    accumulate: bool = True,
    after_gemm: bool = False,
) -> None:
    """`y[order[p], slice_i] += scale_i * bridge[p, ranks_i] B_i^T` for each projection i.

    y: `[rows, sum(widths)]`, any row stride, in the workspace's dtype: the base's output, changed
    in place; widths: output features of the site's 1 to 3 projections, in order. Call it after
    `shrink` of the same site. Rows in no tile and projections of rank 0 are neither read nor
    written. Accumulates in float32. One kernel on the current stream, no allocation.

    accumulate: False writes instead of adding, for a delta that the kernel after the base's GEMM
    adds; both halves of LoRA can then run beside that GEMM.
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
        PIECE=config.piece,
        STAGES=config.num_stages,
        PRECISION="ieee" if y.dtype == torch.float32 else "tf32",
        ACCUMULATE=accumulate,
        PDL=pdl,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["site", "num_sites"])
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
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    ACCUMULATE: tl.constexpr,
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
        first = tl.load(ints_ptr + record * 16 + 8, mask=p > 0, other=0)
        first += tl.load(ints_ptr + record * 16 + 9, mask=p > 1, other=0)
        scale = tl.load(floats_ptr + record * 16 + 12 + p)
        b_ptr = tl.load(words_ptr + record * 8 + 1 + p)
        b_ptr = tl.multiple_of(b_ptr.to(tl.pointer_type(y_ptr.dtype.element_ty)), 16)
        start = tl.load(tile_ptr + 1)
        length = tl.load(tile_ptr + 2)
        if rank > 0:
            width = tl.where(p == 0, W0, tl.where(p == 1, W1, W2))
            y_slice = y_ptr + tl.where(p == 0, 0, tl.where(p == 1, W0, W0 + W1))
            col = (block - tl.where(p == 0, 0, tl.where(p == 1, N0, N0 + N1))) * BLOCK_N
            order = order_ptr + start
            if length == 1:
                y_row = y_slice + tl.load(order).to(tl.int64) * stride_y
                _expand_ranks(
                    y_row, length, bridge_ptr + start * stride_bridge, stride_bridge, b_ptr, rank,
                    first, scale, col, width, 1, BLOCK_N, PIECE, STAGES, PRECISION, ACCUMULATE, PDL,
                )  # fmt: skip
            else:
                m = tl.arange(0, BLOCK_M)
                rows = tl.load(order + m, mask=m < length, other=0).to(tl.int64)
                _expand_ranks(
                    y_slice + rows * stride_y, length, bridge_ptr + start * stride_bridge,
                    stride_bridge, b_ptr, rank, first, scale, col, width,
                    BLOCK_M, BLOCK_N, PIECE, STAGES, PRECISION, ACCUMULATE, PDL,
                )  # fmt: skip


@triton.jit
def _expand_ranks(
    y_rows: tl.tensor,
    length: tl.tensor,
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    b_ptr: tl.tensor,
    rank: tl.tensor,
    first: tl.tensor,
    scale: tl.tensor,
    col: tl.tensor,
    width: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The block in pieces of at most PIECE * 16 weights, so that any rank fits the registers."""
    if (rank | first) % 8 != 0:
        # Rows of B start anywhere: no vector loads.
        _expand_looped(
            y_rows, length, v_ptr + first, stride_v, b_ptr, rank, scale, col, width,
            BLOCK_M, BLOCK_N, PIECE, 16, PRECISION, ACCUMULATE, PDL,
        )  # fmt: skip
    else:
        v = v_ptr + first // 8 * 8
        whole = rank // 8 * 8
        if rank <= 16:
            _expand_pieces(
                y_rows, length, v, stride_v, b_ptr, whole, scale, col, width,
                BLOCK_M, BLOCK_N, PIECE, 16, STAGES, PRECISION, ACCUMULATE, PDL,
            )  # fmt: skip
        elif rank <= 32:
            _expand_pieces(
                y_rows, length, v, stride_v, b_ptr, whole, scale, col, width,
                BLOCK_M, BLOCK_N, PIECE // 2, 32, STAGES, PRECISION, ACCUMULATE, PDL,
            )  # fmt: skip
        elif rank <= 64:
            _expand_pieces(
                y_rows, length, v, stride_v, b_ptr, whole, scale, col, width,
                BLOCK_M, BLOCK_N, PIECE // 4, 64, STAGES, PRECISION, ACCUMULATE, PDL,
            )  # fmt: skip
        else:
            _expand_looped(
                y_rows, length, v, stride_v, b_ptr, whole, scale, col, width,
                BLOCK_M, BLOCK_N, PIECE // 4, 64, PRECISION, ACCUMULATE, PDL,
            )  # fmt: skip


@triton.jit
def _expand_pieces(
    y_rows: tl.tensor,
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
    PIECE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Where the whole rank fits one step: v is read once, pieces of B and y are prefetched."""
    r = tl.arange(0, BLOCK_R)
    if BLOCK_N <= PIECE:
        n = col + tl.arange(0, BLOCK_N)
        b = tl.load(
            b_ptr + n[:, None] * rank + r[None, :], mask=_inside(n, r, width, rank), other=0.0
        )
        if PDL:
            tl.extra.cuda.gdc_wait()
        v = _load_v(v_ptr, stride_v, r, length, rank, BLOCK_M)
        _add(
            y_rows, length, n, width, _product(v, b, BLOCK_M, PRECISION), scale, BLOCK_M, ACCUMULATE
        )
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        v = _load_v(v_ptr, stride_v, r, length, rank, BLOCK_M)
        for sub in tl.range(0, BLOCK_N, PIECE, num_stages=STAGES):
            n = col + sub + tl.arange(0, PIECE)
            b = tl.load(
                b_ptr + n[:, None] * rank + r[None, :], mask=_inside(n, r, width, rank), other=0.0
            )
            _add(
                y_rows,
                length,
                n,
                width,
                _product(v, b, BLOCK_M, PRECISION),
                scale,
                BLOCK_M,
                ACCUMULATE,
            )


@triton.jit
def _expand_looped(
    y_rows: tl.tensor,
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
    PIECE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Any rank, BLOCK_R columns of B at a time."""
    STEP: tl.constexpr = min(BLOCK_N, PIECE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for sub in tl.range(0, BLOCK_N, STEP, num_stages=1):
        n = col + sub + tl.arange(0, STEP)
        if BLOCK_M == 1:
            acc = tl.zeros((STEP,), tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, STEP), tl.float32)
        for k in tl.range(0, rank, BLOCK_R, num_stages=1):
            r = k + tl.arange(0, BLOCK_R)
            b = tl.load(
                b_ptr + n[:, None] * rank + r[None, :], mask=_inside(n, r, width, rank), other=0.0
            )
            v = _load_v(v_ptr, stride_v, r, length, rank, BLOCK_M)
            acc += _product(v, b, BLOCK_M, PRECISION)
        _add(y_rows, length, n, width, acc, scale, BLOCK_M, ACCUMULATE)


@triton.jit
def _inside(n: tl.tensor, r: tl.tensor, width: tl.tensor, rank: tl.tensor) -> tl.tensor:
    return (n < width)[:, None] & (r < rank)[None, :]


@triton.jit
def _load_v(
    v_ptr: tl.tensor,
    stride_v: tl.tensor,
    r: tl.tensor,
    length: tl.tensor,
    rank: tl.tensor,
    BLOCK_M: tl.constexpr,
) -> tl.tensor:
    """`[BLOCK_M, BLOCK_R]` of the bridge, or `[BLOCK_R]` for one row."""
    if BLOCK_M == 1:
        return tl.load(v_ptr + r, mask=r < rank, other=0.0)
    else:
        m = tl.arange(0, BLOCK_M)
        live = (m < length)[:, None] & (r < rank)[None, :]
        return tl.load(v_ptr + m[:, None] * stride_v + r[None, :], mask=live, other=0.0)


@triton.jit
def _product(
    v: tl.tensor, b: tl.tensor, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """`v b^T` in float32; one row is done in registers: a tensor core would idle on 15 of 16."""
    if BLOCK_M == 1:
        return tl.sum(b.to(tl.float32) * v.to(tl.float32)[None, :], axis=1)
    else:
        return tl.dot(v, tl.trans(b), input_precision=PRECISION)


@triton.jit
def _add(
    y_rows: tl.tensor,
    length: tl.tensor,
    n: tl.tensor,
    width: tl.tensor,
    product: tl.tensor,
    scale: tl.tensor,
    BLOCK_M: tl.constexpr,
    ACCUMULATE: tl.constexpr,
) -> None:
    """`y += scale * product`, or `y =`; y_rows: address of one row, or `[BLOCK_M]` of them."""
    if BLOCK_M == 1:
        at = y_rows + n
        live = n < width
    else:
        m = tl.arange(0, BLOCK_M)
        at = y_rows[:, None] + n[None, :]
        live = (m < length)[:, None] & (n < width)[None, :]
    delta = scale * product
    if ACCUMULATE:
        delta += tl.load(at, mask=live, other=0.0).to(tl.float32)
    tl.store(at, delta.to(y_rows.dtype.element_ty), mask=live)
