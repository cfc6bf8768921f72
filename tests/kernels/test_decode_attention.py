"""Decode attention against the obvious loop in float64: rotation, append, pieces, LoRA's delta."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from loraplex.server.kernels.attention import decode_attention as module
from loraplex.server.kernels.attention.decode_attention import (
    DecodeBatchView,
    DecodeScratch,
    LayerScores,
    _shape,
    decode_attention,
    rows_of_each_shape,
)
from loraplex.server.kernels.attention.decode_work import WorkLayout, cut_contexts, max_items
from loraplex.server.kernels.attention.pages import CachePages
from loraplex.server.kernels.attention.rope_append import QkNorm
from loraplex.server.kernels.attention.scores import ScoreRule
from loraplex.server.kernels.lora.pending import PendingDelta
from loraplex.server.kernels.lora.table import LoraTable
from tests.grids import beyond, sparse
from tests.kernels.batches import sloped
from tests.kernels.rotations import TURNS, Turn, as_cached, normed, rotated

EPSILON = 1e-5


@given(st.integers(1, 64), st.integers(1, 2048))
def test_some_rows_take_every_shape(kv_heads: int, most: int) -> None:
    for narrow in (False, True):
        shape = partial(_shape, group=4, head_dim=128, narrow=narrow)
        warm = {shape(kv_heads * rows) for rows in rows_of_each_shape(kv_heads, most)}
        assert warm == {shape(kv_heads * rows) for rows in range(1, most + 1)}


class Case:
    """Random sequences of given contexts (the new token included), pages in random order."""

    def __init__(
        self,
        contexts: list[int],
        shape: tuple[int, int, int],
        device: torch.device,
        dtype: torch.dtype,
        page_size: int = 16,
        turn: Turn = TURNS["halves"],
        norm: bool | None = None,
        scores: tuple[ScoreRule, bool] | None = None,
    ) -> None:
        """norm: over all heads, over each, None = without. scores: of the layer, and whether it has
        sinks."""
        torch.manual_seed(len(contexts))
        rule, has_sinks = scores or (ScoreRule(shape[2] ** -0.5), False)
        sinks = 2 * torch.randn(shape[0]).to(device) if has_sinks else None
        self.scores = LayerScores(rule, 1, sinks)
        self.page_size, self.parts = page_size, 3
        self.contexts, (self.heads, self.kv_heads, self.head_dim) = contexts, shape
        self.device, self.dtype = device, dtype
        batch = len(contexts)
        self.all_heads = self.heads + 2 * self.kv_heads
        longest = max(contexts)
        counts = [-(-n // page_size) for n in contexts]
        order = torch.randperm(sum(counts))
        self.page_table = torch.full((batch + 1, -(-longest // page_size)), 10**6)
        used = 0
        for row, count in enumerate(counts):
            self.page_table[batch - row, :count] = order[used : used + count]
            used += count
        self.page_table = self.page_table.to(device)
        size = (sum(counts), page_size, self.kv_heads, self.head_dim)
        self.k, self.v = (torch.randn(size).to(device, dtype) for _ in "kv")
        self.qkv = torch.randn(batch, self.all_heads * self.head_dim).to(device, dtype)
        self.rotation = turn.rotation(self.head_dim, longest, device)
        weights = torch.randn(self.heads + self.kv_heads, self.head_dim).to(device, dtype)
        self.norm = None if norm is None else QkNorm(weights, EPSILON, all_heads=norm)
        for row, n in enumerate(contexts):  # what is not seen must not be read
            pages = self.page_table[batch - row, : counts[row]]
            first = self.first_seen(n)
            for cache in (self.k, self.v):
                flat = cache[pages].flatten(0, 1)
                flat[n - 1 :] = flat[:first] = float("nan")
                cache[pages] = flat.view(-1, *size[1:])
        self.known_pages = self.page_table.clone()
        for row, n in enumerate(contexts):
            self.page_table[batch - row, : self.first_seen(n) // page_size] = 10**6

    def first_seen(self, context: int) -> int:
        window = self.scores.rule.window
        return 0 if window is None else max(0, context - window)

    def view(self) -> DecodeBatchView:
        batch = len(self.contexts)
        layout = WorkLayout((7, self.scores.rule.window), batch)
        packed = np.full(layout.length, 10**6, dtype=np.int32)
        layout.cut(np.array(self.contexts), packed)
        work = layout.items(torch.from_numpy(packed).to(self.device))
        rows = torch.arange(batch, 0, -1, dtype=torch.int32, device=self.device)
        positions = torch.tensor(self.contexts, device=self.device) - 1
        return DecodeBatchView(rows, positions, self.page_table, work)

    def run(self, pending: PendingDelta | None = None, room: int | None = None) -> torch.Tensor:
        """room: sequences that scratch is made for; None = these."""
        batch, view = len(self.contexts), self.view()
        scratch = DecodeScratch(room or batch, self.heads, self.head_dim, self.device)
        out = torch.full(
            (batch, self.heads, self.head_dim), 7.0, dtype=self.dtype, device=self.device
        )
        for _ in range(2):  # the scratch must be as new after a launch
            context = (
                view,
                CachePages(self.k, self.v, parts=self.parts),
                self.rotation,
                self.norm,
                self.scores,
                scratch,
                out,
            )
            early = self.device.type == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
            decode_attention(self.qkv, pending, *context, programmatic_launch=early)
        assert not bool(scratch.done.any())
        return out

    def expected(self, delta: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Attention of each sequence, and the k and v it appends, in float64 on the CPU."""
        qkv = self.qkv.double().cpu()
        if delta is not None:
            qkv = qkv + delta.double().cpu()
        x = qkv.view(len(self.contexts), self.all_heads, self.head_dim)
        qk, new_v = x[:, : -self.kv_heads], x[:, -self.kv_heads :]
        positions = torch.tensor(self.contexts) - 1
        qk = rotated(normed(qk, self.heads, self.norm), self.heads, self.rotation, positions)
        qk = as_cached(qk, self.rotation)
        results = []
        for row, n in enumerate(self.contexts):
            pages = self.known_pages[len(self.contexts) - row, : -(-n // self.page_size)]
            seen = slice(self.first_seen(n), n - 1)
            k, v = (c[pages].flatten(0, 1)[seen].double().cpu() for c in (self.k, self.v))
            k = torch.cat((k, qk[row, self.heads :][None]))
            v = torch.cat((v, new_v[row][None]))
            group = self.heads // self.kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            products = torch.einsum("hd,nhd->hn", qk[row, : self.heads], k)
            results.append(torch.einsum("hn,nhd->hd", self.weights(products), v))
        self.new_k, self.new_v = qk[:, self.heads :], new_v
        return results

    def weights(self, products: torch.Tensor) -> torch.Tensor:
        """Of tokens, `[heads, tokens]`."""
        rule, sinks = self.scores.rule, self.scores.sinks
        scores = products * rule.scale
        if rule.softcap is not None:
            scores = rule.softcap * (scores / rule.softcap).tanh()
        if rule.slopes is not None:
            scores += rule.slopes.double().cpu()[:, None] * torch.arange(1 - scores.shape[1], 1)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().cpu()[:, None]), dim=1)
        return scores.softmax(-1)[:, : products.shape[1]]

    def check(self, out: torch.Tensor, expected: list[torch.Tensor]) -> None:
        exact = self.dtype == torch.float32
        tolerance = 2e-5 if exact else 2e-2
        torch.testing.assert_close(
            out.double().cpu(), torch.stack(expected), atol=tolerance, rtol=tolerance
        )
        for row, n in enumerate(self.contexts):
            page = self.known_pages[len(self.contexts) - row, (n - 1) // self.page_size]
            for cache, new in ((self.k, self.new_k), (self.v, self.new_v)):
                written = cache[page, (n - 1) % self.page_size].double().cpu()
                torch.testing.assert_close(written, new[row], atol=tolerance, rtol=tolerance)


SHAPES = [(4, 2, 64), (14, 2, 64), (3, 3, 32), (8, 1, 48), (24, 1, 256)]


@pytest.mark.parametrize(("shape", "norm"), sparse(SHAPES, [None, False, True]))
def test_short_and_long_contexts(
    device: torch.device, shape: tuple[int, int, int], norm: bool | None
) -> None:
    case = Case([1, 17, 300, 16, 1100], shape, device, torch.float32, norm=norm)
    expected = case.expected()
    case.check(case.run(), expected)


@pytest.mark.parametrize(
    ("turn", "shape", "norm"),
    sparse(list(TURNS), [(4, 2, 64), (3, 1, 48), (2, 2, 80)], [None, False, True]),
)
def test_every_rotation(
    device: torch.device, turn: str, shape: tuple[int, int, int], norm: bool | None
) -> None:
    """Cached keys lie in their pages as the rotation leaves them."""
    case = Case([1, 17, 40], shape, device, torch.float32, 16, TURNS[turn], norm)
    expected = case.expected()
    case.check(case.run(), expected)


SCORES = {
    "scale": (ScoreRule(0.3), False),
    "cap": (ScoreRule(0.2, softcap=3.0), False),
    "window": (ScoreRule(0.2, window=100), False),
    "window of one": (ScoreRule(0.2, window=1), True),
    "long window": (ScoreRule(0.2, window=700), False),
    "sinks": (ScoreRule(0.2), True),
    "all": (ScoreRule(0.2, 2.0, 290), True),
}


@pytest.mark.parametrize(
    ("name", "page_size", "shape", "slopes"),
    sparse(
        list(SCORES),
        [16, 1, 24, 64, 256],
        [(4, 2, 64), (14, 2, 32), (3, 3, 48)],
        [1.0, None],
    ),
)
def test_scores_of_other_layers(
    device: torch.device,
    name: str,
    page_size: int,
    shape: tuple[int, int, int],
    slopes: float | None,
) -> None:
    """Windows that begin anywhere in a page, a tile and a piece; no page behind them is looked
    up."""
    contexts = [1, 17, 100, 101, 163, 300, 1100]
    rule, sinks = SCORES[name]
    scores = sloped(rule, shape[0], slopes, device), sinks
    case = Case(contexts, shape, device, torch.float32, page_size, scores=scores)
    expected = case.expected()
    case.check(case.run(), expected)


@pytest.mark.parametrize(
    ("window", "page_size"), sparse([1, 16, 33, 64, 65, 200], [16, 8, 64, 24, 128])
)
def test_pages_behind_the_window_may_hold_anything(
    device: torch.device, window: int, page_size: int
) -> None:
    """The table still names them, and they hold NaN: they are other sequences' by now."""
    scores = (ScoreRule(0.2, window=window), False)
    contexts = [1, 17, 64, 65, 81, 128, 129, 300, 1111]
    case = Case(contexts, (4, 2, 32), device, torch.float32, page_size, scores=scores)
    expected = case.expected()
    case.page_table = case.known_pages
    for row, n in enumerate(contexts):
        stale = case.known_pages[len(contexts) - row, : case.first_seen(n) // page_size]
        for cache in (case.k, case.v):
            assert bool(cache[stale].isnan().all())
    case.check(case.run(), expected)


@pytest.mark.parametrize("sink", [-1000.0, 1000.0])
def test_sinks_of_any_size(device: torch.device, sink: float) -> None:
    case = Case([1, 40, 700], (4, 2, 64), device, torch.float32, scores=SCORES["sinks"])
    assert case.scores.sinks is not None
    case.scores.sinks.fill_(sink)
    expected = case.expected()
    case.check(case.run(), expected)


@pytest.mark.parametrize("page_size", beyond(2, [8, 24, 1, 32, 64]))
def test_pages_of_any_size(device: torch.device, page_size: int) -> None:
    case = Case([1, 33, 300, 64, 129], (4, 2, 32), device, torch.float32, page_size)
    expected = case.expected()
    case.check(case.run(), expected)


@pytest.mark.parametrize("page_size", beyond(1, [128, 256]))
def test_pieces_that_begin_within_a_tile_of_a_page(device: torch.device, page_size: int) -> None:
    contexts = [9000, 40]
    case = Case(contexts, (2, 1, 32), device, torch.float32, page_size)
    piece = cut_contexts(np.array(contexts), np.zeros((2, max_items(2)), dtype=np.int32))
    assert piece % _shape(2, 2, 32)[0] != 0
    expected = case.expected()
    case.check(case.run(), expected)


@pytest.mark.parametrize(("kv_heads", "page_size"), sparse([4, 6], [16, 24]))
def test_many_programs(
    device: torch.device, kv_heads: int, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SOME", 32)
    monkeypatch.setattr(module, "_MANY", 48)
    contexts = [1, 16, 17, 33, 48, 65, 2, 32]
    case = Case(contexts, (kv_heads, kv_heads, 32), device, torch.float32, page_size)
    assert _shape(kv_heads * len(contexts), 1, 32) != _shape(1, 1, 32)
    expected = case.expected()
    case.check(case.run(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 9, 70, 256])
@pytest.mark.parametrize(
    "shape", [(32, 8, 128), (24, 8, 80), (64, 2, 64), (16, 8, 256), (32, 4, 512)]
)
def test_half_precision(batch: int, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    contexts = [1 + 97 * i % 700 for i in range(batch - 1)] + [9000]
    case = Case(contexts, shape, torch.device("cuda"), dtype)
    expected = case.expected()
    case.check(case.run(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 70, 256])
@pytest.mark.parametrize(
    ("shape", "scores", "slopes"),
    [
        ((16, 8, 256), (ScoreRule(0.0625, 50.0, 4096), False), None),
        ((64, 8, 64), (ScoreRule(0.125, window=128), True), None),
        ((32, 32, 96), (ScoreRule(96**-0.5, window=2047), False), None),
        ((32, 32, 128), (ScoreRule(128**-0.5), False), 1.0),
        ((16, 4, 64), (ScoreRule(0.125, 30.0, 300), False), 1.0),
    ],
)
def test_half_precision_of_other_layers(
    batch: int, shape: tuple[int, int, int], scores: tuple[ScoreRule, bool], slopes: float | None
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    contexts = [1 + 97 * i % 700 for i in range(batch - 1)] + [9000]
    device = torch.device("cuda")
    scores = sloped(scores[0], shape[0], slopes, device), scores[1]
    case = Case(contexts, shape, device, torch.bfloat16, scores=scores)
    expected = case.expected()
    case.check(case.run(), expected)


@pytest.mark.parametrize(("ranks", "norm"), sparse([(3, 0, 5), (0, 2, 0), (1, 1, 1)], [None, True]))
def test_delta_is_added_where_an_adapter_touches(
    device: torch.device, ranks: tuple[int, int, int], norm: bool | None
) -> None:
    turn = TURNS["neighbours" if norm else "halves"]
    case = Case([5, 40, 260], (4, 2, 64), device, torch.float32, turn=turn, norm=norm)
    widths = [4 * 64, 2 * 64, 2 * 64]
    delta = torch.full_like(case.qkv, float("nan"))
    start = 0
    for width, rank in zip(widths, ranks, strict=True):
        if rank:
            delta[1, start : start + width] = torch.randn(width, device=device)
        start += width
    table = LoraTable(2, 2, device)
    table.write(1, 1, 256, [512] * 3, ranks, [1.0] * 3)
    table.upload(1)
    slots = torch.tensor([-1, 1, 0], dtype=torch.int32, device=device)
    expected = case.expected(delta.nan_to_num(0))
    case.check(case.run(PendingDelta(table, 1, slots, delta)), expected)


@pytest.mark.parametrize("window", [None, 1, 64, 1000])
def test_pieces_cover_what_every_context_sees_once(window: int | None) -> None:
    rng = np.random.default_rng(7)
    for batch in (1, 3, 64, 256):
        for top in (1, 300, 20_000, 131_072):
            contexts = rng.integers(1, top + 1, batch)
            items = np.zeros((2, max_items(batch)), dtype=np.int32)
            piece = cut_contexts(contexts, items, window)
            used = items[:, items[0] >= 0]
            begins = np.zeros(batch, dtype=np.int64)
            if window is not None:
                begins = np.maximum(contexts - window, 0) // 64 * 64
            assert sorted(map(tuple, used.T.tolist())) == [
                (i, j) for i, n in enumerate(contexts - begins) for j in range(-(-int(n) // piece))
            ]
            assert (items[0, used.shape[1] :] == -1).all()


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_fewer_parts_with_normed_values(device: torch.device, parts: int) -> None:
    """As of q, k and normed v, with LoRA. Of q alone keys and values are in their pages before."""
    case = Case([5, 70, 1], (6, 2, 48), device, torch.float32, norm=False)
    sizes = [6 * 48, 2 * 48, 2 * 48][:parts]
    delta, product = torch.randn_like(case.qkv), case.qkv
    q, k, v = (product + delta).split([6 * 48, 2 * 48, 2 * 48], dim=1)
    values = (v if parts == 3 else k).unflatten(1, (2, 48))
    normed_v = functional.rms_norm(values, (48,), eps=EPSILON).flatten(1)
    case.qkv = torch.cat((q, k, normed_v), dim=1)
    empty = case.k.clone(), case.v.clone()
    expected = case.run()
    written = case.k, case.v
    case.k, case.v = written if parts == 1 else empty

    assert case.norm is not None
    weights = case.norm.weights if parts > 1 else case.norm.weights[:6]
    case.norm, case.parts = QkNorm(weights, EPSILON, values=True), parts
    case.qkv = product[:, : sum(sizes)].contiguous()
    table = LoraTable(1, 1, device)
    table.write(0, 0, 256, [512] * 3, [1] * parts + [0] * (3 - parts), [1.0] * 3)
    table.upload(0)
    slots = torch.zeros(3, dtype=torch.int32, device=device)
    found = case.run(PendingDelta(table, 0, slots, delta[:, : sum(sizes)].contiguous()))

    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    for cache, wanted in zip((case.k, case.v), written, strict=True):
        torch.testing.assert_close(cache, wanted, atol=2e-5, rtol=2e-5, equal_nan=True)


def test_a_batch_that_scratch_has_no_room_for_is_refused() -> None:
    case = Case([5, 40, 300], (4, 2, 64), torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="scratch is for 2 sequences, the batch has 3"):
        case.run(room=2)
