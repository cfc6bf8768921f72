"""Keys and values in FP8: what is written, and attention over what lies there."""

import pytest
import torch

from loraplex.server.kernels.attention.decode_attention import DecodeScratch, decode_attention
from loraplex.server.kernels.attention.pages import CachePages, widen_pages
from loraplex.server.kernels.attention.prompt_attention import (
    cut_prompts,
    prompt_attention,
    tile_shape,
)
from loraplex.server.kernels.attention.rope_append import rope_append
from loraplex.server.kernels.attention.rotation import Rotation
from loraplex.server.kernels.attention.scores import ScoreRule
from tests.kernels import test_decode_attention as decodes
from tests.kernels import test_prompt_attention as prompts
from tests.kernels.batches import interpreted
from tests.kernels.rotations import TURNS, as_cached, normed, rotated

FP8, CPU = torch.float8_e4m3fn, torch.device("cpu")
K_SCALE, V_SCALE = 0.02, 0.5


def assert_rounded(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Three bits of mantissa; the least numbers of E4M3 are 2^-9."""
    wanted = exact.to(found.dtype).clamp(-448, 448)
    torch.testing.assert_close(found, wanted, rtol=2**-4 + 1e-6, atol=2**-9)


def quantised(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(FP8)


@interpreted
@pytest.mark.parametrize("shape", [(4, 2, 64), (8, 1, 48)])
@pytest.mark.parametrize("window", [None, 20])
def test_decodes(shape: tuple[int, int, int], window: int | None) -> None:
    rule = ScoreRule(shape[2] ** -0.5, window=window)
    case = decodes.Case([1, 17, 200, 33], shape, CPU, torch.float32, scores=(rule, False))
    case.qkv[0] *= 1000  # beyond what FP8 has
    pages = CachePages(quantised(case.k, K_SCALE), quantised(case.v, V_SCALE), K_SCALE, V_SCALE)
    batch, heads = len(case.contexts), case.heads
    scratch, out = DecodeScratch(batch, heads, shape[2], CPU), torch.empty(batch, heads, shape[2])
    context = (case.view(), pages, case.rotation, case.norm, case.scores, scratch, out)
    decode_attention(case.qkv, None, *context, programmatic_launch=False)
    x = case.qkv.double().view(batch, case.all_heads, shape[2])
    positions = torch.tensor(case.contexts) - 1
    qk = rotated(normed(x[:, : -case.kv_heads], heads, None), heads, case.rotation, positions)
    qk, new_v = as_cached(qk, case.rotation), x[:, -case.kv_heads :]
    for row, n in enumerate(case.contexts):
        of_row = case.known_pages[batch - row, : -(-n // case.page_size)]
        seen = slice(case.first_seen(n), n)
        k, v = (c[of_row].flatten(0, 1)[seen].double() for c in (pages.k, pages.v))
        for found, new, scale in ((k, qk[row, heads:], K_SCALE), (v, new_v[row], V_SCALE)):
            assert_rounded(found[-1], new / scale)
        group = heads // case.kv_heads
        k, v = (k * K_SCALE).repeat_interleave(group, 1), (v * V_SCALE).repeat_interleave(group, 1)
        weights = case.weights(torch.einsum("hd,nhd->hn", qk[row, :heads], k))
        expected = torch.einsum("hn,nhd->hd", weights, v)
        torch.testing.assert_close(out[row].double(), expected, atol=2e-4, rtol=2e-4)


@interpreted
@pytest.mark.parametrize("window", [None, 20])
def test_prompts(window: int | None) -> None:
    heads, rule = (8, 2, 64), ScoreRule(0.125, window=window)
    case = prompts.Case([(0, 30), (40, 7), (16, 1)], heads, rule)
    k, v = case.cache
    pages = CachePages(quantised(k, K_SCALE), quantised(v, V_SCALE), K_SCALE, V_SCALE)
    case.cache = [pages.k.float() * K_SCALE, pages.v.float() * V_SCALE]
    starts, num_new = (torch.tensor(each).numpy() for each in zip(*case.chunks, strict=True))
    shape = tile_shape(4, heads[2], prompts.ADA)
    rows = torch.arange(len(case.chunks), 0, -1).numpy()
    tiles = torch.from_numpy(cut_prompts(rows, starts, num_new, shape.tokens))
    out = torch.empty_like(case.q)
    prompt_attention(case.q, pages, case.page_table, tiles, shape, rule, None, out)
    torch.testing.assert_close(out[:-2].double(), case.expected(), atol=2e-5, rtol=2e-5)


@interpreted
@pytest.mark.parametrize("turn", TURNS)
def test_prompts_are_written(turn: str) -> None:
    rotation: Rotation = TURNS[turn].rotation(64, 40, CPU)
    qkv, positions = torch.randn(9, 8 * 64), torch.arange(9) + 3
    slots = torch.randperm(48)[:9]
    plain, kept = torch.zeros(2, 3, 16, 2, 64), torch.zeros(2, 3, 16, 2, 64).to(FP8)
    wanted = rope_append(qkv, rotation, positions, slots, CachePages(*plain), None)
    pages = CachePages(kept[0], kept[1], K_SCALE, V_SCALE)
    found = rope_append(qkv, rotation, positions, slots, pages, None)
    assert torch.equal(found, wanted)
    for numbers, values, scale in zip(kept, plain, (K_SCALE, V_SCALE), strict=True):
        assert_rounded(numbers.float(), values / scale)


@pytest.mark.parametrize("shape", [(16, 2, 64), (16, 5, 96)])
def test_pages_are_widened(device: torch.device, shape: tuple[int, int, int]) -> None:
    """Listed ones alone, in the list's order."""
    pool = torch.randn(7, 2, *shape).to(device, FP8)
    pages = CachePages(pool[:, 0], pool[:, 1], K_SCALE, V_SCALE)
    listed = torch.tensor([5, 0, 3], dtype=torch.int32, device=device)
    out = torch.full((2, 4, *shape), -1.0, device=device)
    widen_pages(pages, listed, out)
    for found, stored, scale in zip(out, (pages.k, pages.v), (K_SCALE, V_SCALE), strict=True):
        wanted = stored.float()[listed.long()] * scale
        torch.testing.assert_close(found[:3], wanted, rtol=1e-6, atol=0)
    assert (out[:, 3] == -1).all()
    with pytest.raises(ValueError, match="room"):
        widen_pages(pages, listed, out[:, :2])
