"""Prompt attention against the obvious attention in float64, over pages in random order."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.kernels.attention.pages import CachePages
from loraplex.server.kernels.attention.prompt_attention import (
    TileShape,
    cut_prompts,
    max_tiles,
    prompt_attention,
    tile_shape,
)
from loraplex.server.kernels.attention.scores import ScoreRule
from tests.grids import beyond, examples, sparse
from tests.kernels.batches import interpreted, sloped
from tests.kernels.interpreter import exact_products

CPU, NO_PAGE = torch.device("cpu"), 10**6
HOPPER, ADA = (9, 0), (8, 9)


class Case:
    """Chunks (start, tokens) of random prompts. What must not be read is NaN, or no page."""

    def __init__(
        self,
        chunks: list[tuple[int, int]],
        heads: tuple[int, int, int],
        rule: ScoreRule,
        page_size: int = 16,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
        sinks: bool = False,
        named: bool = False,
    ) -> None:
        """named: pages that are gone stay in the table."""
        torch.manual_seed(len(chunks))
        self.chunks, self.rule, self.page_size = chunks, rule, page_size
        num_heads, kv_heads, head_dim = heads
        counts = [-(-(start + n) // page_size) for start, n in chunks]
        order = torch.randperm(sum(counts) + 1)
        shape = (sum(counts) + 1, page_size, kv_heads, head_dim)
        self.cache = [torch.randn(shape).to(device, dtype) for _ in "kv"]
        self.page_table = torch.full((len(chunks) + 1, max(counts)), NO_PAGE, device=device)
        self.lists = []
        for i, (start, n) in enumerate(chunks):
            pages = order[: counts[i]].to(device)
            order = order[counts[i] :]
            self.lists.append(pages)
            gone = 0 if rule.window is None else max(0, start + 1 - rule.window) // page_size
            kept = 0 if named else gone
            self.page_table[len(chunks) - i, kept : counts[i]] = pages[kept:]
            for cache in self.cache:
                flat = cache[pages].flatten(0, 1)
                flat[start + n :] = float("nan")
                flat[: gone * page_size] = float("nan")
                cache[pages] = flat.view(-1, *shape[1:])
        self.q = torch.randn(sum(n for _, n in chunks) + 2, num_heads, head_dim).to(device, dtype)
        self.sinks = torch.randn(num_heads).to(device) if sinks else None
        self.lasts: list[torch.Tensor | None] = [None] * len(chunks)

    def join(self, spans: tuple[tuple[int, int], ...]) -> None:
        """spans: places in every context whose tokens see each other; none goes on behind a chunk
        that has some of it."""
        self.lasts = [last_seen(start, n, spans).to(self.q.device) for start, n in self.chunks]

    def run(self, shape: TileShape, idle: int = 0) -> torch.Tensor:
        """idle: tiles of no tokens behind the others."""
        starts, num_new = np.array(self.chunks).T
        rows = np.arange(len(self.chunks), 0, -1)
        tiles = np.pad(cut_prompts(rows, starts, num_new, shape.tokens), ((0, idle), (0, 0)))
        assert len(tiles) - idle <= max_tiles(int(num_new.sum()), len(rows), shape)
        out = torch.full_like(self.q, 7.0)
        on_device = torch.from_numpy(tiles).to(self.q.device)
        k, v = self.cache
        context = (self.page_table, on_device, shape, self.rule, self.sinks)
        lasts = [of for of in self.lasts if of is not None]
        of_all = torch.cat(lasts).int() if lasts else None
        prompt_attention(self.q, CachePages(k, v), *context, out, of_all)
        assert out[-2:].eq(7).all(), "tokens of no tile are left as they are"
        return out[:-2]

    def expected(self) -> torch.Tensor:
        found, first = [], 0
        of_chunks = zip(self.chunks, self.lists, self.lasts, strict=True)
        for (start, n), pages, lasts in of_chunks:
            k, v = (cache[pages].flatten(0, 1)[: start + n].double() for cache in self.cache)
            q = self.q[first : first + n].double()
            sinks = None if self.sinks is None else self.sinks.double()
            found.append(
                attended(q, k.nan_to_num(), v.nan_to_num(), start, self.rule, sinks, lasts)
            )
            first += n
        return torch.cat(found)

    def check(self, shape: TileShape, idle: int = 0) -> None:
        tolerance = 1e-5 if self.q.dtype == torch.float32 else 2e-2
        out = self.run(shape, idle).double()
        torch.testing.assert_close(out, self.expected(), atol=tolerance, rtol=tolerance)


def last_seen(start: int, count: int, spans: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """The last position that each token from `start` on sees."""
    found = torch.arange(start, start + count)
    for begin, end in spans:
        found[(found >= begin) & (found < end)] = end - 1
    return found


def attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    rule: ScoreRule,
    sinks: torch.Tensor | None,
    lasts: torch.Tensor | None = None,
) -> torch.Tensor:
    """q `[n, heads, head_dim]` of tokens from `start` on; k, v `[start + n, kv_heads, head_dim]`;
    all float64."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    query = torch.arange(start, len(k), device=q.device)[:, None]
    key = torch.arange(len(k), device=q.device)
    if rule.slopes is not None:
        scores = scores + rule.slopes.double()[:, None, None] * (key - query)
    last = query if lasts is None else lasts[:, None]
    seen = (key <= last) & (key > query - (rule.window or len(k)))
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v)


def small(group: int, block_m: int = 16, block_n: int = 16) -> TileShape:
    return TileShape(block_m // group, block_m, block_n, 4, 2)


CHUNKS = [(0, 1), (0, 33), (15, 2), (40, 17), (47, 1)]


@pytest.mark.parametrize(
    ("heads", "rule", "sinks", "slopes"),
    sparse(
        [(4, 2, 64), (3, 1, 80), (7, 1, 96), (2, 2, 24), (10, 2, 16)],
        [
            ScoreRule(0.125),
            ScoreRule(0.3, softcap=2.0),
            ScoreRule(0.2, window=9),
            ScoreRule(0.2, softcap=5.0, window=16),
        ],
        [False, True],
        [0.1, None, 2.0],
    ),
)
def test_chunks_of_several_prompts(
    device: torch.device,
    heads: tuple[int, int, int],
    rule: ScoreRule,
    sinks: bool,
    slopes: float | None,
) -> None:
    rule = sloped(rule, heads[0], slopes, device)
    case = Case(CHUNKS, heads, rule, device=device, sinks=sinks)
    case.check(small(heads[0] // heads[1]), idle=3)


@pytest.mark.parametrize(("head_dim", "values"), [(64, 32), (80, 32)])
def test_values_shared_among_programs(device: torch.device, head_dim: int, values: int) -> None:
    """Programs share 64 features, or 80, of which the last program has half its own."""
    case = Case(CHUNKS, (4, 2, head_dim), ScoreRule(0.2, window=9), device=device, sinks=True)
    case.check(replace(small(2), most_values=values), idle=1)


@pytest.mark.parametrize(
    ("heads", "rule"),
    sparse(
        [(4, 2, 64), (7, 1, 24)],
        [ScoreRule(0.3, softcap=2.0), ScoreRule(0.2, window=9), ScoreRule(0.2, window=40)],
    ),
)
def test_tokens_of_a_span_see_each_other(
    device: torch.device, heads: tuple[int, int, int], rule: ScoreRule
) -> None:
    """Spans begin before a chunk, within it and at its end, and are longer than a tile."""
    chunks, spans = [(0, 60), (13, 47), (17, 3), (20, 40), (3, 17)], ((4, 20), (20, 60))
    case = Case(chunks, heads, rule, device=device)
    case.join(spans)
    case.check(small(heads[0] // heads[1]))


@pytest.mark.parametrize("window", beyond(5, [1, 15, 16, 17, 64, 2, 31, 32, 33]))
def test_windows_at_the_borders_of_pages(device: torch.device, window: int) -> None:
    """Pages wholly behind the first token's window are gone, or somebody else's, and hold NaN."""
    chunks = [(start, 16) for start in (0, 15, 16, 17, 47, 48, 49)]
    rule = ScoreRule(0.25, window=window)
    for named in (False, True):
        case = Case(chunks, (2, 1, 16), rule, device=device, named=named)
        for shape in (small(2), replace(small(2), aligned=True)):
            case.check(shape)


@pytest.mark.parametrize("window", [None, 9, 40])
def test_a_token_has_the_same_bits_in_any_tile(device: torch.device, window: int | None) -> None:
    """Alone, and among those of its prompt, however that is cut."""
    case = Case([(0, 80)], (4, 2, 16), ScoreRule(0.2, window=window), device=device, sinks=True)
    shape = replace(small(2), aligned=True)
    with exact_products():
        whole = case.run(shape)
        for begin, end in ((0, 7), (7, 8), (20, 53), (53, 80)):
            case.chunks, q = [(begin, end - begin)], case.q
            case.q = torch.cat((q[begin:end], q[-2:]))
            assert torch.equal(case.run(shape), whole[begin:end])
            case.q = q


@pytest.mark.parametrize("page_size", [1, 4, 24, 64])
def test_pages_of_any_size(device: torch.device, page_size: int) -> None:
    rule = ScoreRule(0.2, window=20)
    Case(CHUNKS, (4, 2, 32), rule, page_size, device).check(small(2, block_n=32))


@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # of which tanh makes 1
@examples(10, 25, st.data())
def test_any_chunks(data: st.DataObject) -> None:
    chunk = st.tuples(st.integers(0, 70), st.integers(1, 40))
    chunks = data.draw(st.lists(chunk, min_size=1, max_size=3))
    group, kv_heads = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 2))
    heads = (group * kv_heads, kv_heads, data.draw(st.sampled_from([8, 16, 40])))
    cap = data.draw(st.none() | st.floats(0.5, 50.0))
    window = data.draw(st.none() | st.integers(1, 100))
    rule = ScoreRule(data.draw(st.floats(0.01, 1.0)), cap, window)
    shape = small(group, data.draw(st.sampled_from([16, 32])), data.draw(st.sampled_from([16, 32])))
    page_size, sinks = data.draw(st.integers(1, 20)), data.draw(st.booleans())
    Case(chunks, heads, rule, page_size, sinks=sinks).check(shape, data.draw(st.integers(0, 2)))


@interpreted
@pytest.mark.parametrize("group", [1, 7, 8, 71])
@pytest.mark.parametrize("capability", [HOPPER, ADA])
def test_the_shape_of_a_device(group: int, capability: tuple[int, int]) -> None:
    shape = tile_shape(group, 24, capability)
    Case([(3, 20)], (group, 1, 24), ScoreRule(0.2, window=12)).check(shape)


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 300)), min_size=1, max_size=9),
    st.integers(1, 64),
)
def test_tiles_hold_every_token_once(chunks: list[tuple[int, int]], tokens: int) -> None:
    starts, num_new = np.array(chunks).T
    tiles = cut_prompts(np.arange(len(chunks)), starts, num_new, tokens)
    firsts = np.cumsum(num_new) - num_new
    places = {(row, first + i, position + i) for row, first, position, n in tiles for i in range(n)}
    assert places == {
        (row, firsts[row] + i, starts[row] + i)
        for row in range(len(chunks))
        for i in range(num_new[row])
    }
    assert tiles[:, 3].sum() == num_new.sum()
    assert tiles[:, 3].max() <= tokens
    assert (np.diff(tiles[:, 2]) <= 0).all()
    assert len(tiles) <= max_tiles(int(num_new.sum()), len(chunks), TileShape(tokens, 0, 0, 0, 0))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 512, not 1024"):
        tile_shape(4, 1024, HOPPER)
    with pytest.raises(ValueError, match="tiles of 16 tokens are not for 2 heads"):
        Case([(0, 3)], (2, 1, 16), ScoreRule(1.0)).run(small(1))


FULL, WINDOW = [(0, 700), (2100, 333), (4000, 31)], 512


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 160, 192, 256, 512])
@pytest.mark.parametrize(
    ("change", "sinks", "slopes"),
    [
        ({}, False, None),
        ({"softcap": 30.0}, False, None),
        ({"window": WINDOW}, True, None),
        ({}, False, 0.5),
    ],
)
def test_half_precision(
    dtype: torch.dtype, head_dim: int, change: dict[str, Any], sinks: bool, slopes: float | None
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device, rule = torch.device("cuda"), ScoreRule(head_dim**-0.5, **change)
    rule = sloped(rule, 8, slopes, device)
    case = Case(FULL, (8, 2, head_dim), rule, device=device, dtype=dtype, sinks=sinks)
    case.check(tile_shape(4, head_dim, torch.cuda.get_device_capability()), idle=2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads", [(7, 1, 128), (71, 1, 64), (16, 8, 256), (32, 4, 512), (24, 8, 96)]
)
def test_groups_of_any_size_in_half_precision(heads: tuple[int, int, int]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rule, device = ScoreRule(0.1, softcap=50.0, window=WINDOW), torch.device("cuda")
    case = Case(FULL, heads, rule, device=device, dtype=torch.bfloat16)
    case.check(tile_shape(heads[0] // heads[1], heads[2], torch.cuda.get_device_capability()))
