"""The arithmetic of rope_append_lora: some heads of one projection, for one tile.

What goes together goes in tuples. `span`: whether the projection is q, and q or k; its first head
and where they end. `low`: v and b as in low_rank, and the scale.
"""

import triton
import triton.language as tl

from server.kernels.attention.rope_append import norm_and_rotate
from server.kernels.lora.low_rank import in_eights, load_b, load_v, low_rank_one, product


@triton.constexpr_function
def _half_block(half: int) -> int:
    """Columns of a block of half a head: a power of two, of which `dot` takes 16."""
    block: int = triton.next_power_of_2(half)
    return max(16, block)


@triton.jit
def rope_rows(
    targets: tl.tuple,
    tables: tl.tuple,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    epsilon: tl.tensor,
    num_decodes: tl.tensor,
    rows: tl.tensor,
    span: tl.tuple,
    low: tl.tuple,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Where each row is read and goes, for the projection's first head, and its angles."""
    qkv_ptr, q_ptr, k_pages_ptr, v_pages_ptr = targets
    cos_sin_ptr, norm_ptr = tables
    is_q, is_qk, head, end = span
    live = tl.arange(0, BLOCK_M) < low[0][4]
    column = tl.where(is_q, 0, tl.where(is_qk, HEADS, HEADS + KV_HEADS)) * 2 * HALF
    y_rows = qkv_ptr + rows * ((HEADS + 2 * KV_HEADS) * 2 * HALF) + column
    place = tl.where(is_q, rows - num_decodes, tl.load(slots_ptr + rows, mask=live, other=0))
    target_ptr = tl.where(is_q, q_ptr, tl.where(is_qk, k_pages_ptr, v_pages_ptr))
    target_rows = target_ptr + place * (tl.where(is_q, HEADS, KV_HEADS) * 2 * HALF)
    BLOCK_D: tl.constexpr = _half_block(HALF)
    d = tl.arange(0, BLOCK_D)[None, :]
    turned = tl.where(is_qk, HALF, 0)
    real = live[:, None] & (d < turned)
    position = tl.load(positions_ptr + rows, mask=live, other=0)[:, None]
    angle = cos_sin_ptr + position * (2 * HALF) + d
    cos = tl.load(angle, mask=real, other=0.0)
    sin = tl.load(angle + HALF, mask=real, other=0.0)
    _rope_ranks(
        (y_rows, target_rows, rows < num_decodes, live, place >= 0),
        (norm_ptr + column, epsilon, cos, sin, turned), low, head, end,
        HALF, MAX_SPLIT, BLOCK_M, BLOCK_D, STAGES, NORM, PRECISION,
    )  # fmt: skip


@triton.jit
def _rope_ranks(
    rows: tl.tuple,
    rotation: tl.tuple,
    low: tl.tuple,
    head: tl.tensor,
    end: tl.tensor,
    HALF: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """As many ranks at a time as the adapter has, as far as registers go."""
    rank = low[1][1]
    if rank % 8 != 0:
        _rope_heads(
            rows, rotation, low, rank, head, end,
            HALF, MAX_SPLIT, BLOCK_M, BLOCK_D, 16, True, 1, NORM, PRECISION,
        )  # fmt: skip
    elif rank <= 16:
        _rope_heads(
            rows, rotation, low, in_eights(rank), head, end,
            HALF, MAX_SPLIT, BLOCK_M, BLOCK_D, 16, False, STAGES, NORM, PRECISION,
        )  # fmt: skip
    elif rank <= 32:
        _rope_heads(
            rows, rotation, low, in_eights(rank), head, end,
            HALF, MAX_SPLIT, BLOCK_M, BLOCK_D, 32, False, STAGES, NORM, PRECISION,
        )  # fmt: skip
    elif rank <= 64:
        _rope_heads(
            rows, rotation, low, in_eights(rank), head, end,
            HALF, MAX_SPLIT, BLOCK_M, BLOCK_D, 64, False, STAGES, NORM, PRECISION,
        )  # fmt: skip
    else:
        _rope_heads(
            rows, rotation, low, in_eights(rank), head, end,
            HALF, MAX_SPLIT, BLOCK_M, BLOCK_D, 32, True, 1, NORM, PRECISION,
        )  # fmt: skip


@triton.jit
def _rope_heads(
    rows: tl.tuple,
    rotation: tl.tuple,
    low: tl.tuple,
    rank: tl.tensor,
    head: tl.tensor,
    end: tl.tensor,
    HALF: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LOOPED: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Heads head .. end of a tile's rows. LOOPED: BLOCK_R columns of B at a time; else
    v is read once, and heads of the product and of B are prefetched."""
    y_rows, target_rows, decode, live, placed = rows
    norm_ptr, epsilon, cos, sin, turned = rotation
    v, b, scale = low
    d, r = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    real = live[:, None] & (d < HALF)[None, :]
    kept, moved = real & decode[:, None], real & (placed & (decode == 0))[:, None]
    rotated = (d < turned)[None, :]
    dtype: tl.constexpr = y_rows.dtype.element_ty
    if not LOOPED:
        total = load_v(v, r, rank, MAX_SPLIT, BLOCK_M)
    for h in tl.range(head, end, num_stages=STAGES):
        at = h * 2 * HALF + d[None, :]
        first = tl.load(y_rows[:, None] + at, mask=real, other=0.0)
        second = tl.load(y_rows[:, None] + at + HALF, mask=real, other=0.0)
        b_first = (b[0] + h * 2 * HALF * rank, rank)
        b_second = (b_first[0] + HALF * rank, rank)
        if LOOPED:
            delta_first = low_rank_one(
                v, b_first, d, HALF, MAX_SPLIT, BLOCK_M, BLOCK_D, BLOCK_R, PRECISION
            )
            delta_second = low_rank_one(
                v, b_second, d, HALF, MAX_SPLIT, BLOCK_M, BLOCK_D, BLOCK_R, PRECISION
            )
        else:
            delta_first = product(total, load_b(b_first, d, r, HALF), BLOCK_M, PRECISION)
            delta_second = product(total, load_b(b_second, d, r, HALF), BLOCK_M, PRECISION)
        first = first.to(tl.float32) + scale * delta_first
        second = second.to(tl.float32) + scale * delta_second
        new_first, new_second = norm_and_rotate(
            first, second, norm_ptr + at, rotated, epsilon, cos, sin, rotated, dtype, HALF, NORM
        )
        new_first = tl.where(decode[:, None], first, new_first).to(dtype)
        new_second = tl.where(decode[:, None], second, new_second).to(dtype)
        # A choice between addresses would cost the vectors.
        tl.store(y_rows[:, None] + at, new_first, mask=kept)
        tl.store(y_rows[:, None] + at + HALF, new_second, mask=kept)
        tl.store(target_rows[:, None] + at, new_first, mask=moved)
        tl.store(target_rows[:, None] + at + HALF, new_second, mask=moved)
