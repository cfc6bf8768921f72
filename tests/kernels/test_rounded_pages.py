"""Keys and values of eight bits: what is written, and attention over what lies there."""

import pytest
import torch

from loraplex.server.kernels.attention.decode_attention import DecodeScratch, decode_attention
from loraplex.server.kernels.attention.pages import CachePages, widen_pages
from loraplex.server.kernels.attention.prompt_attention import (
    cut_prompts,
    prompt_attention,
    tile_shape,
)
from loraplex.server.kernels.attention.rope_append import Rotation, rope_append
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


def in_whole(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 of keys or values `[..., page_size, kv_heads, head_dim]`, and their scales."""
    largest = x.float().abs().amax(-1, keepdim=True)
    scales = torch.where(largest > 0, largest / 127, 1.0)
    return (x / scales).round().to(torch.int8), scales[..., 0].transpose(-1, -2).contiguous()


def read_whole(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return numbers.float() * scales.transpose(-1, -2)[..., None]


def whole_pages(k: torch.Tensor, v: torch.Tensor) -> CachePages:
    (k, k_scales), (v, v_scales) = in_whole(k), in_whole(v)
    return CachePages(k, v, 1.0, V_SCALE, k_scales, v_scales / V_SCALE)


def stored(pages: CachePages) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, as they are read."""
    if pages.k_scales is None or pages.v_scales is None:
        return pages.k.float() * pages.k_scale, pages.v.float() * pages.v_scale
    v = read_whole(pages.v, pages.v_scales * pages.v_scale)
    return read_whole(pages.k, pages.k_scales * pages.k_scale), v


def assert_kept(found: torch.Tensor, exact: torch.Tensor, whole: bool, scale: float) -> None:
    """found: as it is read, `[..., head_dim]`."""
    if whole:
        room = exact.abs().amax(-1, keepdim=True) / 127 / 2 * 1.001
        assert ((found - exact).abs() <= room + 1e-7).all()
    else:
        assert_rounded(found / scale, exact / scale)


@interpreted
@pytest.mark.parametrize("shape", [(4, 2, 64), (8, 1, 48)])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("whole", [False, True])
def test_decodes(shape: tuple[int, int, int], window: int | None, whole: bool) -> None:
    rule = ScoreRule(shape[2] ** -0.5, window=window)
    case = decodes.Case([1, 17, 200, 33], shape, CPU, torch.float32, scores=(rule, False))
    case.qkv[0] *= 1000  # beyond what FP8 has
    pages = CachePages(quantised(case.k, K_SCALE), quantised(case.v, V_SCALE), K_SCALE, V_SCALE)
    if whole:
        pages = whole_pages(case.k, case.v)
        assert pages.k_scales is not None
        assert pages.v_scales is not None
        for row, n in enumerate(case.contexts):  # behind a sequence lies anything
            last = case.known_pages[len(case.contexts) - row, (n - 1) // case.page_size]
            for scales in (pages.k_scales, pages.v_scales):
                scales[last, :, (n - 1) % case.page_size + 1 :] = float("nan")
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
        k, v = (c[of_row].flatten(0, 1)[seen].double() for c in stored(pages))
        for found, new, scale in ((k, qk[row, heads:], K_SCALE), (v, new_v[row], V_SCALE)):
            assert_kept(found[-1], new, whole, scale)
        group = heads // case.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        weights = case.weights(torch.einsum("hd,nhd->hn", qk[row, :heads], k))
        expected = torch.einsum("hn,nhd->hd", weights, v)
        torch.testing.assert_close(out[row].double(), expected, atol=2e-4, rtol=2e-4)


@interpreted
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("whole", [False, True])
def test_prompts(window: int | None, whole: bool) -> None:
    heads, rule = (8, 2, 64), ScoreRule(0.125, window=window)
    case = prompts.Case([(0, 30), (40, 7), (16, 1)], heads, rule)
    k, v = case.cache
    pages = CachePages(quantised(k, K_SCALE), quantised(v, V_SCALE), K_SCALE, V_SCALE)
    if whole:
        pages = whole_pages(k, v)
    case.cache = list(stored(pages))
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
    pages = whole_pages(*torch.zeros(2, 3, 16, 2, 64))
    assert torch.equal(rope_append(qkv, rotation, positions, slots, pages, None), wanted)
    for kept_whole, values in zip(stored(pages), plain, strict=True):
        assert_kept(kept_whole, values, True, 1.0)


@pytest.mark.parametrize("shape", [(16, 2, 64), (16, 5, 96)])
@pytest.mark.parametrize("whole", [False, True])
def test_pages_are_widened(device: torch.device, shape: tuple[int, int, int], whole: bool) -> None:
    """Listed ones alone, in the list's order."""
    pool = torch.randn(7, 2, *shape).to(device)
    fp8 = pool.to(FP8)
    pages = CachePages(fp8[:, 0], fp8[:, 1], K_SCALE, V_SCALE)
    if whole:
        pages = whole_pages(pool[:, 0], pool[:, 1])
    listed = torch.tensor([5, 0, 3], dtype=torch.int32, device=device)
    out = torch.full((2, 4, *shape), -1.0, device=device)
    widen_pages(pages, listed, out)
    for found, kept in zip(out, stored(pages), strict=True):
        torch.testing.assert_close(found[:3], kept[listed.long()], rtol=1e-6, atol=0)
    assert (out[:, 3] == -1).all()
    with pytest.raises(ValueError, match="room"):
        widen_pages(pages, listed, out[:, :2])


def test_a_scale_of_each_head_errs_less_than_fp8() -> None:
    """In numbers of a bell curve, also where one is ten times the others."""
    for times in (1, 10):
        x = torch.randn(4096, 1, 1, 128)
        x[..., 5] *= times
        of_whole = (read_whole(*in_whole(x)) - x).square().mean().sqrt()
        of_fp8 = (x.to(FP8).float() - x).square().mean().sqrt()
        assert of_whole < of_fp8 / 4 if times == 1 else of_whole < of_fp8
