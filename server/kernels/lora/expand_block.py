"""The arithmetic of expand: one block of columns for one tile of rows."""

import triton
import triton.language as tl

from server.kernels.lora.low_rank import in_eights, load_b, load_v, low_rank_one, product


@triton.jit
def expand_ranks(
    y_rows: tl.tensor,
    v: tl.tuple,
    b: tl.tuple,
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
    b_ptr, rank = b
    if rank % 8 != 0:
        _expand_looped(
            y_rows, v, b, scale, col, end,
            MAX_SPLIT, BLOCK_M, PIECE, 16, PRECISION, ACCUMULATE,
        )  # fmt: skip
    elif block_r <= 16:
        _expand_pieces(
            y_rows, v, (b_ptr, in_eights(rank)), scale, col, end,
            MAX_SPLIT, BLOCK_M, PIECE, 16, STAGES, PRECISION, ACCUMULATE, WHOLE,
        )  # fmt: skip
    elif block_r <= 32:
        _expand_pieces(
            y_rows, v, (b_ptr, in_eights(rank)), scale, col, end,
            MAX_SPLIT, BLOCK_M, PIECE // 2, 32, STAGES, PRECISION, ACCUMULATE, WHOLE,
        )  # fmt: skip
    elif rank <= 64:
        _expand_pieces(
            y_rows, v, (b_ptr, in_eights(rank)), scale, col, end,
            MAX_SPLIT, BLOCK_M, PIECE // 4, 64, STAGES, PRECISION, ACCUMULATE, WHOLE,
        )  # fmt: skip
    else:
        _expand_looped(
            y_rows, v, (b_ptr, in_eights(rank)), scale, col, end,
            MAX_SPLIT, BLOCK_M, PIECE // 4, 64, PRECISION, ACCUMULATE,
        )  # fmt: skip


@triton.jit
def _expand_pieces(
    y_rows: tl.tensor,
    v: tl.tuple,
    b: tl.tuple,
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
    total = load_v(v, r, b[1], MAX_SPLIT, BLOCK_M)
    # Less work than of all columns, but float16 may not hold what the product would bring back.
    EARLY: tl.constexpr = y_rows.dtype.element_ty != tl.float16
    if EARLY:
        total = scale * total
    for begin in tl.range(col, end, PIECE, num_stages=STAGES):
        n = begin + tl.arange(0, PIECE)
        delta = product(total, load_b(b, n, r, end, WHOLE), BLOCK_M, PRECISION)
        if not EARLY:
            delta = scale * delta
        _write(y_rows, v[4], n, end, delta, BLOCK_M, ACCUMULATE, WHOLE)


@triton.jit
def _expand_looped(
    y_rows: tl.tensor,
    v: tl.tuple,
    b: tl.tuple,
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
        _write(y_rows, v[4], n, end, scale * acc, BLOCK_M, ACCUMULATE, False)


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
