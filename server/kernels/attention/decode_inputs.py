"""Gathers before a step's first layer: inputs of its decodes, pages of its prompts."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_SEQUENCES = 64  # of a program


class Shifted(NamedTuple):
    """Rows of the rotation's tables, where these are not positions: `position + factor *
    shifts[row]`. shifts: int64 `[rows]`. turns: int64 `[batch]`, where they are written."""

    shifts: torch.Tensor
    factor: int
    turns: torch.Tensor


def gather_inputs(
    columns: torch.Tensor,
    tokens: torch.Tensor,
    page_table: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    shifted: Shifted | None = None,
) -> None:
    """Gather the inputs of a decode step from the host's columns and the rows. columns: int32 `[5 +
    2 * groups, batch]`: a sequence's row, its position, its token (-1 = `tokens[row,
    position]`), two that are not read; then of each group of layers a page granted in this step,
    and its place in the row's page table (-1 = none).

    Writes tokens and pages that came along to `tokens` (int32 `[rows, n]`) and `page_table` (int64
    `[groups, rows, n]`, contiguous), and what the step computes on to token_ids and positions,
    int64 `[batch]`. A row must not appear twice with something to write.
    """
    batch = columns.shape[1]
    shifts, factor, turns = shifted or (positions, 0, positions)
    _gather_inputs_kernel[(triton.cdiv(batch, _SEQUENCES),)](
        columns,
        tokens,
        page_table,
        token_ids,
        positions,
        shifts,
        turns,
        factor,
        columns.stride(0),
        tokens.stride(0),
        page_table.stride(0),
        page_table.stride(1),
        batch,
        GROUPS=len(page_table),
        SHIFTED=shifted is not None,
        BLOCK=_SEQUENCES,
        num_warps=2,
    )


def gather_pages(
    rows: torch.Tensor, kv_indptr: torch.Tensor, page_table: torch.Tensor, page_lists: torch.Tensor
) -> None:
    """Copy page numbers of rows to one list. `page_lists[kv_indptr[i] : kv_indptr[i + 1]] =
    page_table[rows[i], : …]`, all on the device.

    rows: int64 `[n]`; kv_indptr, page_lists: int32; page_table: int64 `[rows, pages a row]`.
    """
    if rows.shape[0]:
        _gather_pages_kernel[(rows.shape[0],)](
            rows, kv_indptr, page_table, page_lists, page_table.stride(0), BLOCK=128, num_warps=4
        )


@triton.jit(
    do_not_specialize=[
        *("stride_column", "stride_tokens", "stride_group", "stride_pages", "batch", "factor"),
    ]
)
def _gather_inputs_kernel(
    columns_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    shifts_ptr: tl.tensor,
    turns_ptr: tl.tensor,
    factor: tl.tensor,
    stride_column: tl.tensor,
    stride_tokens: tl.tensor,
    stride_group: tl.tensor,
    stride_pages: tl.tensor,
    batch: tl.tensor,
    GROUPS: tl.constexpr,
    SHIFTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = b < batch
    row = tl.load(columns_ptr + b, mask=live, other=0).to(tl.int64)
    position = tl.load(columns_ptr + stride_column + b, mask=live, other=0)
    given = tl.load(columns_ptr + 2 * stride_column + b, mask=live, other=-1)
    token_ptr = tokens_ptr + row * stride_tokens + position
    token = tl.load(token_ptr, mask=live & (given < 0), other=0)
    token = tl.where(given >= 0, given, token)
    tl.store(token_ptr, token, mask=live & (given >= 0))
    tl.store(token_ids_ptr + b, token.to(tl.int64), mask=live)
    tl.store(positions_ptr + b, position.to(tl.int64), mask=live)
    if SHIFTED:
        shift = tl.load(shifts_ptr + row, mask=live, other=0) * factor
        tl.store(turns_ptr + b, position.to(tl.int64) + shift, mask=live)
    for group in tl.static_range(GROUPS):
        granted_ptr = columns_ptr + (5 + 2 * group) * stride_column + b
        granted = tl.load(granted_ptr, mask=live, other=0).to(tl.int64)
        at = tl.load(granted_ptr + stride_column, mask=live, other=-1)
        to = page_table_ptr + group * stride_group + row * stride_pages + at
        tl.store(to, granted, mask=live & (at >= 0))


@triton.jit(do_not_specialize=["stride_pages"])
def _gather_pages_kernel(
    rows_ptr: tl.tensor,
    kv_indptr_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    page_lists_ptr: tl.tensor,
    stride_pages: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    i = tl.program_id(0)
    pages = page_table_ptr + tl.load(rows_ptr + i) * stride_pages
    begin = tl.load(kv_indptr_ptr + i)
    count = tl.load(kv_indptr_ptr + i + 1) - begin
    for first in range(0, count, BLOCK):
        j = first + tl.arange(0, BLOCK)
        page = tl.load(pages + j, mask=j < count, other=0)
        tl.store(page_lists_ptr + begin + j, page.to(tl.int32), mask=j < count)
