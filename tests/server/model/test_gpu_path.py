"""The GPU path's steps, plans, columns and kernels, run on the CPU and compared with the reference.

Triton interprets, FlashInfer is a stand-in, and graphs run their step again.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from server.model import executor as executor_module
from server.model.decode_batch import DecodeBatch
from server.protocol import SamplingParams
from tests.server.model import fake_flashinfer
from tests.server.model.driver import EVERY_LOGPROB, Driver, Stream, generate
from tests.server.model.hub_models import VOCAB, add_adapter, make_model, save_model
from tests.server.model.slabs import pack

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="kernels need Triton's interpreter"
    ),
]
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
LAYERS = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
EVERYWHERE = LoraConfig(r=8, lora_alpha=8, target_modules=["gate_proj", "embed_tokens", "lm_head"])
PLAIN = SamplingParams(temperature=0.0)
SCORED = SamplingParams(temperature=0.0, logprobs=EVERY_LOGPROB, prompt_logprobs=1)


class Pair:
    """The same model and adapters, by the reference and by the GPU path."""

    def __init__(self, name: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
        model = make_model(name, **SIZES)
        save_model(model, folder)
        oracle = add_adapter(model, "layers", LAYERS, 1)
        oracle = add_adapter(oracle, "everywhere", EVERYWHERE, 2)
        slabs = [pack(oracle, adapter) for adapter in ("layers", "everywhere")]
        self.reference = Driver(folder, max_running=6)
        fake_flashinfer.install(patch)
        self.graphs = _replace_graphs(patch)
        self.gpu = Driver(folder, max_running=6)
        for driver in (self.reference, self.gpu):
            first = 0
            for slot, (layout, slab) in enumerate(slabs):
                assert driver.load(slot, layout, slab, first).error is None
                first += sum(layout.runs)

    def close(self) -> None:
        self.reference.close()
        self.gpu.close()


class _Replays:
    """A step's pieces, run again; the result is where the latest run left it."""

    def __init__(self, states: Any, pieces: list[Callable[[], None]]) -> None:
        self._states = states
        self.graphs = [fake_flashinfer.Replay(piece) for piece in pieces]

    @property
    def normed(self) -> torch.Tensor:
        found: torch.Tensor = self._states.normed
        return found


def _replace_graphs(patch: pytest.MonkeyPatch) -> list[int]:
    """Build the GPU path, and note the batch of every step that a graph took; of steps with
    prompts, less the number of their tokens."""
    from server.model import decode_graphs, gpu_path, products, token_graphs

    taken: list[int] = []

    def capture_tokens(self: token_graphs.TokenGraphs, with_adapters: bool) -> None:
        for size in self.sizes:
            lora = None
            if with_adapters:
                lora = self._ops.captured_lora(self._slots[:size], decodes=False)
            replays: Any = _Replays(*self._pieces(size, lora))
            self._captured[size, with_adapters] = replays

    forward = token_graphs.TokenGraphs.forward

    def noted_tokens(
        self: token_graphs.TokenGraphs, token_ids: torch.Tensor, plan: Any, slots: Any
    ) -> torch.Tensor:
        taken.append(-len(token_ids))
        return forward(self, token_ids, plan, slots)

    patch.setattr(token_graphs.TokenGraphs, "capture", capture_tokens)
    patch.setattr(token_graphs.TokenGraphs, "forward", noted_tokens)

    def capture(self: decode_graphs.DecodeGraphs, with_adapters: bool) -> None:
        for size in self.sizes:
            step: Any = fake_flashinfer.Replay(self._step(size, with_adapters))
            self._graphs[size, with_adapters] = step

    launch = decode_graphs.DecodeGraphs.launch

    def noted(self: decode_graphs.DecodeGraphs, batch: DecodeBatch) -> decode_graphs.GraphStep:
        taken.append(len(batch))
        return launch(self, batch)

    patch.setattr(decode_graphs.DecodeGraphs, "capture", capture)
    patch.setattr(decode_graphs.DecodeGraphs, "launch", noted)
    patch.setattr(gpu_path, "_WARM_TOKENS", ())
    patch.setattr(products, "_time", lambda *_: 1.0)
    patch.setattr(executor_module, "build", gpu_path._build_fast)
    return taken


@pytest.fixture(scope="module", params=["llama-biases-tied", "qwen3"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        found = Pair(request.param, tmp_path_factory.mktemp("base"), patch)
        yield found
        found.close()
    fake_flashinfer.forget()


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def answer(
    driver: Driver, slots: list[int], sampling: SamplingParams | list[SamplingParams], chunk: int
) -> list[Stream]:
    """sampling: of all, or of each."""
    each = sampling if isinstance(sampling, list) else [sampling] * len(slots)
    streams = [
        Stream(driver, row, prompt(2 + 3 * row, row), slot=slot, sampling=params, seed=row)
        for row, (slot, params) in enumerate(zip(slots, each, strict=True))
    ]
    generate(driver, streams, 5, chunk)
    for stream in streams:
        stream.free()
    return streams


@pytest.mark.parametrize("slots", [[-1, -1, -1], [0, -1, 0], [1, 0, -1]])
def test_same_as_the_reference(pair: Pair, slots: list[int]) -> None:
    """Chunks, mixed steps and decodes; an adapter of the head runs outside graphs."""
    pair.graphs.clear()
    streams = answer(pair.gpu, slots, SCORED, 4)
    expected = answer(pair.reference, slots, SCORED, 4)
    for ours, theirs in zip(streams, expected, strict=True):
        assert ours.output == theirs.output
        places = [*zip(ours.logprobs, theirs.logprobs, strict=True)]
        places += zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True)
        for found, wanted in places:
            assert found.token_id == wanted.token_id
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-3)
    assert (len(slots) in pair.graphs) == (1 not in slots)
    assert any(taken < -len(slots) for taken in pair.graphs) == (1 not in slots)


@pytest.mark.parametrize("slots", [[-1, -1], [0, 0, -1, 0, -1]])
def test_greedy_ids_stay_in_the_graph(pair: Pair, slots: list[int]) -> None:
    pair.graphs.clear()
    outputs = [s.output for s in answer(pair.gpu, slots, PLAIN, 64)]
    assert pair.graphs[1:] == [len(slots)] * 4
    assert pair.graphs[0] == -sum(2 + 3 * row for row in range(len(slots)))
    assert outputs == [s.output for s in answer(pair.reference, slots, PLAIN, 64)]


RANDOM = [
    SamplingParams(temperature=0.7, top_k=30, repetition_penalty=1.2),
    SamplingParams(top_p=0.9, logprobs=2),
    SamplingParams(temperature=1.5, typical_p=0.8),
    SamplingParams(min_p=0.1, logit_bias={5: 3.0}, logprobs=0),
    SamplingParams(temperature=0.0, presence_penalty=0.5),
    SamplingParams(),
]


@pytest.mark.parametrize("each", [RANDOM, [RANDOM[5], RANDOM[1]], RANDOM[:1], RANDOM[2:3]])
def test_random_rows_draw_what_the_reference_draws(pair: Pair, each: list[SamplingParams]) -> None:
    """In steps of decodes alone behind the graph, and in steps with prompts."""
    slots = [(0, -1)[row % 2] for row in range(len(each))]
    for chunk in (4, 64):
        found = answer(pair.gpu, slots, each, chunk)
        expected = answer(pair.reference, slots, each, chunk)
        assert [s.output for s in found] == [s.output for s in expected]
        for ours, theirs in zip(found, expected, strict=True):
            scored = zip(ours.logprobs, theirs.logprobs, strict=True)
            assert all(a.token_id == b.token_id for a, b in scored)
