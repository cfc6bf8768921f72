"""Prompts of layers that FlashInfer's module does not serve, as in test_gpu_path."""

from pathlib import Path

import pytest
from peft import LoraConfig

from loraplex.server.protocol import SamplingParams
from tests.kernels.batches import interpreted
from tests.server.model import fake_flashinfer
from tests.server.model.driver import EVERY_LOGPROB, Driver, Stream, generate, step
from tests.server.model.gpu_pair import Pair, answer, prompt
from tests.server.model.hub_models import make_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    interpreted,
]
ADAPTERS = {"layers": LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "o_proj"])}
SCORED = SamplingParams(temperature=0.0, logprobs=EVERY_LOGPROB, prompt_logprobs=0)
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
CHUNK, LONG, SHORT = 16, 70, 3


def beside_decodes(driver: Driver) -> list[Stream]:
    """Two long prompts in chunks, one of which begins later; a third sequence decodes meanwhile."""
    slots, lengths = (0, -1, -1), (SHORT, LONG, LONG + 9)
    streams = [
        Stream(driver, row, prompt(n, row), slot=slot, sampling=SCORED)
        for row, (n, slot) in enumerate(zip(lengths, slots, strict=True))
    ]
    short, long, later = streams
    step(driver, [(short, CHUNK), (long, CHUNK)])
    while not later.output:
        step(driver, [(short, 1), (long, 0 if long.output else CHUNK), (later, CHUNK)])
    for stream in streams:
        stream.free()
    return streams


def prompts_alone(driver: Driver) -> list[Stream]:
    """In chunks, with a token of output each."""
    streams = [
        Stream(driver, row, prompt(n, row), slot=slot, sampling=SCORED)
        for row, (n, slot) in enumerate([(LONG, -1), (SHORT, 0), (CHUNK + 2, 0)])
    ]
    generate(driver, streams, 1, CHUNK)
    for stream in streams:
        stream.free()
    return streams


def assert_same(found: list[Stream], expected: list[Stream]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.output == theirs.output
        places = [*zip(ours.logprobs, theirs.logprobs, strict=True)]
        places += zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True)
        assert places
        for mine, wanted in places:
            assert mine.logprob == pytest.approx(wanted.logprob, abs=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "backend", "kernels"),
    [
        ("qwen2-window", "fa3", {"FlashInfer", "Triton"}),
        ("mistral-window", "fa2", {"Triton"}),
        ("qwen2-window", "fa2", {"FlashInfer", "Triton"}),
    ],
)
def test_windows_of_some_layers_or_all(
    name: str, backend: str, kernels: set[str], tmp_path: Path
) -> None:
    """In graphs; prompts are longer than the window, the sequence that decodes is shorter."""
    model = make_model(name, **SIZES, sliding_window=12)
    with pytest.MonkeyPatch.context() as patch:
        pair = Pair(model, ADAPTERS, tmp_path, patch, backend=backend, max_running=6)
        from loraplex.server.model.ops.attention.prompt_attention import prompt_kernels

        assert set(prompt_kernels(pair.gpu.executor._decoder.spec)) == kernels
        pair.graphs.clear()
        found, expected = beside_decodes(pair.gpu), beside_decodes(pair.reference)
        assert any(taken < -CHUNK for taken in pair.graphs)
        assert_same(found, expected)
        pair.close()
    fake_flashinfer.forget()


@pytest.mark.parametrize("backend", ["fa3", pytest.param("fa2", marks=pytest.mark.exhaustive)])
def test_soft_caps_and_other_scales(backend: str, tmp_path: Path) -> None:
    """Prompts alone, longer than the windows of Gemma 2's odd layers."""
    model = make_model("gemma2", **SIZES)
    with pytest.MonkeyPatch.context() as patch:
        pair = Pair(model, ADAPTERS, tmp_path, patch, backend=backend, max_running=6)
        layers = pair.gpu.executor._decoder.spec.layers
        assert {layer.attention.window is None for layer in layers} == {False, True}
        assert all(layer.attention.softcap is not None for layer in layers)
        pair.graphs.clear()
        assert_same(prompts_alone(pair.gpu), prompts_alone(pair.reference))
        if (inside := pair.gpu.executor._token_graphs._attention) is not None:
            together = len(pair.graphs)
            patch.setattr(inside, "most_prompts", 1)  # others are computed as they come
            pair.graphs.clear()
            assert_same(prompts_alone(pair.gpu), prompts_alone(pair.reference))
            assert 0 < len(pair.graphs) < together
        pair.close()
    fake_flashinfer.forget()


def test_head_sizes_that_flashinfer_has_not(tmp_path: Path) -> None:
    model = make_model("qwen3", **{**SIZES, "head_dim": 24})
    with pytest.MonkeyPatch.context() as patch:
        pair = Pair(model, ADAPTERS, tmp_path, patch, backend="none", max_running=6)
        found = answer(pair.gpu, [0, -1, 0], SCORED, 4)
        assert_same(found, answer(pair.reference, [0, -1, 0], SCORED, 4))
        pair.close()
    fake_flashinfer.forget()
