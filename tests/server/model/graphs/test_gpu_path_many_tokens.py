"""The GPU path's steps of many tokens on the CPU, as in test_gpu_path: outside graphs, and in."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from loraplex.server.protocol import SamplingParams
from tests.grids import beyond
from tests.kernels.batches import interpreted
from tests.server.model import fake_flashinfer
from tests.server.model.driver import EVERY_LOGPROB, Stream, generate
from tests.server.model.gpu_pair import Pair, prompt
from tests.server.model.hub_models import make_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    interpreted,
]
FEW, MOST = 16, 256
SIZES = ("few_tokens", "mixed_tokens", "most_tokens")
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "all": LoraConfig(r=8, lora_alpha=8, target_modules=SEVEN),
    "down": LoraConfig(r=16, lora_alpha=8, target_modules=["down_proj"]),
    "ends": LoraConfig(r=24, lora_alpha=9, target_modules=["k_proj", "up_proj"]),
    "odd": LoraConfig(r=5, lora_alpha=5, target_modules=SEVEN),
    "wide": LoraConfig(r=200, lora_alpha=50, target_modules=SEVEN),
}
SCORED = SamplingParams(temperature=0.0, logprobs=EVERY_LOGPROB, prompt_logprobs=1)
SAMPLED = SamplingParams(temperature=0.0, logprobs=EVERY_LOGPROB)


def note_products(patch: pytest.MonkeyPatch) -> set[tuple[int, ...]]:
    """Rows, and the weight's shape, of every product from now on."""
    from loraplex.server.model.ops.cuda.lora_linear import Products

    linear, found = Products.linear, set[tuple[int, ...]]()

    def noted(self: Any, x: torch.Tensor, matrix: Any, *context: Any, **how: Any) -> Any:
        found.add((len(x), *matrix.weight.shape))
        return linear(self, x, matrix, *context, **how)

    patch.setattr(Products, "linear", noted)
    return found


@pytest.fixture(scope="module")
def at_start() -> set[tuple[int, ...]]:
    """As `note_products`, of the pair's start."""
    return set()


@pytest.fixture(scope="module")
def pair(
    at_start: set[tuple[int, ...]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    model = make_model("llama3", num_hidden_layers=2, hidden_size=32, intermediate_size=300)
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("base")
        limits: dict[str, Any] = {"max_running": 8, "max_step_tokens": MOST}
        with pytest.MonkeyPatch.context() as starting:
            products = note_products(starting)
            sizes: dict[str, Any] = dict.fromkeys(SIZES, FEW)
            found = Pair(model, ADAPTERS, folder, patch, **sizes, **limits)
        at_start |= products
        yield found
        found.close()
    fake_flashinfer.forget()


@pytest.fixture
def captured(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Whose graphs take steps of any number of tokens, which are many, or mixed."""
    backend, mixed = request.param
    model = make_model("llama3", num_hidden_layers=2, hidden_size=32, intermediate_size=70)
    with pytest.MonkeyPatch.context() as patch:
        limits: dict[str, Any] = {"max_running": 8, "max_step_tokens": MOST, "max_context": 128}
        sizes = dict(zip(SIZES, (FEW, mixed, MOST), strict=True))
        found = Pair(model, ADAPTERS, tmp_path, patch, backend=backend, **sizes, **limits)
        yield found
        found.close()
    fake_flashinfer.forget()


def scored(driver: Any, slots: list[int], sampling: SamplingParams = SCORED) -> list[Stream]:
    streams = [
        Stream(driver, row, prompt(5 + 15 * row, row), slot=slot, sampling=sampling)
        for row, slot in enumerate(slots)
    ]
    generate(driver, streams, 3, 45)
    for stream in streams:
        stream.free()
    return streams


def assert_same(pair: Pair, slots: list[int], sampling: SamplingParams = SCORED) -> None:
    found, expected = (scored(d, slots, sampling) for d in (pair.gpu, pair.reference))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.output == theirs.output
        places = [*zip(ours.logprobs, theirs.logprobs, strict=True)]
        places += zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True)
        for mine, wanted in places:
            assert mine.logprob == pytest.approx(wanted.logprob, abs=1e-3)


@pytest.mark.parametrize(
    ("slots", "fused"),
    [
        *beyond(1, [([0, 1, -1], True), ([2, 1, 0, 2, -1], True), ([0, 0, -1, 1], True)]),
        *beyond(1, [([4, 0], False), ([0, 3, -1], False)]),
    ],
)
def test_same_as_the_reference(
    pair: Pair, slots: list[int], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all ranks are small ones the activation shrinks for down, else nobody's does. That of
    few tokens adds a delta."""
    from loraplex.server.model.ops.cuda import ops_cuda

    module: Any = ops_cuda
    gated, taken = module.gated_lora, list[tuple[int, bool]]()

    def noted(y: Any, pending: Any, config: Any, activation: Any, shrunk: Any = None) -> Any:
        taken.append((len(y), shrunk is not None))
        return gated(y, pending, config, activation, shrunk)

    monkeypatch.setattr(module, "gated_lora", noted)
    assert_same(pair, slots)
    assert {shrunk for _, shrunk in taken} == {fused}
    assert min(tokens for tokens, _ in taken) > FEW


@pytest.mark.exhaustive
@pytest.mark.parametrize("slot", [1, -1])
def test_no_product_has_a_size_that_none_had_at_start(
    pair: Pair, at_start: set[tuple[int, ...]], slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library has a kernel for every other number of rows, and loads it while steps wait."""
    products = note_products(monkeypatch)
    for count in (3, 6):
        scored(pair.gpu, [slot] * count)
    assert products
    assert products <= at_start


SAMPLED_ENDS, SCORED_ENDS = (SAMPLED, {16}), (SCORED, {64, 256})


# `families/test_gpu_path.py` has graphs of many tokens in a short run, of 16 or 32.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("captured", "sampling", "ends"),
    [
        (("fa2", FEW), *SCORED_ENDS),
        (("fa3", MOST), *SAMPLED_ENDS),
        (("fa3", FEW), *SAMPLED_ENDS),
        (("fa3", FEW), *SCORED_ENDS),
        (("fa2", FEW), *SAMPLED_ENDS),
        (("fa3", MOST), *SCORED_ENDS),
    ],
    indirect=["captured"],
)
def test_the_same_in_graphs(
    captured: Pair, sampling: SamplingParams, ends: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts and decodes in a step, and adapters of any ranks. The end of the last layer is
    of the tokens that somebody needs."""
    from loraplex.server.model.graphs.token_graphs import EndGraphs

    ended, upload = set[int](), EndGraphs._upload

    def noted(self: EndGraphs, size: int, *of_rows: Any) -> None:
        ended.add(size)
        upload(self, size, *of_rows)

    monkeypatch.setattr(EndGraphs, "_upload", noted)
    captured.graphs.clear()
    assert_same(captured, [0, 3, -1, 4, 2, 1], sampling)
    steps_with_prompts = [-tokens for tokens in captured.graphs if tokens < 0]
    assert len(steps_with_prompts) > 1
    assert min(steps_with_prompts) > FEW
    assert ended == ends
