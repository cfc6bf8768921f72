"""LoRA's second half: `y += scale * v B^T`, in place, with v from the workspace.

The projections of a fused site lie side by side in y; one flat list of pieces of columns covers
them and all tiles, so a narrow k or v costs no idle programs. Formulas: Punica, arXiv:2310.18547;
ragged ranks: S-LoRA, arXiv:2311.03285.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from server.kernels.launch.configs import ExpandConfig
from server.kernels.launch.launch import load_first
from server.kernels.lora.checks import check_context, check_rows, padded_widths
from server.kernels.lora.low_rank import LoraB, Shrunk, even, load_b, load_v, low_rank_one, product
from server.kernels.lora.segments import Segments
from server.kernels.lora.table import LoraTable
from server.kernels.lora.tiles import (
    ProjectionRecord,
    Records,
    load_projection,
    load_tile,
    small_tile,
    split_share,
    take_range,
    tile_rows,
)
from server.kernels.lora.workspace import Workspace


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
    pieces = sum(triton.cdiv(width, config.piece) for width in widths)
    pdl = after_gemm and config.programmatic_launch
    _expand_kernel[(min(segments.max_tiles * pieces, config.num_programs),)](
        y,
        workspace.planes,
        workspace.splits,
        (segments.order, segments.tiles, segments.num_tiles),
        table.words,
        table.ints,
        table.floats,
        site,
        table.num_sites,
        y.stride(0),
        workspace.planes.stride(1),
        workspace.planes.stride(0),
        *padded,
        MAX_SPLIT=workspace.max_split,
        MAX_PARTS=segments.max_parts,
        BLOCK_M=segments.tile_rows,
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
    planes_ptr: tl.tensor,
    splits_ptr: tl.tensor,
    routed: tl.tuple,
    words_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    floats_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    stride_y: tl.tensor,
    stride_v: tl.tensor,
    stride_plane: tl.tensor,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program takes a range of all tiles' pieces of columns, as many as every other. An item is
    what it has of one projection of one tile; what the next ones need to know is fetched ahead, as
    in shrink."""
    order_ptr, tiles_ptr, num_tiles_ptr = routed
    PIECES: tl.constexpr = _count_pieces(W0, W1, W2, PIECE)
    KINDS: tl.constexpr = 1 + (W1 > 0) + (W2 > 0)
    begin, end = take_range(tl.load(num_tiles_ptr) * PIECES[2])
    first_item = _item_at(begin, PIECES, KINDS)
    items = tl.where(begin < end, _item_at(end - 1, PIECES, KINDS) + 1, first_item)
    records = Records(words_ptr, ints_ptr, floats_ptr, site, num_sites)
    slot, tile = load_tile(tiles_ptr, first_item // KINDS, first_item < items, MAX_PARTS)
    projection = load_projection(records, slot, first_item % KINDS)
    ahead = first_item + 1
    slot, next_tile = load_tile(tiles_ptr, ahead // KINDS, ahead < items, MAX_PARTS)
    splits = load_first(splits_ptr, PDL)
    for item in range(first_item, items):
        next_projection = load_projection(records, slot, (item + 1) % KINDS)
        ahead = item + 2
        slot, later_tile = load_tile(tiles_ptr, ahead // KINDS, ahead < items, MAX_PARTS)
        if projection.rank > 0:
            done = item // KINDS * PIECES[2]
            v_ptr = planes_ptr + tile.start * stride_v + projection.first
            _expand_item(
                y_ptr, stride_y, order_ptr + tile.start,
                Shrunk(v_ptr, stride_v, stride_plane, splits, tile.length),
                projection, _Cut(item % KINDS, tile.share, begin - done, end - done),
                W0, W1, W2, MAX_SPLIT, BLOCK_M, PIECE, STAGES, PRECISION, ACCUMULATE,
            )  # fmt: skip
        projection, tile, next_tile = next_projection, next_tile, later_tile


class _Cut(NamedTuple):
    """What a program has of a tile: projection, share, and from which to which of its pieces."""

    projection: Any
    share: Any
    begin: Any
    end: Any


@triton.constexpr_function
def _count_pieces(w0: int, w1: int, w2: int, piece: int) -> tuple[int, int, int]:
    """Of the first, the first two and all projections."""
    n0, n1, n2 = (-(-width // piece) for width in (w0, w1, w2))
    return n0, n0 + n1, n0 + n1 + n2


@triton.jit
def _item_at(piece: tl.tensor, PIECES: tl.constexpr, KINDS: tl.constexpr) -> Any:
    """The item that a piece is of: tile * KINDS + projection."""
    tile = piece // PIECES[2]
    of_tile = piece - tile * PIECES[2]
    p = (of_tile >= PIECES[0]).to(tl.int32) + (of_tile >= PIECES[1]).to(tl.int32)
    return tile * KINDS + p


@triton.jit
def _expand_item(
    y_ptr: tl.tensor,
    stride_y: tl.tensor,
    order_ptr: tl.tensor,
    v: Shrunk,
    projection: ProjectionRecord,
    cut: _Cut,
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
    """A projection's pieces of columns, of few rows or many."""
    p = cut.projection
    PIECES: tl.constexpr = _count_pieces(W0, W1, W2, PIECE)
    y_slice = y_ptr + tl.where(p == 0, 0, tl.where(p == 1, W0, W0 + W1))
    width = tl.where(p == 0, W0, tl.where(p == 1, W1, W2))
    before = tl.where(p == 0, 0, tl.where(p == 1, PIECES[0], PIECES[1]))
    # A share's pieces are so much narrower as there are shares.
    part, doublings = split_share(cut.share)
    n, wide = tl.cdiv(width, PIECE), tl.multiple_of(PIECE >> doublings, PIECE // 4)
    shift = part * n - before
    col = (shift + tl.maximum(cut.begin, before)) * wide
    end = tl.minimum(width, (shift + tl.minimum(cut.end, before + n)) * wide)
    b_ptr = projection.address.to(tl.pointer_type(y_ptr.dtype.element_ty))
    b = LoraB(tl.multiple_of(b_ptr, 16), projection.rank)
    # Of a part of a piece there is nothing to hide then.
    WHOLE: tl.constexpr = (W0 | W1 | W2) % PIECE == 0
    block_r = tl.maximum(b.rank, 16 << doublings)
    SMALL: tl.constexpr = small_tile(BLOCK_M)
    if v.rows <= SMALL:
        few = tile_rows(order_ptr, v.rows, SMALL)
        _expand_ranks(
            y_slice + few * stride_y, v, b, block_r, projection.scale, col, end,
            MAX_SPLIT, SMALL, PIECE, STAGES, PRECISION, ACCUMULATE, WHOLE,
        )  # fmt: skip
    else:
        many = tile_rows(order_ptr, v.rows, BLOCK_M)
        _expand_ranks(
            y_slice + many * stride_y, v, b, block_r, projection.scale, col, end,
            MAX_SPLIT, BLOCK_M, PIECE, STAGES, PRECISION, ACCUMULATE, WHOLE,
        )  # fmt: skip


# One block of columns for one tile of rows.


@triton.jit
def _expand_ranks(
    y_rows: tl.tensor,
    v: Shrunk,
    b: LoraB,
    block_r: tl.tensor,
    scale: tl.tensor,
    col: tl.tensor,
    end: tl.tensor,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """Columns col .. end. y_rows: addresses `[BLOCK_M]`; block_r: by which the size of a piece is
    chosen, the rank or more: of about PIECE * 16 weights. WHOLE: such pieces end where columns
    do."""
    if b.rank % 8 != 0:
        _expand_looped(
            y_rows, v, b, scale, col, end,
            MAX_SPLIT, BLOCK_M, PIECE, 16, PRECISION, ACCUMULATE,
        )  # fmt: skip
    elif block_r <= 16:
        _expand_pieces(
            y_rows, v, even(b), scale, col, end,
            MAX_SPLIT, BLOCK_M, PIECE, 16, STAGES, PRECISION, ACCUMULATE, WHOLE,
        )  # fmt: skip
    elif block_r <= 32:
        _expand_pieces(
            y_rows, v, even(b), scale, col, end,
            MAX_SPLIT, BLOCK_M, PIECE // 2, 32, STAGES, PRECISION, ACCUMULATE, WHOLE,
        )  # fmt: skip
    elif b.rank <= 64:
        _expand_pieces(
            y_rows, v, even(b), scale, col, end,
            MAX_SPLIT, BLOCK_M, PIECE // 4, 64, STAGES, PRECISION, ACCUMULATE, WHOLE,
        )  # fmt: skip
    else:
        _expand_looped(
            y_rows, v, even(b), scale, col, end,
            MAX_SPLIT, BLOCK_M, PIECE // 4, 64, PRECISION, ACCUMULATE,
        )  # fmt: skip


@triton.jit
def _expand_pieces(
    y_rows: tl.tensor,
    v: Shrunk,
    b: LoraB,
    scale: tl.tensor,
    col: tl.tensor,
    end: tl.tensor,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """Where the whole rank fits one step: v is read once, pieces of B and y are prefetched."""
    r = tl.arange(0, BLOCK_R)
    total = load_v(v, r, b.rank, MAX_SPLIT, BLOCK_M)
    # Less work than of all columns, but float16 may not hold what the product would bring back.
    EARLY: tl.constexpr = y_rows.dtype.element_ty != tl.float16
    if EARLY:
        total = scale * total
    for begin in tl.range(col, end, PIECE, num_stages=STAGES):
        n = begin + tl.arange(0, PIECE)
        delta = product(total, load_b(b, n, r, end, WHOLE), BLOCK_M, PRECISION)
        if not EARLY:
            delta = scale * delta
        _write(y_rows, v.rows, n, end, delta, BLOCK_M, ACCUMULATE, WHOLE)


@triton.jit
def _expand_looped(
    y_rows: tl.tensor,
    v: Shrunk,
    b: LoraB,
    scale: tl.tensor,
    col: tl.tensor,
    end: tl.tensor,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    ACCUMULATE: tl.constexpr,
) -> None:
    """Any rank, BLOCK_R columns of B at a time."""
    for begin in tl.range(col, end, PIECE, num_stages=1):
        n = begin + tl.arange(0, PIECE)
        acc = low_rank_one(v, b, n, end, MAX_SPLIT, BLOCK_M, PIECE, BLOCK_R, PRECISION)
        _write(y_rows, v.rows, n, end, scale * acc, BLOCK_M, ACCUMULATE, False)


@triton.jit
def _write(
    y_rows: tl.tensor,
    length: tl.tensor,
    n: tl.tensor,
    end: tl.tensor,
    delta: tl.tensor,
    BLOCK_M: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """`y += delta`, or `y = delta`."""
    at = y_rows[:, None] + n[None, :]
    live = (tl.arange(0, BLOCK_M) < length)[:, None]
    if not WHOLE:
        live &= (n < end)[None, :]
    if ACCUMULATE:
        delta += tl.load(at, mask=live, other=0.0).to(tl.float32)
    tl.store(at, delta.to(y_rows.dtype.element_ty), mask=live)
