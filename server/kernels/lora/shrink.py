"""LoRA's first half: `v = x A^T` for rows of many adapters, into the workspace.

Punica (arXiv:2310.18547) names the two regimes BGMV (a row an adapter) and SGMV (many rows an
adapter); as in S-LoRA (arXiv:2311.03285) ranks are the adapters' own.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.launch.configs import ShrinkConfig
from loraplex.server.kernels.launch.launch import dot_precision, wait
from loraplex.server.kernels.lora.segments import Segments, check_context, check_rows
from loraplex.server.kernels.lora.table import LoraTable
from loraplex.server.kernels.lora.tiles import (
    Tile,
    a_at,
    cut_ranks,
    load_tile,
    ranks_at,
    small_tile,
    split_share,
    tile_rows,
    total_rank_at,
)
from loraplex.server.kernels.lora.workspace import Workspace


def shrink(
    x: torch.Tensor,
    table: LoraTable,
    site: int,
    segments: Segments,
    workspace: Workspace,
    config: ShrinkConfig,
    *,
    after_input: bool = False,
) -> None:
    """Compute LoRA's first product: `v[p] = x[order[p]] A^T` for each sorted position p in a tile,
    A of its slot at `site`.

    x: `[rows, in_features]`, any row stride, in the adapters' dtype. v is left in float32 as the
    sum of `workspace.planes`: the fewer tiles the batch has, the more programs share a tile's input
    features, one plane each; columns beyond an adapter's ranks and rows in no tile keep what they
    had. Launches one kernel on the current stream and allocates nothing. Raises ValueError on a
    mismatch.

    after_input: x was written by the kernel before it on this stream, or earlier, and segments and
    table were complete when that one began: shrink finds its first weights' addresses while that
    one drains (programmatic dependent launch).
    """
    check_rows("x", x, segments, workspace)
    check_context(table, site, segments, workspace)
    if config.max_split > workspace.max_split:
        raise ValueError(f"max_split {config.max_split}, a workspace of {workspace.max_split}")
    if segments.rows == 0:
        return
    _shrink_kernel[(min(segments.max_tiles * config.max_split, config.num_programs),)](
        x,
        workspace.arguments,
        segments.routed,
        table.tensors,
        site,
        table.num_sites,
        x.stride(0),
        config.num_programs,
        IN=x.shape[1],
        MAX_SPLIT=config.max_split,
        MAX_PARTS=segments.max_parts,
        BLOCK_M=segments.tile_rows,
        BLOCK_K=config.block_k,
        WARPS=config.num_warps,
        STAGES=config.num_stages,
        PRECISION=dot_precision(x.dtype),
        **config.launch_options(early=after_input),
    )


def gather_embedding(
    token_ids: torch.Tensor, table: LoraTable, site: int, segments: Segments, workspace: Workspace
) -> None:
    """Compute LoRA's first product for an embedding: `v[p] = A^T[token_ids[order[p]]]` for each
    sorted position p in a tile; then `expand`.

    Shrink for `embed_tokens`, whose input is one-hot. token_ids: `[rows]` int32, each in the
    vocabulary; A^T: `[vocab, rank]` (adapters/manifest.py). One kernel, no allocation. Raises
    ValueError on a mismatch.
    """
    if token_ids.shape != (segments.rows,) or token_ids.dtype != torch.int32:
        raise ValueError(f"token_ids must be int32 [{segments.rows}], got {token_ids.dtype}")
    check_context(table, site, segments, workspace)
    if segments.rows == 0:
        return
    _gather_kernel[(segments.max_tiles,)](
        token_ids,
        workspace.planes,
        workspace.splits,
        segments.order,
        segments.tiles,
        segments.num_tiles,
        table.words,
        table.ints,
        site,
        table.num_sites,
        token_ids.stride(0),
        workspace.planes.stride(1),
        DTYPE={torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(
            workspace.dtype, tl.float32
        ),
        BLOCK_M=segments.tile_rows,
        BLOCK_R=64,
    )


@triton.jit(do_not_specialize=["site", "num_sites", "target_items"])
def _shrink_kernel(
    x_ptr: tl.tensor,
    workspace: tl.tuple,
    routed: tl.tuple,
    table: tl.tuple,
    site: tl.tensor,
    num_sites: tl.tensor,
    stride_x: tl.tensor,
    target_items: tl.tensor,
    IN: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """An item is (tile or its share of ranks, split of K); programs take items round robin."""
    # What the next item needs to know is fetched while the present one is computed: its record in
    # the table, and one item further ahead the tile, since the record's address depends on it.
    # The largest step: where it may end, every other may.
    UNIT: tl.constexpr = _step_of(BLOCK_K, 16, WARPS, BLOCK_M)
    planes_ptr, splits_ptr, stride_v, stride_plane = workspace
    order_ptr, tiles_ptr, num_tiles_ptr = routed
    tiles = tl.load(num_tiles_ptr)
    wanted = tl.maximum(1, tl.minimum(MAX_SPLIT, target_items // tl.maximum(tiles, 1)))
    span = tl.cdiv((IN + UNIT - 1) // UNIT, wanted) * UNIT
    splits = tl.cdiv(IN, span)
    items = tiles * splits
    item, step = tl.program_id(0), tl.num_programs(0)
    slot, tile = load_tile(tiles_ptr, item // splits, item < items, MAX_PARTS)
    of_site = _Site(table[0], table[1], order_ptr, site, num_sites)
    record = _load_record(of_site, slot, tile, BLOCK_M)
    ahead = item + step
    slot, next_tile = load_tile(tiles_ptr, ahead // splits, ahead < items, MAX_PARTS)
    # No early start of the next kernel: its programs would wait where the linear could run.
    wait(PDL)
    tl.store(splits_ptr, splits, mask=tl.program_id(0) == 0)
    for item in range(tl.program_id(0), items, step):
        next_record = _load_record(of_site, slot, next_tile, BLOCK_M)
        ahead = item + 2 * step
        slot, later_tile = load_tile(tiles_ptr, ahead // splits, ahead < items, MAX_PARTS)
        if record.total_rank > 0:
            first, ranks = cut_ranks(record.total_rank, tile.share)
            split = item % splits
            end = tl.minimum(split * span + span, IN)
            a_ptr = record.address.to(tl.pointer_type(x_ptr.dtype.element_ty))
            a_ptr = tl.multiple_of(a_ptr, 16)
            v_ptr = planes_ptr + split * stride_plane + tile.start * stride_v + first
            _shrink_tile(
                x_ptr, stride_x, order_ptr + tile.start, record.first_rows,
                _Part(tile.length, a_ptr + first * IN, ranks, v_ptr, stride_v, split * span, end),
                _Form(IN, BLOCK_K, WARPS, STAGES, PRECISION), BLOCK_M,
            )  # fmt: skip
        record, tile, next_tile = next_record, next_tile, later_tile


class _Form(NamedTuple):
    """Form of the shrink kernel. Constants: input features, those of a step of many rows, warps,
    stages of the loop, precision of float32.
    """

    inputs: Any
    step: Any
    warps: Any
    stages: Any
    precision: Any


class _Site(NamedTuple):
    """The table, the order of rows, and the site of which records are read."""

    words_ptr: Any
    ints_ptr: Any
    order_ptr: Any
    site: Any
    num_sites: Any


class _Record(NamedTuple):
    """Sum of ranks, address of A, and the tile's first rows, all that it has if they are few."""

    total_rank: Any
    address: Any
    first_rows: Any


class _Part(NamedTuple):
    """Part of the input features, `begin` to `end`, for one tile of `length` rows and `ranks` of
    its adapter's ranks. v: where the sums go.
    """

    length: Any
    a_ptr: Any
    ranks: Any
    v_ptr: Any
    stride_v: Any
    begin: Any
    end: Any


@triton.jit
def _load_record(of_site: _Site, slot: tl.tensor, tile: Tile, BLOCK_M: tl.constexpr) -> Any:
    record = slot.to(tl.int64) * of_site.num_sites + of_site.site
    total = tl.load(total_rank_at(of_site.ints_ptr, record))
    rows = tile_rows(of_site.order_ptr + tile.start, tile.length, small_tile(BLOCK_M))
    return _Record(total, tl.load(a_at(of_site.words_ptr, record)), rows)


@triton.jit
def _shrink_tile(
    x_ptr: tl.tensor,
    stride_x: tl.tensor,
    order_ptr: tl.tensor,
    first_rows: tl.tensor,
    part: _Part,
    form: _Form,
    BLOCK_M: tl.constexpr,
) -> None:
    """order_ptr: of the tile's rows; first_rows: `[small_tile(BLOCK_M)]`."""
    SMALL: tl.constexpr = small_tile(BLOCK_M)
    if part.length <= SMALL:
        few = x_ptr + first_rows * stride_x
        _shrink_few(few, part, form, BLOCK_M)
    else:
        many = x_ptr + tile_rows(order_ptr, part.length, BLOCK_M) * stride_x
        if BLOCK_M <= 16:
            _shrink_few(many, part, form, BLOCK_M)
        elif part.ranks <= 16:
            _shrink_rows(many, part, form, 16, form.step, 1)
        else:
            _shrink_rows(many, part, form, 64, form.step, 1)


@triton.jit(do_not_specialize=["site", "num_sites"])
def _gather_kernel(
    token_ids_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    splits_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    num_tiles_ptr: tl.tensor,
    words_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    stride_token: tl.tensor,
    stride_v: tl.tensor,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    tl.store(splits_ptr, 1, mask=tile == 0)
    part, _ = split_share(tl.load(tiles_ptr + tile * 4 + 3))
    # One of a tile's shares gathers all.
    if (tile < tl.load(num_tiles_ptr)) & (part == 0):
        start = tl.load(tiles_ptr + tile * 4 + 1)
        m = tl.arange(0, BLOCK_M)
        live = m < tl.load(tiles_ptr + tile * 4 + 2)
        record = tl.load(tiles_ptr + tile * 4).to(tl.int64) * num_sites + site
        rank = tl.load(ranks_at(ints_ptr, record))
        a_ptr = tl.load(a_at(words_ptr, record)).to(tl.pointer_type(DTYPE))
        rows = tl.load(order_ptr + start + m, mask=live, other=0)
        tokens = tl.load(token_ids_ptr + rows * stride_token, mask=live, other=0).to(tl.int64)
        for first in range(0, rank, BLOCK_R):
            r = first + tl.arange(0, BLOCK_R)
            mask = live[:, None] & (r < rank)[None, :]
            v = tl.load(a_ptr + tokens[:, None] * rank + r[None, :], mask=mask, other=0.0)
            at = (start + m)[:, None] * stride_v + r[None, :]
            tl.store(planes_ptr + at, v.to(tl.float32), mask=mask)


@triton.jit
def _shrink_few(x_rows: tl.tensor, part: _Part, form: _Form, TILE_ROWS: tl.constexpr) -> None:
    """Up to 16 rows, of tiles of TILE_ROWS."""
    WARPS: tl.constexpr = form.warps
    STEP_16: tl.constexpr = _step_of(form.step, 16, WARPS, TILE_ROWS)
    STEP_32: tl.constexpr = _step_of(form.step, 32, WARPS, TILE_ROWS)
    STEP_64: tl.constexpr = _step_of(form.step, 64, WARPS, TILE_ROWS)
    if part.ranks <= 16:
        _shrink_rows(x_rows, part, form, 16, STEP_16, WARPS)
    elif part.ranks <= 32:
        _shrink_rows(x_rows, part, form, 32, STEP_32, WARPS)
    else:
        _shrink_rows(x_rows, part, form, 64, STEP_64, WARPS)


@triton.constexpr_function
def _step_of(block_k: int, ranks: int, warps: int, tile_rows: int) -> int:
    """Input features of few rows' step with so many ranks: as many weights whatever the ranks, but
    in tiles of 32 rows as many features as of more rows. At least 16, which `dot` takes, for each
    warp."""
    wanted = block_k if tile_rows == 32 else block_k * 16 // ranks
    return max(wanted, 16 * warps)


@triton.jit
def _shrink_rows(
    x_rows: tl.tensor,
    part: _Part,
    form: _Form,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
) -> None:
    """BLOCK_R ranks at a time. WARPS: how many divide few rows' work."""
    m = tl.arange(0, x_rows.shape[0])[:, None]
    for first in range(0, part.ranks, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        if BLOCK_R < 16 * WARPS:
            low = _low_by_warps(x_rows, part, r, form, BLOCK_K, WARPS)
        else:
            low = _low(x_rows, part, r, form, BLOCK_K)
        known = (m < part.length) & (r < part.ranks)[None, :]
        tl.store(part.v_ptr + m * part.stride_v + r[None, :], low, mask=known)


@triton.jit
def _low(x_rows: tl.tensor, part: _Part, r: tl.tensor, form: _Form, BLOCK_K: tl.constexpr) -> Any:
    """`x A^T` of ranks r, float32 `[rows, ranks]`. Few rows are the tensor cores' 8 columns, not
    their 16 rows."""
    BLOCK_M: tl.constexpr = x_rows.shape[0]
    BLOCK_R: tl.constexpr = r.shape[0]
    FEW: tl.constexpr = BLOCK_M <= 16
    IN: tl.constexpr = form.inputs
    live = (tl.arange(0, BLOCK_M) < part.length)[:, None]
    acc = tl.zeros((BLOCK_R, BLOCK_M) if FEW else (BLOCK_M, BLOCK_R), tl.float32)
    for step in tl.range(part.begin, part.end, BLOCK_K, num_stages=form.stages):
        cols = (step + tl.arange(0, BLOCK_K))[None, :]
        rows = tl.load(x_rows[:, None] + cols, mask=_inside(live, cols, IN, BLOCK_K), other=0.0)
        known = _inside((r < part.ranks)[:, None], cols, IN, BLOCK_K)
        weights = tl.load(part.a_ptr + r[:, None] * IN + cols, mask=known, other=0.0)
        if FEW:
            acc = tl.dot(weights, tl.trans(rows), acc, input_precision=form.precision)
        else:
            acc = tl.dot(rows, tl.trans(weights), acc, input_precision=form.precision)
    return tl.trans(acc) if FEW else acc


@triton.jit
def _low_by_warps(
    x_rows: tl.tensor,
    part: _Part,
    r: tl.tensor,
    form: _Form,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
) -> Any:
    """The same of too few ranks for all warps, which would compute the same: each has its own input
    features, and their sums are added up last."""
    IN: tl.constexpr = form.inputs
    PART: tl.constexpr = BLOCK_K // WARPS
    k = (tl.arange(0, WARPS)[:, None] * PART + tl.arange(0, PART)[None, :])[:, None, :]
    live = (tl.arange(0, x_rows.shape[0]) < part.length)[None, :, None]
    acc = tl.zeros((WARPS, r.shape[0], x_rows.shape[0]), tl.float32)
    for step in tl.range(part.begin, part.end, BLOCK_K, num_stages=form.stages):
        cols = step + k
        at = x_rows[None, :, None] + cols
        rows = tl.load(at, mask=_inside(live, cols, IN, BLOCK_K), other=0.0)
        known = _inside((r < part.ranks)[None, :, None], cols, IN, BLOCK_K)
        weights = tl.load(part.a_ptr + r[None, :, None] * IN + cols, mask=known, other=0.0)
        acc = tl.dot(weights, tl.permute(rows, (0, 2, 1)), acc, input_precision=form.precision)
    return tl.trans(tl.sum(acc, axis=0))


@triton.jit
def _inside(live: tl.tensor, cols: tl.tensor, IN: tl.constexpr, BLOCK_K: tl.constexpr) -> Any:
    """Steps that end where the input does need no mask for it."""
    if IN % BLOCK_K == 0:
        return live
    else:
        return live & (cols < IN)
