"""LoRA's first half: `v = x A^T` for rows of many adapters, into the workspace's bridge.

Punica (arXiv:2310.18547) names the two regimes BGMV (a row an adapter) and SGMV (many rows an
adapter); as in S-LoRA (arXiv:2311.03285) ranks are the adapters' own.
"""

import torch
import triton
import triton.language as tl

from server.kernels.checks import check_context, check_launch
from server.kernels.configs import ShrinkConfig
from server.kernels.segments import Segments
from server.kernels.table import LoraTable
from server.kernels.workspace import Workspace


def shrink(
    x: torch.Tensor,
    table: LoraTable,
    site: int,
    segments: Segments,
    workspace: Workspace,
    config: ShrinkConfig,
) -> None:
    """`bridge[p] = x[order[p]] A^T` for each sorted position p in a tile, A of its slot at `site`.

    x: `[rows, in_features]`, any row stride, in the workspace's dtype, which is the adapters' too.
    Columns beyond an adapter's ranks, and rows in no tile, are left as they are. Accumulates in
    float32; the splits of K are summed in a fixed order by the program that arrives last. Launches
    one kernel on the current stream and allocates nothing. Raises ValueError on a mismatch.
    """
    check_launch("x", x, table, site, segments, workspace)
    if segments.rows == 0:
        return
    in_features = x.shape[1]
    span = triton.cdiv(triton.cdiv(in_features, config.block_k), config.split_k) * config.block_k
    splits = triton.cdiv(in_features, span)
    if splits > workspace.max_split or (splits > 1 and segments.rows > workspace.planes.shape[1]):
        raise ValueError(f"split_k {splits} needs more planes than {list(workspace.planes.shape)}")
    _shrink_kernel[(min(segments.max_tiles * splits, config.num_programs),)](
        x,
        workspace.bridge,
        workspace.planes,
        workspace.counters,
        segments.order,
        segments.tiles,
        segments.num_tiles,
        table.words,
        table.ints,
        site,
        table.num_sites,
        x.stride(0),
        workspace.bridge.stride(0),
        workspace.planes.stride(0),
        IN=in_features,
        SPAN=span,
        SPLITS=splits,
        BLOCK_M=segments.tile_rows,
        BLOCK_K=config.block_k,
        BLOCK_ROW_K=max(64, min(config.row_block_k, triton.next_power_of_2(span))),
        STAGES=config.num_stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
    )


def gather_embedding(
    token_ids: torch.Tensor, table: LoraTable, site: int, segments: Segments, workspace: Workspace
) -> None:
    """`bridge[p] = A^T[token_ids[order[p]]]`: shrink for `embed_tokens`, whose input is one-hot.

    token_ids: `[rows]` int32, each in the vocabulary; A^T: `[vocab, rank]` (adapters/manifest.py).
    """
    if token_ids.shape != (segments.rows,) or token_ids.dtype != torch.int32:
        raise ValueError(f"token_ids must be int32 [{segments.rows}], got {token_ids.dtype}")
    check_context(table, site, segments, workspace)
    if segments.rows == 0:
        return
    _gather_kernel[(segments.max_tiles,)](
        token_ids,
        workspace.bridge,
        segments.order,
        segments.tiles,
        segments.num_tiles,
        table.words,
        table.ints,
        site,
        table.num_sites,
        token_ids.stride(0),
        workspace.bridge.stride(0),
        BLOCK_M=segments.tile_rows,
        BLOCK_R=64,
    )


@triton.jit(do_not_specialize=["site", "num_sites"])
def _shrink_kernel(
    x_ptr: tl.tensor,
    bridge_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    num_tiles_ptr: tl.tensor,
    words_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    stride_x: tl.tensor,
    stride_bridge: tl.tensor,
    stride_plane: tl.tensor,
    IN: tl.constexpr,
    SPAN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROW_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """An item is (tile, split of K); programs take items round robin."""
    items = tl.load(num_tiles_ptr) * SPLITS
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile = item // SPLITS
        split = item % SPLITS
        start = tl.load(tiles_ptr + tile * 4 + 1)
        length = tl.load(tiles_ptr + tile * 4 + 2)
        record = tl.load(tiles_ptr + tile * 4).to(tl.int64) * num_sites + site
        total = tl.load(ints_ptr + record * 16 + 11)
        a_ptr = tl.load(words_ptr + record * 8).to(tl.pointer_type(x_ptr.dtype.element_ty))
        a_ptr = tl.multiple_of(a_ptr, 16)
        if total > 0:
            bridge = bridge_ptr + start * stride_bridge
            planes = planes_ptr + start * stride_bridge
            if SPLITS == 1:
                _shrink_tile(
                    x_ptr, stride_x, order_ptr + start, length, a_ptr, bridge, stride_bridge, total,
                    0, IN, SPAN, BLOCK_M, BLOCK_K, BLOCK_ROW_K, STAGES, PRECISION,
                )  # fmt: skip
            else:
                _shrink_tile(
                    x_ptr, stride_x, order_ptr + start, length, a_ptr,
                    planes + split * stride_plane, stride_bridge, total,
                    split * SPAN, IN, SPAN, BLOCK_M, BLOCK_K, BLOCK_ROW_K, STAGES, PRECISION,
                )  # fmt: skip
                # Every thread's partial sums are in memory before the program counts itself.
                tl.debug_barrier()
                arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
                if arrived == SPLITS - 1:
                    if length == 1:
                        _sum_planes(
                            planes, bridge, stride_plane, stride_bridge, 1, total, SPLITS, 1
                        )
                    else:
                        _sum_planes(
                            planes, bridge, stride_plane, stride_bridge, length, total, SPLITS, 16
                        )
                    tl.store(counters_ptr + tile, 0)


@triton.jit
def _shrink_tile(
    x_ptr: tl.tensor,
    stride_x: tl.tensor,
    order_ptr: tl.tensor,
    length: tl.tensor,
    a_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_out: tl.tensor,
    total: tl.tensor,
    k_begin: tl.tensor,
    IN: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROW_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    if length == 1:
        x_row = x_ptr + tl.load(order_ptr).to(tl.int64) * stride_x
        if total < 64:
            _shrink_row(x_row, a_ptr, out_ptr, total, k_begin, IN, SPAN, 16, BLOCK_ROW_K, STAGES)
        else:
            _shrink_row(
                x_row, a_ptr, out_ptr, total, k_begin, IN, SPAN, 64, BLOCK_ROW_K // 4, STAGES
            )
    else:
        m = tl.arange(0, BLOCK_M)
        live = m < length
        x_rows = x_ptr + tl.load(order_ptr + m, mask=live, other=0).to(tl.int64) * stride_x
        if total <= 16:
            _shrink_rows(
                x_rows, live, a_ptr, out_ptr, stride_out, total, k_begin,
                IN, SPAN, BLOCK_M, 16, BLOCK_K, STAGES, PRECISION,
            )  # fmt: skip
        else:
            _shrink_rows(
                x_rows, live, a_ptr, out_ptr, stride_out, total, k_begin,
                IN, SPAN, BLOCK_M, 64, BLOCK_K, STAGES, PRECISION,
            )  # fmt: skip


@triton.jit
def _shrink_row(
    x_row: tl.tensor,
    a_ptr: tl.tensor,
    out_ptr: tl.tensor,
    total: tl.tensor,
    k_begin: tl.tensor,
    IN: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One row: multiply and add in registers; a tensor core would idle on 15 of 16 rows."""
    k = tl.arange(0, BLOCK_K)
    for first in range(0, total, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        acc = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
        for step in tl.range(0, SPAN, BLOCK_K, num_stages=STAGES):
            cols = k_begin + step + k
            inside = cols < IN
            live = (r < total)[:, None] & inside[None, :]
            a = tl.load(a_ptr + r[:, None] * IN + cols[None, :], mask=live, other=0.0)
            x = tl.load(x_row + cols, mask=inside, other=0.0)
            acc += a.to(tl.float32) * x.to(tl.float32)[None, :]
        sums = tl.sum(acc, axis=1)
        tl.store(out_ptr + r, sums.to(out_ptr.dtype.element_ty), mask=r < total)


@triton.jit
def _shrink_rows(
    x_rows: tl.tensor,
    live_rows: tl.tensor,
    a_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_out: tl.tensor,
    total: tl.tensor,
    k_begin: tl.tensor,
    IN: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """A tile of rows on tensor cores."""
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    for first in range(0, total, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for step in tl.range(0, SPAN, BLOCK_K, num_stages=STAGES):
            cols = k_begin + step + k
            inside = (cols < IN)[None, :]
            x = tl.load(
                x_rows[:, None] + cols[None, :], mask=live_rows[:, None] & inside, other=0.0
            )
            live = (r < total)[:, None] & inside
            a = tl.load(a_ptr + r[:, None] * IN + cols[None, :], mask=live, other=0.0)
            acc = tl.dot(x, tl.trans(a), acc, input_precision=PRECISION)
        tl.store(
            out_ptr + m[:, None] * stride_out + r[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=live_rows[:, None] & (r < total)[None, :],
        )


@triton.jit
def _sum_planes(
    planes_ptr: tl.tensor,
    bridge_ptr: tl.tensor,
    stride_plane: tl.tensor,
    stride_bridge: tl.tensor,
    length: tl.tensor,
    total: tl.tensor,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Always split 0 first: the same sum whichever program does it."""
    for row in range(0, length, ROWS):
        m = row + tl.arange(0, ROWS)
        for first in range(0, total, 64):
            r = first + tl.arange(0, 64)
            at = m[:, None] * stride_bridge + r[None, :]
            live = (m < length)[:, None] & (r < total)[None, :]
            acc = tl.zeros((ROWS, 64), tl.float32)
            for split in tl.static_range(SPLITS):
                # Written by other processors: past the L1 cache.
                source = planes_ptr + split * stride_plane + at
                acc += tl.load(source, mask=live, other=0.0, cache_modifier=".cg")
            tl.store(bridge_ptr + at, acc.to(bridge_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["site", "num_sites"])
def _gather_kernel(
    token_ids_ptr: tl.tensor,
    bridge_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    num_tiles_ptr: tl.tensor,
    words_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    stride_token: tl.tensor,
    stride_bridge: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles_ptr):
        start = tl.load(tiles_ptr + tile * 4 + 1)
        m = tl.arange(0, BLOCK_M)
        live = m < tl.load(tiles_ptr + tile * 4 + 2)
        record = tl.load(tiles_ptr + tile * 4).to(tl.int64) * num_sites + site
        rank = tl.load(ints_ptr + record * 16 + 8)
        a_ptr = tl.load(words_ptr + record * 8).to(tl.pointer_type(bridge_ptr.dtype.element_ty))
        rows = tl.load(order_ptr + start + m, mask=live, other=0)
        tokens = tl.load(token_ids_ptr + rows * stride_token, mask=live, other=0).to(tl.int64)
        for first in range(0, rank, BLOCK_R):
            r = first + tl.arange(0, BLOCK_R)
            mask = live[:, None] & (r < rank)[None, :]
            v = tl.load(a_ptr + tokens[:, None] * rank + r[None, :], mask=mask, other=0.0)
            at = (start + m)[:, None] * stride_bridge + r[None, :]
            tl.store(bridge_ptr + at, v, mask=mask)
