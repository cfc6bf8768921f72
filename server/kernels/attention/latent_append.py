"""New tokens of attention to latents: the norm of the latent, the rotation, the write to a page; of
few tokens also their queries, which absorb `kv_b`.

One launch a layer. The cached row of a token is its normed latent, then the rotated part, whose
features lie as `rope_append.py` says.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.server.kernels.attention.decode_attention import DecodeBatchView
from loraplex.server.kernels.attention.pages import place_in_pages
from loraplex.server.kernels.attention.rope_append import Rotation, load_angles, pair_columns
from loraplex.server.kernels.launch.launch import let_next_start, wait
from loraplex.server.kernels.lora.latent_lora import LatentProduct, absorb_block

_HEADS_A_PROGRAM = 8


class NewTokens(NamedTuple):
    """Where new tokens go. turns: int64 `[tokens]`, rows of the rotation's tables. places: int64
    `[tokens]`, page * page_size + offset, -1 = a token whose row is left out; or the decodes that
    the tokens are."""

    turns: torch.Tensor
    places: torch.Tensor | DecodeBatchView


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
    new: NewTokens,
    product: LatentProduct | None = None,
) -> None:
    """Rotate queries, and write the cached rows of tokens. q: `[tokens, heads * (nope + turned)]`;
    kept: `[tokens, latent + turned]`; both contiguous. queries: `[tokens, heads, latent + turned]`,
    contiguous, of which the rotated part is filled. pages: `[pages, page_size, 1, latent +
    turned]`, of one stride from page to page. product: fills what meets latents, of few tokens;
    None = nothing does. One kernel. Raises ValueError where more turns than the part has.
    """
    tokens, heads, features = queries.shape
    latent = len(norm.weight)
    turned, (turns, places) = features - latent, new
    paged = isinstance(places, DecodeBatchView)
    groups = triton.cdiv(heads, _HEADS_A_PROGRAM) + 1
    absorbing = product or LatentProduct(None, None)
    switches = absorbing.switches(q.shape[1] // heads - turned, latent)
    blocks = 0 if product is None else heads * triton.cdiv(latent, switches["BLOCK_O"])
    where: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]
    if isinstance(places, DecodeBatchView):
        table = places.page_table
        where = (places.rows, places.positions, table, table.stride(0))
    else:
        where = (places, places, places, 0)
    if tokens:
        _latent_append_kernel[(tokens, groups + blocks)](
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
            *absorbing.arguments(q),
            HEADS=heads,
            GROUPS=groups,
            HALF=turned // 2,
            PAGE_SIZE=pages.shape[1],
            BLOCK_L=triton.next_power_of_2(latent),
            BLOCK_P=triton.next_power_of_2(turned // 2),
            BLOCK_H=_HEADS_A_PROGRAM,
            PAGED=paged,
            num_warps=2 if product is None else 4,
            **rotation.switches(turned),
            **switches,
        )


@triton.jit(
    do_not_specialize=["epsilon", "stride_pages", "site", "num_sites"],
    do_not_specialize_on_alignment=["turns_ptr", "rows_ptr", "positions_ptr", "slots_ptr"],
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
    weight_ptr: tl.tensor,
    stride_head: tl.tensor,
    stride_in: tl.tensor,
    stride_out: tl.tensor,
    slots_ptr: tl.tensor,
    words_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    floats_ptr: tl.tensor,
    site: tl.tensor,
    num_sites: tl.tensor,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAGED: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    BASE: tl.constexpr,
    LORA: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program takes some heads of one token, the last one of these its cached row; those behind
    absorb, each for some features of one head."""
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    LATENT: tl.constexpr = OUTPUTS
    NOPE: tl.constexpr = INPUTS
    TOKEN: tl.constexpr = LATENT + 2 * HALF
    BLOCKS: tl.constexpr = (LATENT + BLOCK_O - 1) // BLOCK_O
    inside = (tl.arange(0, BLOCK_P) < HALF)[None, :]
    if BASE and tl.program_id(1) >= GROUPS:
        item = tl.program_id(1) - GROUPS
        head = item // BLOCKS
        row = token * HEADS + head
        o = item % BLOCKS * BLOCK_O + tl.arange(0, BLOCK_O)
        to_ptr = queries_ptr + row * TOKEN + o
        total, live = absorb_block(
            q_ptr + row * (NOPE + 2 * HALF), to_ptr,
            (weight_ptr, stride_head, stride_in, stride_out),
            (words_ptr, ints_ptr, floats_ptr, site, num_sites), slots_ptr + token, head, o,
            INPUTS, OUTPUTS, HEAD, KEYS, True, BASE, LORA, BLOCK_I, BLOCK_R, PDL,
        )  # fmt: skip
        if SCALED:
            total *= tl.load(tables[1] + tl.load(turns_ptr + token))
        tl.store(to_ptr, total.to(queries_ptr.dtype.element_ty), mask=live)
    elif tl.program_id(1) + 1 < GROUPS:
        wait(PDL)
        turn = tl.load(turns_ptr + token)
        head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        row = token * HEADS + head
        _turn(
            q_ptr + row * (NOPE + 2 * HALF) + NOPE, queries_ptr + row * TOKEN + LATENT,
            (head < HEADS) & inside, tables, turn, HALF, BLOCK_P, PAIRS, INTERLEAVED, SCALED,
        )  # fmt: skip
    else:
        wait(PDL)
        turn = tl.load(turns_ptr + token)
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
