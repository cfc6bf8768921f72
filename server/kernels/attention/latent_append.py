"""New tokens of attention to latents: the norm of the latent, the rotation, the write to a page.

One launch a layer. The cached row of a token is its normed latent, then the rotated part, whose
features lie as `rotation.py` says.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.attention.decode_attention import DecodeBatchView
from loraplex.server.kernels.attention.pages import place_in_pages
from loraplex.server.kernels.attention.rotation import Rotation, load_angles, pair_columns

_HEADS_A_PROGRAM = 8


class LatentNorm(NamedTuple):
    """The RMS norm of latents. weight: `[latent]`."""

    weight: torch.Tensor
    epsilon: float


def latent_append(
    q: torch.Tensor,
    kept: torch.Tensor,
    queries: torch.Tensor,
    pages: torch.Tensor,
    norm: LatentNorm,
    rotation: Rotation,
    turns: torch.Tensor,
    places: torch.Tensor | DecodeBatchView,
) -> None:
    """Rotate queries, and write the cached rows of tokens. q: `[tokens, heads * (nope + turned)]`;
    kept: `[tokens, latent + turned]`; both contiguous. queries: `[tokens, heads, latent + turned]`,
    contiguous, of which the rotated part is filled. pages: `[pages, page_size, 1, latent +
    turned]`, of one stride from page to page. turns: int64 `[tokens]`, rows of the rotation's
    tables. places: int64 `[tokens]`, page * page_size + offset, -1 = a token whose row is left out;
    or the decodes that the tokens are. One kernel. Raises ValueError where more turns than the part
    has.
    """
    tokens, heads, features = queries.shape
    latent = len(norm.weight)
    turned = features - latent
    paged = isinstance(places, DecodeBatchView)
    where: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]
    if isinstance(places, DecodeBatchView):
        table = places.page_table
        where = (places.rows, places.positions, table, table.stride(0))
    else:
        where = (places, places, places, 0)
    if tokens:
        _latent_append_kernel[(tokens, triton.cdiv(heads, _HEADS_A_PROGRAM) + 1)](
            q,
            kept,
            queries,
            norm.weight,
            norm.epsilon,
            rotation.tables,
            turns,
            *where,
            pages,
            pages.stride(0),
            HEADS=heads,
            NOPE=q.shape[1] // heads - turned,
            LATENT=latent,
            HALF=turned // 2,
            PAGE_SIZE=pages.shape[1],
            BLOCK_L=triton.next_power_of_2(latent),
            BLOCK_P=triton.next_power_of_2(turned // 2),
            BLOCK_H=_HEADS_A_PROGRAM,
            PAGED=paged,
            num_warps=2,
            **rotation.switches(turned),
        )


@triton.jit(
    do_not_specialize=["epsilon", "stride_pages"],
    do_not_specialize_on_alignment=["turns_ptr", "rows_ptr", "positions_ptr"],
)
def _latent_append_kernel(
    q_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    queries_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    epsilon: tl.tensor,
    tables: tl.tuple,
    turns_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    stride_pages: tl.tensor,
    pages_ptr: tl.tensor,
    stride: tl.tensor,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAGED: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """A program takes some heads of one token; the last one of a token its cached row."""
    token = tl.program_id(0).to(tl.int64)
    TOKEN: tl.constexpr = LATENT + 2 * HALF
    inside = (tl.arange(0, BLOCK_P) < HALF)[None, :]
    turn = tl.load(turns_ptr + token)
    if tl.program_id(1) + 1 < tl.num_programs(1):
        head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        row = token * HEADS + head
        _turn(
            q_ptr + row * (NOPE + 2 * HALF) + NOPE, queries_ptr + row * TOKEN + LATENT,
            (head < HEADS) & inside, tables, turn, HALF, BLOCK_P, PAIRS, INTERLEAVED, SCALED,
        )  # fmt: skip
    else:
        slot = tl.load(rows_ptr + token).to(tl.int64)
        if PAGED:
            position = tl.load(positions_ptr + token)
            page = tl.load(page_table_ptr + slot * stride_pages + position // PAGE_SIZE)
            place = place_in_pages(page, position % PAGE_SIZE, stride, TOKEN)
        else:
            place = place_in_pages(slot // PAGE_SIZE, slot % PAGE_SIZE, stride, TOKEN)
        n = tl.arange(0, BLOCK_L)
        source = kept_ptr + token * TOKEN
        latent = tl.load(source + n, mask=n < LATENT, other=0.0).to(tl.float32)
        weight = tl.load(norm_ptr + n, mask=n < LATENT, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(latent * latent, axis=0) / LATENT + epsilon)
        to = pages_ptr + place
        kept = (latent * factor * weight).to(pages_ptr.dtype.element_ty)
        # A token at -1 has no row.
        tl.store(to + n, kept, mask=(n < LATENT) & (slot >= 0))
        _turn(
            source + LATENT, to + LATENT, inside & (slot >= 0),
            tables, turn, HALF, BLOCK_P, PAIRS, INTERLEAVED, False,
        )  # fmt: skip


@triton.jit
def _turn(
    from_ptr: tl.tensor,
    to_ptr: tl.tensor,
    live: tl.tensor,
    tables: tl.tuple,
    turn: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Rotate parts, `[n, 2 * HALF]`, that lie at from_ptr, `[n, 1]`, and write them to to_ptr in
    halves. live: `[n, BLOCK_P]`; turn: row of the tables."""
    d = tl.arange(0, BLOCK_P)[None, :]
    inside = d < HALF
    column, apart = pair_columns(d, inside, PAIRS, INTERLEAVED, HALF)
    first = tl.load(from_ptr + column, mask=live, other=0.0).to(tl.float32)
    second = tl.load(from_ptr + column + apart, mask=live, other=0.0).to(tl.float32)
    cos, sin = load_angles(tables, turn, d, inside, True, PAIRS, SCALED)
    dtype = to_ptr.dtype.element_ty
    tl.store(to_ptr + d, (first * cos - second * sin).to(dtype), mask=live)
    tl.store(to_ptr + HALF + d, (second * cos + first * sin).to(dtype), mask=live)
