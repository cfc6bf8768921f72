"""Drafts change no answer: whatever they say, each token is the one drawn without them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from peft import LoraConfig

from loraplex.server.engine.plan import SeqSlice, SliceResult
from loraplex.server.model.steps.drafts import joined, spread_places
from loraplex.server.protocol import SamplingParams, TokenLogprob
from tests.kernels.batches import interpreted
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.gpu_pair import load_in_order, prompt, small_pair
from tests.server.model.hub_models import add_adapter, make_model, save_model
from tests.server.model.slabs import pack

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
LAYERS = LoraConfig(r=3, lora_alpha=60, target_modules=["q_proj", "v_proj", "down_proj"])
EVERYWHERE = LoraConfig(r=8, lora_alpha=80, target_modules=["gate_proj", "embed_tokens", "lm_head"])
TOKENS = 40
# Each row's parameters, the adapter's slot, and how often a token of its draft is right.
ROWS: dict[str, tuple[SamplingParams, int, int]] = {
    "greedy": (SamplingParams(temperature=0.0), -1, 100),
    "scored": (SamplingParams(temperature=0.0, logprobs=2, logprob_token_ids=(9, 5)), 0, 70),
    "hot": (SamplingParams(temperature=1.3, top_p=0.95, logprobs=1, logprob_token_ids=(4,)), 1, 80),
    "cut": (SamplingParams(temperature=0.8, top_k=20, min_p=1e-4), 0, 50),
    "repeating": (SamplingParams(temperature=0.0, repetition_penalty=1.5), -1, 90),
    "counting": (
        SamplingParams(temperature=1.0, frequency_penalty=0.7, presence_penalty=0.4),
        0,
        90,
    ),
    "typical": (SamplingParams(temperature=1.0, typical_p=0.7, frequency_penalty=0.5), -1, 90),
    "biased": (SamplingParams(temperature=0.0, logit_bias={7: 2.0}, logprobs=0), 1, 0),
    "processed": (
        SamplingParams(temperature=0.8, top_k=9, logprobs=2, processed_logprobs=True),
        0,
        80,
    ),
    "bound processed": (
        SamplingParams(presence_penalty=0.4, logprobs=1, processed_logprobs=True),
        1,
        90,
    ),
    "bound": (SamplingParams(temperature=0.0, logprobs=1), -1, 90),
    "bound hot": (SamplingParams(temperature=1.2), 0, 90),
    "bound cut": (SamplingParams(temperature=0.9, top_k=20), 0, 100),
    "bound counting": (SamplingParams(temperature=0.8, frequency_penalty=0.6), -1, 90),
    "bound typical": (SamplingParams(temperature=1.0, typical_p=0.7), 1, 90),
}
Draft = Callable[[list[int]], list[int]]


def answers(driver: Driver, names: list[str], drafts: list[Draft] | None = None) -> list[Stream]:
    streams = []
    for row, name in enumerate(names):
        sampling, slot, _ = ROWS[name]
        ids = prompt(3 + 2 * row, row)
        stream = Stream(
            driver, row, ids, slot=slot, sampling=sampling, seed=row, suppressed_until=8
        )
        if name.startswith("bound"):
            stream.bound(few_after(stream))
        if drafts is not None:
            stream.draft = drafts[row]
        streams.append(stream)
    generate(driver, streams, TOKENS, 5)
    for stream in streams:
        stream.free()
    return streams


def few_after(stream: Stream) -> Callable[[list[int]], list[int]]:
    """Few ids may follow any tokens, and at some places of a draft it ends."""

    def allowed(tokens: list[int]) -> list[int]:
        if len(tokens) > len(stream.tokens) and len(tokens) % 6 == 0:
            return []
        return [(7 * tokens[-1] + tokens[-2] + 13 * i) % 90 for i in range(9)]

    return allowed


def drafter(plain: Stream, right_percent: int) -> Draft:
    """Of the answer without drafts, its beginnings; some tokens are wrong."""

    def draft(tokens: list[int]) -> list[int]:
        begin = len(tokens)
        said = plain.tokens[begin : begin + 1 + begin % 5]
        return [
            token if (begin + i) * 37 % 100 < right_percent else (token + 1) % 90
            for i, token in enumerate(said)
        ]

    return draft


def check(driver: Driver, names: list[str]) -> None:
    plain = answers(driver, names)
    began = driver.step
    drafts = [drafter(s, ROWS[name][2]) for s, name in zip(plain, names, strict=True)]
    found = answers(driver, names, drafts)
    assert driver.step - began < TOKENS or "biased" in names
    for name, ours, theirs in zip(names, found, plain, strict=True):
        assert ours.output[:TOKENS] == theirs.output[:TOKENS], name
        places = [*zip(ours.logprobs, theirs.logprobs, strict=False)][:TOKENS]
        assert len(places) == (0 if ROWS[name][0].logprobs is None else TOKENS)
        for mine, wanted in places:
            assert mine.token_id == wanted.token_id
            assert mine.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert [t for t, _ in mine.top] == [t for t, _ in wanted.top]
            assert len(mine.listed) == len(ROWS[name][0].logprob_token_ids)
            assert mine.listed == pytest.approx(wanted.listed, abs=1e-4)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder = tmp_path_factory.mktemp("base")
    model = make_model("llama3", **SIZES)
    save_model(model, folder)
    found = Driver(folder)
    for slot, config in enumerate((LAYERS, EVERYWHERE)):
        model = add_adapter(model, f"a{slot}", config, slot + 1)
    load_in_order(found, [pack(model, f"a{slot}") for slot in range(2)])
    yield found
    found.close()


@pytest.mark.parametrize("name", ROWS)
def test_a_row(driver: Driver, name: str) -> None:
    check(driver, [name])


def test_rows_together(driver: Driver) -> None:
    check(driver, [*ROWS])


@interpreted
@pytest.mark.parametrize(
    ("base", "names"),
    [
        pytest.param("llama3", [*ROWS], marks=pytest.mark.exhaustive, id="all"),
        # Its layers that attend have drafts as a model without states has.
        pytest.param("qwen3.5", ["scored", "cut", "bound hot"], id="states-in-graphs"),
        pytest.param("qwen3.5", [*ROWS], marks=pytest.mark.exhaustive, id="states-all"),
    ],
)
def test_on_the_gpu_path(
    base: str,
    names: list[str],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapters = {"layers": LAYERS, "everywhere": EVERYWHERE}
    folder = tmp_path_factory.mktemp("gpu")
    model = make_model(base, **SIZES if base == "llama3" else {})
    changes = {"max_running": 24, "max_draft": 5}
    with small_pair(model, adapters, folder, monkeypatch, **changes) as pair:
        monkeypatch.setitem(globals(), "TOKENS", 5)
        check(pair.gpu, names)
        in_graphs = all(slot < 1 for _, slot, _ in (ROWS[name] for name in names))
        assert max(pair.graphs, default=0) > len(names) or not in_graphs


def test_places_of_draws_where_drafts_are_spread() -> None:
    def piece(row: int, count: int) -> SeqSlice:
        return SeqSlice("decode", row, 4, 1 + count, [7] * count, -1, True, constrained=True)

    slices = [piece(0, 0), piece(1, 2), piece(2, 0), piece(3, 1)]
    assert spread_places(slices, [1, 1, 1, 3, 3]) == [1, 2, 3, 5, 6]
    assert spread_places(slices, [0, 2, 3, 3]) == [0, 4, 5, 6]


def result(token_id: int | None) -> SliceResult:
    if token_id is None:
        return SliceResult(failed=True)
    return SliceResult((token_id,), (TokenLogprob(token_id, -1.0),))


@pytest.mark.parametrize(
    ("draft", "drawn", "expected", "failed"),
    [
        ([5, 6], [5, 6, 7], (5, 6, 7), False),
        ([5, 6], [5, 9, 7], (5, 9), False),
        ([5, 6], [8, 6, 7], (8,), False),
        ([5, 6], [None, 6, 7], (), True),
        ([5, 6], [5, None, 7], (5,), False),
        ([5, 6], [5, 6, None], (5, 6), False),
    ],
)
def test_what_is_accepted(
    draft: list[int], drawn: list[int | None], expected: tuple[int, ...], failed: bool
) -> None:
    piece = SeqSlice("decode", 0, 4, 1 + len(draft), draft, -1, True)
    plain = SeqSlice("decode", 1, 4, 1, [], -1, True)
    found = joined([plain, piece, plain], [result(t) for t in (1, *drawn, 2)])
    assert [r.token_ids for r in found] == [(1,), expected, (2,)]
    assert [p.token_id for p in found[1].logprobs] == list(expected)
    assert found[1].failed is failed
