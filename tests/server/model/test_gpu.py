"""The GPU path in bfloat16 is as near to the float32 reference as bfloat16 allows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from loraplex.server.engine.executor import CopyUsable
from loraplex.server.model.lora.lora import OutputVectors
from loraplex.server.protocol import SamplingParams
from tests.kernels.batches import on_gpu
from tests.server.model.adapter_zoo import ZOO
from tests.server.model.driver import Driver
from tests.server.model.gpu_trio import SIZES, Trio, answer, assert_near, logprobs
from tests.server.model.hub_models import add_adapter, make_model, save_model
from tests.server.model.slabs import pack

pytestmark = [*on_gpu, pytest.mark.filterwarnings("ignore")]

# family -> what differs from SIZES
MODELS: dict[str, dict[str, Any]] = {
    "llama3": {},
    "llama-biases-tied": {"num_key_value_heads": 1},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
}
# Of the GPU's clock: a few tenths of a second.
HELD_UP_CYCLES = 500_000_000


@pytest.fixture(scope="module", params=MODELS)
def trio(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trio]:
    found = Trio(request.param, MODELS[request.param], tmp_path_factory.mktemp("base"))
    yield found
    found.close()


@pytest.mark.parametrize("chunk", [7, 64])
def test_base(trio: Trio, chunk: int) -> None:
    assert_near(trio, [-1] * 7, chunk)


@pytest.mark.parametrize("batch", [1, 3, 40, 70])
def test_adapters_of_layers(trio: Trio, batch: int) -> None:
    """These run in graphs: no adapter touches the embedding or the head."""
    of_layers = trio.slots_of_layers
    slots = [of_layers[(1 + i) % len(of_layers)] for i in range(batch)]
    assert_near(trio, slots, 64)


def test_every_adapter_in_one_batch(trio: Trio) -> None:
    assert_near(trio, [*trio.slots.values(), *trio.slots.values()], 11)


def test_greedy_in_the_graph_and_after_it_agree(trio: Trio) -> None:
    slots = [trio.slots["rank24_patterns"], -1, trio.slots["rank1"], -1, trio.slots["rank1"]]
    plain = SamplingParams(temperature=0.0)
    scored = SamplingParams(temperature=0.0, logprobs=0)
    first = [s.output for s in answer(trio.gpu, slots, 64, plain)]
    assert first == [s.output for s in answer(trio.gpu, slots, 64, scored)]
    assert first == [s.output for s in answer(trio.gpu, slots, 64, plain)]
    assert len({tuple(output) for output in first}) > 1


def test_what_other_extents_hold_does_not_matter(trio: Trio) -> None:
    slots = [trio.slots["rank3_rslora"], trio.slots["rank24_patterns"], -1]
    plain = SamplingParams(temperature=0.0)
    expected = [s.output for s in answer(trio.gpu, slots, 64, plain)]
    free = trio.next_extent * trio.gpu.config.extent_bytes
    trio.gpu.executor._table.arena[free:].view(torch.bfloat16).fill_(float("nan"))
    assert [s.output for s in answer(trio.gpu, slots, 64, plain)] == expected


def test_random_rows_beside_greedy_ones(trio: Trio) -> None:
    hot = SamplingParams(temperature=0.8, top_k=20, top_p=0.9)
    one = [s.output for s in answer(trio.gpu, [-1] * 5, 64, hot)]
    assert one == [s.output for s in answer(trio.gpu, [-1] * 5, 64, hot)]
    assert len({tuple(output) for output in one}) > 1


def test_an_adapter_is_used_before_its_copy_is_over(trio: Trio) -> None:
    """Its bytes are held up; the steps, launched at once, wait for them on the device."""
    gpu, slot = trio.gpu, max(trio.slots.values()) + 1
    copies = gpu.executor._copies
    start = trio.next_extent * gpu.config.extent_bytes
    with torch.inference_mode():
        gpu.executor._table.arena[start:].zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(copies._stream):
        torch.cuda._sleep(HELD_UP_CYCLES)  # type: ignore[no-untyped-call]
    gpu.begin_load(slot, *trio.slabs["rank24_patterns"], trio.next_extent)
    assert isinstance(gpu.wait_for_news()[0], CopyUsable)
    early = logprobs(answer(gpu, [slot, -1], 64))
    assert gpu.wait_for_copy().error is None
    late = logprobs(answer(gpu, [slot, -1], 64))
    base = logprobs(answer(gpu, [-1, -1], 64))
    assert (early - late).abs().max() < (early - base).abs().max() / 100


def test_a_finished_adapter_comes_back_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded again elsewhere, it is the same bytes; nothing is made of the base."""
    model = make_model("llama3", **SIZES)
    save_model(model, tmp_path)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True)
    layout, data = pack(add_adapter(model, "dora", config, 1), "dora", dtype="bfloat16")
    sizes: dict[str, Any] = {"page_size": 16, "kv_memory": 64 << 20, "max_running": 8}
    gpu = Driver(tmp_path, dtype="bfloat16", device="cuda", **sizes)
    assert gpu.load(0, layout, data, 0).is_finished
    finished, block = gpu.finished[data]
    assert block != data
    first = answer(gpu, [0, -1], 64)
    monkeypatch.setattr(OutputVectors, "pieces", None)
    over = gpu.load(1, finished, block, sum(layout.runs))
    assert (over.error, over.is_finished) == (None, False)
    arena, size = gpu.executor._table.arena, layout.shard_nbytes
    assert torch.equal(arena[:size], arena[size : 2 * size])
    assert torch.equal(logprobs(first), logprobs(answer(gpu, [1, -1], 64)))
    gpu.close()


def test_hundreds_of_decodes(tmp_path: Path) -> None:
    """In one graph, beyond what one program routes; short chunks, since a step takes 2,048 tokens.

    Sequences of one token of prompt still run when the longest prompts are in.
    """
    found = Trio("llama3", {}, tmp_path, 530)
    names = ["rank1", "rank3_rslora", "rank24_patterns", None]
    try:
        assert_near(found, [found.slots[names[row % 4]] for row in range(530)], 3)
    finally:
        found.close()


def test_steps_of_many_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no graph takes, here from 33 on: what takes up a product expands it; with ranks of
    eights the activation shrinks, too."""
    from loraplex.server.model.ops import sizes
    from loraplex.server.model.ops.cuda import lora_strategy

    monkeypatch.setattr(lora_strategy, "FEW_TOKENS", 32)
    monkeypatch.setattr(lora_strategy, "MIXED_TOKENS", 32)
    monkeypatch.setattr(sizes, "_MOST_TOKENS", 32)
    monkeypatch.setattr(sizes, "_MOST_WORK", 0)
    found = Trio("llama3", {}, tmp_path, 24)
    try:
        for names in (["rank16", "rank8_one_layer", None], [*ZOO, None]):
            assert_near(found, [found.slots[names[row % len(names)]] for row in range(20)], 64)
    finally:
        found.close()


@pytest.mark.parametrize("mixed", [32, 2048])
def test_graphs_of_many_tokens(tmp_path: Path, mixed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models with small layers: what graphs take, here from 33 on, goes through the kernels for
    many tokens; or through those for steps where prompts and decodes are mixed."""
    from loraplex.server.model.ops.cuda import lora_strategy

    monkeypatch.setattr(lora_strategy, "FEW_TOKENS", 32)
    monkeypatch.setattr(lora_strategy, "MIXED_TOKENS", mixed)
    found = Trio("llama3", {}, tmp_path, 24)
    try:
        for names in (["rank16", "rank8_one_layer", None], ["rank1", "rank3_rslora", None]):
            assert_near(found, [found.slots[names[row % len(names)]] for row in range(20)], 64)
    finally:
        found.close()


def test_attention_between_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts, where no graph can launch it: other GPUs than Hopper's."""
    from loraplex.server.model.ops.attention import attention_cuda

    monkeypatch.setattr(attention_cuda, "prompt_backend", lambda capability: "fa2")
    found = Trio("llama3", {}, tmp_path, 24)
    try:
        names = ["rank16", "rank3_rslora", None]
        assert_near(found, [found.slots[names[row % 3]] for row in range(20)], 64)
    finally:
        found.close()
