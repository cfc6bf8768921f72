"""Kernels of attention to latents against the obvious loop in float64, and LoRA absorbed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from loraplex.server.kernels.attention.decode_attention import (
    DecodeBatchView,
    DecodeScratch,
    LayerScores,
)
from loraplex.server.kernels.attention.decode_work import WorkLayout
from loraplex.server.kernels.attention.latent_append import LatentNorm, NewTokens, latent_append
from loraplex.server.kernels.attention.latent_attention import (
    heads_together,
    latent_decodes,
    latent_prompts,
    latent_tiles,
)
from loraplex.server.kernels.attention.prompt_attention import TileShape, cut_prompts
from loraplex.server.kernels.attention.rope_append import Rotation
from loraplex.server.kernels.attention.scores import ScoreRule
from loraplex.server.kernels.attention.unfolded_attention import (
    UnfoldedKeys,
    unfolded_prompts,
    unfolded_tiles,
)
from loraplex.server.kernels.lora.latent_lora import (
    AbsorbedLora,
    HeadRows,
    LatentProduct,
    absorb,
)
from loraplex.server.model.ops.attention.unfolding import cut_pieces
from tests.kernels.batches import SITE, Adapters
from tests.kernels.rotations import TURNS

PAGE, RULE = 16, ScoreRule(0.2)


class Case:
    """Rows of sequences in pages of random order, NaN behind each, and queries of new tokens."""

    def __init__(
        self, contexts: list[int], new: list[int], sizes: tuple[int, int, int], device: torch.device
    ) -> None:
        """sizes: heads, features of a latent and of the part."""
        torch.manual_seed(len(contexts))
        heads, self.latent, part = sizes
        self.contexts, self.new = contexts, new
        counts = [-(-n // PAGE) for n in contexts]
        order = torch.randperm(sum(counts)).split(counts)
        table = torch.full((len(contexts), max(counts)), 10**6)
        # Layers share a page: rows of one layer do not follow one another from page to page.
        pool = torch.full((sum(counts), 2 * PAGE, 1, self.latent + part), torch.nan, device=device)
        self.pages = pool[:, PAGE:]
        self.rows = [torch.randn(n, self.latent + part, device=device) for n in contexts]
        for row, (pages, kept) in enumerate(zip(order, self.rows, strict=True)):
            table[row, : len(pages)] = pages
            places = torch.arange(len(kept))
            self.pages[pages[places // PAGE], places % PAGE, 0] = kept
        self.table = table.to(device)
        self.q = torch.randn(sum(new), heads, self.latent + part, device=device)
        self.out = torch.full((sum(new), heads, self.latent), torch.nan, device=device)

    def expected(self) -> torch.Tensor:
        found, queries = [], self.q.double().split(self.new)
        for q, kept, n in zip(queries, self.rows, self.new, strict=True):
            scores = torch.einsum("thf,nf->thn", q, kept.double()) * RULE.scale
            places = torch.arange(len(kept), device=q.device)
            unseen = places > places[-n:, None]
            weights = scores.masked_fill(unseen[:, None], -torch.inf).softmax(-1)
            found.append(weights @ kept[:, : self.latent].double())
        return torch.cat(found).float()


@pytest.mark.parametrize(
    ("contexts", "sizes"),
    [
        ([1, 16, 17, 40], (4, 32, 16)),
        pytest.param([700, 3, 300], (20, 32, 16), marks=pytest.mark.exhaustive),
        pytest.param([5, 90], (40, 48, 32), marks=pytest.mark.exhaustive),
    ],
)
def test_decodes(device: torch.device, contexts: list[int], sizes: tuple[int, int, int]) -> None:
    case = Case(contexts, [1] * len(contexts), sizes, device)
    batch = len(contexts)
    layout = WorkLayout((None,), batch)
    packed = np.zeros(layout.length, dtype=np.int32)
    layout.cut(np.array(contexts), packed)
    rows = torch.arange(batch, dtype=torch.int32, device=device)
    positions = torch.tensor(contexts, device=device) - 1
    items = layout.items(torch.from_numpy(packed).to(device))
    view = DecodeBatchView(rows, positions, case.table, items)
    scratch = DecodeScratch(batch, sizes[0], sizes[1], device)
    context = (view, case.pages, LayerScores(RULE), scratch, case.out)
    latent_decodes(case.q, *context, programmatic_launch=False)
    torch.testing.assert_close(case.out, case.expected(), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="scratch is for"):
        latent_decodes(torch.cat([case.q] * 99), *context, programmatic_launch=False)


@pytest.mark.parametrize(
    ("contexts", "new", "sizes"),
    [
        ([20, 9], [7, 9], (4, 32, 16)),
        pytest.param([70, 33, 2], [70, 5, 2], (20, 48, 32), marks=pytest.mark.exhaustive),
    ],
)
def test_prompts(
    device: torch.device, contexts: list[int], new: list[int], sizes: tuple[int, int, int]
) -> None:
    case = Case(contexts, new, sizes, device)
    group = heads_together(sizes[0])
    shape = TileShape(32 // group, 32, 16, 4, 1)
    starts, counts = np.array(contexts) - np.array(new), np.array(new)
    tiles = cut_prompts(np.arange(len(new)), starts, counts, shape.tokens)
    tiles = np.concatenate((tiles, np.zeros_like(tiles[:1])))  # of no tokens
    cut = torch.from_numpy(tiles).to(device)
    latent_prompts(case.q, case.pages, case.table, cut, shape, RULE.outer, case.out)
    torch.testing.assert_close(case.out, case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("contexts", "new", "sizes", "room"),
    [
        ([20, 9], [7, 9], (2, 48, 16, 14), 12),
        pytest.param([70, 33, 2], [70, 5, 2], (3, 24, 32, 40), 40, marks=pytest.mark.exhaustive),
    ],
)
def test_prompts_of_unfolded_keys(
    device: torch.device,
    contexts: list[int],
    new: list[int],
    sizes: tuple[int, int, int, int],
    room: int,
) -> None:
    """Sizes: nope features and values of a head, parts of a key, keys of a piece."""
    torch.manual_seed(2)
    heads, nope, part, value = sizes
    q, turned = (torch.randn(sum(new), heads, n, device=device) for n in (nope + part, nope + part))
    turned = turned[..., nope:]
    shape = TileShape(16, 16, 16, 4, 1)
    starts, counts = np.array(contexts) - np.array(new), np.array(new)
    kept = [torch.randn(n, heads, nope + value, device=device) for n in contexts]
    parts = [torch.randn(n, part, device=device) for n in contexts]
    out, sums = torch.full((2, sum(new), heads, value), torch.nan, device=device)
    sums = sums[..., 0].contiguous()
    for piece in cut_pieces(starts, counts, counts > 0, shape.tokens, room):
        of = [*zip(piece.prompts.tolist(), piece.positions.tolist(), strict=True)]
        keys = UnfoldedKeys(
            torch.stack([kept[n][i] for n, i in of]), torch.stack([parts[n][i] for n, i in of])
        )
        tiles = torch.from_numpy(piece.tiles).to(device)
        unfolded_prompts(q, turned, keys, tiles, shape, RULE.outer, sums, out)
    found, queries = [], torch.cat((q[..., :nope], turned), dim=-1).double().split(new)
    for query, own, shared, n in zip(queries, kept, parts, new, strict=True):
        whole = torch.cat((own[..., :nope], shared[:, None].expand(-1, heads, -1)), dim=-1)
        scores = torch.einsum("thf,nhf->thn", query, whole.double()) * RULE.scale
        places = torch.arange(len(own), device=device)
        scores = scores.masked_fill((places > places[-n:, None])[:, None], -torch.inf)
        found.append(torch.einsum("thn,nhv->thv", scores.softmax(-1), own[..., nope:].double()))
    torch.testing.assert_close(out, torch.cat(found).float(), rtol=1e-4, atol=1e-4)


def test_tiles_have_whole_tokens() -> None:
    for heads in (1, 10, 16, 20, 40, 128):
        for capability in ((8, 0), (9, 0), (12, 0)):
            shape = latent_tiles(heads, capability)
            assert heads % heads_together(heads) == 0
            assert 0 < shape.tokens * heads_together(heads) <= shape.block_m
    for capability in ((8, 0), (9, 0), (12, 0)):
        of_narrow, of_wide = (unfolded_tiles(n, n, capability) for n in (128, 192))
        assert of_narrow.block_n > of_wide.block_n


def turned(x: torch.Tensor, rotation: Rotation, positions: torch.Tensor) -> torch.Tensor:
    """In halves, as cached rows have them; scaled as queries are."""
    part, pairs = x.shape[-1], rotation.cos_sin.shape[1] // 2
    half = part // 2
    if rotation.interleaved:
        first, second = x[..., ::2], x[..., 1::2]
    elif pairs == half:
        first, second = x[..., :half], x[..., half:]
    else:
        rest = (part - 2 * pairs) // 2
        a, b = x[..., : 2 * pairs].chunk(2, -1)
        c, d = x[..., 2 * pairs :].split(rest, -1)
        first, second = torch.cat((a, c), -1), torch.cat((b, d), -1)
    shape = (len(x), 1, half)
    cos, sin = torch.ones(shape, device=x.device), torch.zeros(shape, device=x.device)
    of_all = rotation.cos_sin[positions][:, None]
    cos[..., :pairs], sin[..., :pairs] = of_all[..., :pairs], of_all[..., pairs:]
    found = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    if rotation.q_scale is not None:
        found = found * rotation.q_scale[positions][:, None, None]
    return found


@pytest.mark.parametrize("turn", ["halves", "all neighbours", "scaled"])
@pytest.mark.parametrize("decodes", [False, True])
def test_new_tokens_are_normed_rotated_and_written(
    device: torch.device, turn: str, decodes: bool
) -> None:
    """Queries of few tokens, as decodes have, absorb the product in the same kernel."""
    tokens, heads, nope, latent, part = 3, 10, 6, 32, 16
    torch.manual_seed(1)
    rotation = TURNS[turn].rotation(part, 40, device)
    q = torch.randn(tokens, heads * (nope + part), device=device)
    kept = torch.randn(tokens, latent + part, device=device)
    queries = torch.full((tokens, heads, latent + part), 7.0, device=device)
    pages = torch.zeros(5, PAGE, 1, latent + part, device=device)
    norm = LatentNorm(torch.randn(latent, device=device), 1e-6)
    positions = torch.tensor([20, 3, 17], device=device)
    table = torch.tensor([[0, 1], [2, 2], [3, 4]], device=device)
    slots = table[torch.arange(tokens), positions // PAGE] * PAGE + positions % PAGE
    places: torch.Tensor | DecodeBatchView = slots.clone()
    written = torch.ones(tokens, dtype=torch.bool)
    if decodes:
        rows = torch.arange(tokens, dtype=torch.int32, device=device)
        places = DecodeBatchView(rows, positions, table, ())
    elif isinstance(places, torch.Tensor):
        places[1], written[1] = -1, False
    weight = torch.randn(heads, nope, latent, device=device)
    product = LatentProduct(weight, None, False) if decodes else None
    new = NewTokens(positions, places)
    latent_append(q, kept, queries, pages, norm, rotation, new, product)

    of_q = q.view(tokens, heads, -1)[..., nope:]
    torch.testing.assert_close(queries[..., latent:], turned(of_q, rotation, positions))
    absorbed = torch.full((tokens, heads, latent), 7.0, device=device)
    if decodes:
        absorbed = torch.einsum("thn,hnl->thl", q.view(tokens, heads, -1)[..., :nope], weight)
        if rotation.q_scale is not None:
            absorbed = absorbed * rotation.q_scale[positions][:, None, None]
    torch.testing.assert_close(queries[..., :latent], absorbed, rtol=1e-4, atol=1e-4)
    first = kept[:, :latent]
    normed = first * torch.rsqrt(first.square().mean(-1, keepdim=True) + 1e-6) * norm.weight
    plain = replace(rotation, q_scale=None)
    parts = turned(kept[:, None, latent:], plain, positions)[:, 0]
    rows_of = torch.cat((normed, parts), -1)
    expected = torch.zeros_like(pages).flatten(0, 1)
    expected[slots[written], 0] = rows_of[written]
    torch.testing.assert_close(pages, expected.view_as(pages))


@pytest.mark.parametrize("rank", [3, pytest.param(40, marks=pytest.mark.exhaustive)])
def test_lora_of_the_absorbed_product(device: torch.device, rank: int) -> None:
    heads, keys, values, latent = 3, 6, 5, 32
    adapters = Adapters(torch.float32, device, 3)
    adapters.put(2, latent, [heads * (keys + values)], [rank])
    slots = torch.tensor([2, -1, 0, 2], dtype=torch.int32, device=device)
    weights = adapters.weights[2]
    assert weights is not None
    a, b = weights.a[0], weights.b[0].view(heads, keys + values, rank)
    touched = (slots == 2)[:, None, None]
    rows = HeadRows(keys, values)
    q = torch.randn(4, heads, keys + 9, device=device)[..., :keys]
    y = torch.randn(4, heads, latent + 4, device=device)
    delta = torch.einsum("thk,hkr,rl->thl", q, b[:, :keys], a) * weights.scales[0]
    expected = y.clone()
    expected[..., :latent] += torch.where(touched, delta, 0.0)
    lora = AbsorbedLora(slots, adapters.table, SITE, rows)
    absorb(q, y[..., :latent], LatentProduct(None, lora), "keys")
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    read, out = torch.randn(4, heads, latent, device=device), torch.randn(4, heads, values)
    out = out.to(device)
    delta = torch.einsum("thl,rl,hvr->thv", read, a, b[:, keys:]) * weights.scales[0]
    expected = out + torch.where(touched, delta, 0.0)
    absorb(read, out, LatentProduct(None, lora), "values")
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    # The same in one kernel with the base's product.
    matrices = torch.randn(heads, values, latent, device=device)
    expected = torch.einsum("thl,hvl->thv", read, matrices) + torch.where(touched, delta, 0.0)
    absorb(read, out, LatentProduct(matrices.transpose(1, 2), lora), "values")
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
