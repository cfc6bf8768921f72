"""The arithmetic of shrink: a share of the input features for one tile of rows.

What goes together goes in tuples. `a`: address, ranks; `v`: address, stride of a row; `part`: of
the input features, where it begins and ends.
"""

from typing import Any

import triton
import triton.language as tl


@triton.jit
def shrink_few(
    x_rows: tl.tensor,
    length: tl.tensor,
    a: tl.tuple,
    v: tl.tuple,
    part: tl.tuple,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_ROWS: tl.constexpr,
) -> None:
    """Up to 16 rows, of tiles of TILE_ROWS."""
    if a[1] <= 16:
        shrink_rows(
            x_rows, length, a, v, part,
            IN, BLOCK_M, 16, features(BLOCK_K, 16, WARPS, TILE_ROWS), WARPS, STAGES, PRECISION,
        )  # fmt: skip
    elif a[1] <= 32:
        shrink_rows(
            x_rows, length, a, v, part,
            IN, BLOCK_M, 32, features(BLOCK_K, 32, WARPS, TILE_ROWS), WARPS, STAGES, PRECISION,
        )  # fmt: skip
    else:
        shrink_rows(
            x_rows, length, a, v, part,
            IN, BLOCK_M, 64, features(BLOCK_K, 64, WARPS, TILE_ROWS), WARPS, STAGES, PRECISION,
        )  # fmt: skip


@triton.constexpr_function
def features(block_k: int, ranks: int, warps: int, tile_rows: int) -> int:
    """Input features of few rows' step with so many ranks: as many weights whatever the ranks, but
    in tiles of 32 rows as many features as of more rows. At least 16, which `dot` takes, for each
    warp."""
    wanted = block_k if tile_rows == 32 else block_k * 16 // ranks
    return max(wanted, 16 * warps)


@triton.jit
def shrink_rows(
    x_rows: tl.tensor,
    length: tl.tensor,
    a: tl.tuple,
    v: tl.tuple,
    part: tl.tuple,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """BLOCK_R ranks at a time. WARPS: how many divide few rows' work."""
    m = tl.arange(0, BLOCK_M)[:, None]
    for first in range(0, a[1], BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        if BLOCK_R < 16 * WARPS:
            low = _low_by_warps(
                x_rows, length, a, r, part, IN, BLOCK_M, BLOCK_R, BLOCK_K, WARPS, STAGES, PRECISION
            )
        else:
            low = _low(x_rows, length, a, r, part, IN, BLOCK_M, BLOCK_R, BLOCK_K, STAGES, PRECISION)
        tl.store(v[0] + m * v[1] + r[None, :], low, mask=(m < length) & (r < a[1])[None, :])


@triton.jit
def _low(
    x_rows: tl.tensor,
    length: tl.tensor,
    a: tl.tuple,
    r: tl.tensor,
    part: tl.tuple,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> Any:
    """`x A^T` of ranks r, float32 `[BLOCK_M, BLOCK_R]`. Few rows are the tensor cores' 8 columns,
    not their 16 rows."""
    FEW: tl.constexpr = BLOCK_M <= 16
    live = (tl.arange(0, BLOCK_M) < length)[:, None]
    acc = tl.zeros((BLOCK_R, BLOCK_M) if FEW else (BLOCK_M, BLOCK_R), tl.float32)
    for step in tl.range(part[0], part[1], BLOCK_K, num_stages=STAGES):
        cols = (step + tl.arange(0, BLOCK_K))[None, :]
        rows = tl.load(x_rows[:, None] + cols, mask=_inside(live, cols, IN, BLOCK_K), other=0.0)
        known = _inside((r < a[1])[:, None], cols, IN, BLOCK_K)
        weights = tl.load(a[0] + r[:, None] * IN + cols, mask=known, other=0.0)
        if FEW:
            acc = tl.dot(weights, tl.trans(rows), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(rows, tl.trans(weights), acc, input_precision=PRECISION)
    return tl.trans(acc) if FEW else acc


@triton.jit
def _low_by_warps(
    x_rows: tl.tensor,
    length: tl.tensor,
    a: tl.tuple,
    r: tl.tensor,
    part: tl.tuple,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> Any:
    """The same of too few ranks for all warps, which would compute the same: each has its own input
    features, and their sums are added up last."""
    PART: tl.constexpr = BLOCK_K // WARPS
    k = (tl.arange(0, WARPS)[:, None] * PART + tl.arange(0, PART)[None, :])[:, None, :]
    live = (tl.arange(0, BLOCK_M) < length)[None, :, None]
    acc = tl.zeros((WARPS, BLOCK_R, BLOCK_M), tl.float32)
    for step in tl.range(part[0], part[1], BLOCK_K, num_stages=STAGES):
        cols = step + k
        at = x_rows[None, :, None] + cols
        rows = tl.load(at, mask=_inside(live, cols, IN, BLOCK_K), other=0.0)
        known = _inside((r < a[1])[None, :, None], cols, IN, BLOCK_K)
        weights = tl.load(a[0] + r[None, :, None] * IN + cols, mask=known, other=0.0)
        acc = tl.dot(weights, tl.permute(rows, (0, 2, 1)), acc, input_precision=PRECISION)
    return tl.trans(tl.sum(acc, axis=0))


@triton.jit
def _inside(live: tl.tensor, cols: tl.tensor, IN: tl.constexpr, BLOCK_K: tl.constexpr) -> Any:
    """Steps that end where the input does need no mask for it."""
    if IN % BLOCK_K == 0:
        return live
    else:
        return live & (cols < IN)
