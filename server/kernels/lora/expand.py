"""LoRA's second half: `y += scale * v B^T`, in place, with v from the workspace; and DoRA's lengths
and biases on the base's own product.

The projections of a fused site lie side by side in y; one flat list of pieces of columns covers
them and all tiles, so a narrow k or v costs no idle programs. Formulas: Punica, arXiv:2310.18547;
ragged ranks: S-LoRA, arXiv:2311.03285.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.configs import ExpandConfig
from loraplex.server.kernels.launch.launch import dot_precision, load_first
from loraplex.server.kernels.lora.segments import Segments, check_context, check_rows, padded_widths
from loraplex.server.kernels.lora.table import LoraTable, VectorTable
from loraplex.server.kernels.lora.tiles import (
    LowRank,
    Records,
    even_rank,
    load_b,
    load_projection,
    load_tile,
    load_v,
    low_rank_of,
    low_rank_one,
    product,
    small_tile,
    split_share,
    take_range,
    tile_rows,
)
from loraplex.server.kernels.lora.workspace import Workspace

_BLOCK = 1024


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
    """Add LoRA's second product to the base's output: `y[order[p], slice_i] += scale_i * v[p,
    ranks_i] B_i^T` for each projection i.

    y: `[rows, sum(widths)]`, any row stride, in the adapters' dtype: the base's output, changed in
    place; widths: output features of the site's 1 to 3 projections, in order. Call it after the
    site's `shrink`. Rows in no tile and projections of rank 0 are neither read nor written. Sums in
    float32; one kernel on the current stream, no allocation. Raises ValueError on a mismatch.

    accumulate: False writes instead of adding, for a delta that the kernel after the base's GEMM
    adds (`PendingDelta`); both halves of LoRA can then run beside that GEMM. after_gemm: what it
    reads was written by the kernel before it on this stream, or earlier; expand starts while that
    one drains and waits for it in time (programmatic dependent launch).
    """
    check_rows("y", y, segments, workspace)
    check_context(table, site, segments, workspace)
    padded = padded_widths(widths, y.shape[1])
    if segments.rows == 0:
        return
    pieces = sum(triton.cdiv(width, config.piece) for width in widths)
    _expand_kernel[(min(segments.max_tiles * pieces, config.num_programs),)](
        y,
        workspace.arguments,
        segments.routed,
        table.tensors,
        site,
        table.num_sites,
        y.stride(0),
        *padded,
        MAX_SPLIT=workspace.max_split,
        MAX_PARTS=segments.max_parts,
        BLOCK_M=segments.tile_rows,
        PIECE=config.piece,
        STAGES=config.num_stages,
        PRECISION=dot_precision(y.dtype),
        ACCUMULATE=accumulate,
        **config.launch_options(early=after_gemm),
    )


@triton.jit(do_not_specialize=["site", "num_sites"])
def _expand_kernel(
    y_ptr: tl.tensor,
    workspace: tl.tuple,
    routed: tl.tuple,
    table: tl.tuple,
    site: tl.tensor,
    num_sites: tl.tensor,
    stride_y: tl.tensor,
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
    records = Records(table[0], table[1], table[2], site, num_sites)
    slot, tile = load_tile(tiles_ptr, first_item // KINDS, first_item < items, MAX_PARTS)
    projection = load_projection(records, slot, first_item % KINDS)
    ahead = first_item + 1
    slot, next_tile = load_tile(tiles_ptr, ahead // KINDS, ahead < items, MAX_PARTS)
    splits = load_first(workspace[1], PDL)
    for item in range(first_item, items):
        next_projection = load_projection(records, slot, (item + 1) % KINDS)
        ahead = item + 2
        slot, later_tile = load_tile(tiles_ptr, ahead // KINDS, ahead < items, MAX_PARTS)
        if projection.rank > 0:
            done = item // KINDS * PIECES[2]
            _expand_item(
                y_ptr, stride_y, order_ptr + tile.start,
                low_rank_of(projection, tile, workspace, splits, y_ptr.dtype.element_ty),
                _Cut(item % KINDS, tile.share, begin - done, end - done),
                W0, W1, W2, _Form(MAX_SPLIT, PIECE, STAGES, PRECISION, ACCUMULATE), BLOCK_M,
            )  # fmt: skip
        projection, tile, next_tile = next_projection, next_tile, later_tile


class _Form(NamedTuple):
    """Form of the expand kernel. Constants: planes of v, columns of a piece at rank 16, stages of
    the loop, precision of float32, and whether the product is added to y or takes its place.
    """

    max_split: Any
    piece: Any
    stages: Any
    precision: Any
    accumulate: Any


class _Cut(NamedTuple):
    """A program's part of a tile: projection, share, and from which to which of its pieces."""

    projection: Any
    share: Any
    begin: Any
    end: Any


@triton.constexpr_function
def _count_pieces(w0: int, w1: int, w2: int, piece: int) -> tuple[int, int, int]:
    """Pieces of the first, the first two and all projections."""
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
    low: LowRank,
    cut: _Cut,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    form: _Form,
    BLOCK_M: tl.constexpr,
) -> None:
    """A projection's pieces of columns, of few rows or many."""
    PIECE: tl.constexpr = form.piece
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
    # Of a part of a piece there is nothing to hide then.
    WHOLE: tl.constexpr = (W0 | W1 | W2) % PIECE == 0
    block_r = tl.maximum(low.b.rank, 16 << doublings)
    length = low.v.rows
    SMALL: tl.constexpr = small_tile(BLOCK_M)
    if length <= SMALL:
        few = y_slice + tile_rows(order_ptr, length, SMALL) * stride_y
        _expand_ranks(few, low, block_r, (col, end), form, WHOLE)
    else:
        many = y_slice + tile_rows(order_ptr, length, BLOCK_M) * stride_y
        _expand_ranks(many, low, block_r, (col, end), form, WHOLE)


# One block of columns for one tile of rows.


@triton.jit
def _expand_ranks(
    y_rows: tl.tensor,
    low: LowRank,
    block_r: tl.tensor,
    columns: tl.tuple,
    form: _Form,
    WHOLE: tl.constexpr,
) -> None:
    """y_rows: addresses `[BLOCK_M]`; block_r: by which the size of a piece is chosen, the rank or
    more: of about PIECE * 16 weights; columns: where they begin and end. WHOLE: such pieces end
    where columns do."""
    rank = low.b.rank
    if rank % 8 != 0:
        _expand_looped(y_rows, low, columns, form, form.piece, 16)
    elif block_r <= 16:
        _expand_pieces(y_rows, even_rank(low), columns, form, 16, WHOLE)
    elif block_r <= 32:
        _expand_pieces(y_rows, even_rank(low), columns, form, 32, WHOLE)
    elif rank <= 64:
        _expand_pieces(y_rows, even_rank(low), columns, form, 64, WHOLE)
    else:
        _expand_looped(y_rows, even_rank(low), columns, form, form.piece // 4, 64)


@triton.jit
def _expand_pieces(
    y_rows: tl.tensor,
    low: LowRank,
    columns: tl.tuple,
    form: _Form,
    BLOCK_R: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """Where the whole rank fits one step: v is read once, pieces of B and y are prefetched."""
    BLOCK_M: tl.constexpr = y_rows.shape[0]
    PIECE: tl.constexpr = form.piece * 16 // BLOCK_R
    v, b, scale = low
    col, end = columns
    r = tl.arange(0, BLOCK_R)
    total = load_v(v, r, b.rank, form.max_split, BLOCK_M)
    # Less work than of all columns, but float16 may not hold what the product would bring back.
    EARLY: tl.constexpr = y_rows.dtype.element_ty != tl.float16
    if EARLY:
        total = scale * total
    for begin in tl.range(col, end, PIECE, num_stages=form.stages):
        n = begin + tl.arange(0, PIECE)
        delta = product(total, load_b(b, n, r, end, WHOLE), BLOCK_M, form.precision)
        if not EARLY:
            delta = scale * delta
        _write(y_rows, v.rows, n, end, delta, form.accumulate, WHOLE)


@triton.jit
def _expand_looped(
    y_rows: tl.tensor,
    low: LowRank,
    columns: tl.tuple,
    form: _Form,
    PIECE: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """Any rank, BLOCK_R columns of B at a time."""
    BLOCK_M: tl.constexpr = y_rows.shape[0]
    v, b, scale = low
    col, end = columns
    for begin in tl.range(col, end, PIECE, num_stages=1):
        n = begin + tl.arange(0, PIECE)
        acc = low_rank_one(v, b, n, end, form.max_split, BLOCK_M, PIECE, BLOCK_R, form.precision)
        _write(y_rows, v.rows, n, end, scale * acc, form.accumulate, False)


@triton.jit
def _write(
    y_rows: tl.tensor,
    length: tl.tensor,
    n: tl.tensor,
    end: tl.tensor,
    delta: tl.tensor,
    ACCUMULATE: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """`y += delta`, or `y = delta`."""
    at = y_rows[:, None] + n[None, :]
    live = (tl.arange(0, y_rows.shape[0]) < length)[:, None]
    if not WHOLE:
        live &= (n < end)[None, :]
    if ACCUMULATE:
        delta += tl.load(at, mask=live, other=0.0).to(tl.float32)
    tl.store(at, delta.to(y_rows.dtype.element_ty), mask=live)


def scale_outputs(y: torch.Tensor, slots: torch.Tensor, table: VectorTable, site: int) -> None:
    """Apply adapters' factors and addends to the base's output: `y = factor * y + addend` in place,
    in rows whose adapter has these of the site.

    y: `[rows, out_features]`, of the base alone, contiguous. slots: int32 `[rows]`, -1 = no
    adapter. In float32; one kernel, no allocation. Raises ValueError on a mismatch.
    """
    rows, features = y.shape
    if not y.is_contiguous():
        raise ValueError(f"a product must be contiguous: {list(y.shape)}, {y.stride()}")
    if slots.shape != (rows,) or slots.dtype != torch.int32:
        raise ValueError(f"slots must be int32 [{rows}], got {slots.dtype} {list(slots.shape)}")
    table.check_site(site)
    if rows:
        _scale_outputs_kernel[(rows * triton.cdiv(features, _BLOCK),)](
            y, slots, table.words, site, table.num_sites, features, BLOCK=_BLOCK
        )


@triton.jit(
    do_not_specialize=["site", "num_sites", "features"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _scale_outputs_kernel(
    y_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    words_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    features: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    blocks = tl.cdiv(features, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        address = tl.load(words_ptr + slot * num_sites + site)
        if address != 0:
            n = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
            inside = n < features
            vectors = address.to(tl.pointer_type(tl.float32))
            factor = tl.load(vectors + n, mask=inside, other=0.0)
            addend = tl.load(vectors + features + n, mask=inside, other=0.0)
            at = y_ptr + row * features + n
            y = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            tl.store(at, (y * factor + addend).to(y_ptr.dtype.element_ty), mask=inside)
