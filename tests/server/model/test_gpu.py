"""The GPU path in bfloat16 is as near to the float32 reference as bfloat16 allows.

Its error is compared with that of the reference ops in bfloat16, which are known to be right.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.manifest import SlabLayout
from server.engine.executor import CopyUsable
from server.protocol import SamplingParams
from tests.server.model.adapter_zoo import ZOO, with_zoo
from tests.server.model.driver import EVERY_LOGPROB, Driver, Stream, generate
from tests.server.model.hub_models import VOCAB, make_model, save_model
from tests.server.model.slabs import pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "initializer_range": 0.06}
# family -> what differs from SIZES
MODELS: dict[str, dict[str, Any]] = {
    "llama3": {},
    "llama-biases-tied": {"num_key_value_heads": 1},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
}
PROMPTS = (1, 5, 16, 17, 33, 47)
STEPS = 20
# How much farther from float32 than the reference ops in bfloat16, in root mean square.
SLACK = 1.5
# Stronger ones make a random model chaotic: then rounding alone changes everything.
ADAPTER_STRENGTH = 0.1
# Of the GPU's clock: a few tenths of a second.
HELD_UP_CYCLES = 500_000_000


def forced(token: int) -> SamplingParams:
    """Always the same token, so that all runs see the same contexts; logprobs are the raw ones."""
    return SamplingParams(
        temperature=0.0,
        logit_bias={token: 1e4},
        logprobs=EVERY_LOGPROB,
        prompt_logprobs=0,
    )


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


class Trio:
    """The same model and adapters in float32 and bfloat16 on the CPU, and on the GPU."""

    def __init__(self, name: str, folder: Path, max_running: int = 72) -> None:
        base = make_model(name, **{**SIZES, **MODELS[name]})
        save_model(base, folder)
        oracle = with_zoo(base)
        with torch.no_grad():
            for parameter_name, parameter in oracle.named_parameters():
                if "lora_B" in parameter_name or "lora_embedding_B" in parameter_name:
                    parameter.mul_(ADAPTER_STRENGTH)
        common: dict[str, Any] = {
            "page_size": 16,
            "kv_memory": max_running << 20,
            "adapter_memory": 64 << 20,
        }
        common |= {"host_arena_bytes": 16 << 20, "extent_bytes": 4096, "max_step_tokens": 2048}
        common |= {"max_running": max_running}
        self.exact = Driver(folder, **common)
        self.rough = Driver(folder, dtype="bfloat16", **common)
        self.gpu = Driver(folder, dtype="bfloat16", device="cuda", **common)
        self.slots: dict[str | None, int] = {None: -1}
        self.slabs: dict[str, tuple[SlabLayout, bytes]] = {}  # the GPU's
        self.next_extent = 0
        for slot, adapter in enumerate(ZOO):
            extents = 0
            for driver in (self.exact, self.rough, self.gpu):
                layout, slab = pack(oracle, adapter, dtype=driver.config.dtype)
                assert driver.load(slot, layout, slab, self.next_extent).error is None
                extents = max(extents, sum(layout.runs))
            self.slots[adapter] = slot
            self.slabs[adapter] = layout, slab
            self.next_extent += extents

    def close(self) -> None:
        for driver in (self.exact, self.rough, self.gpu):
            driver.close()


@pytest.fixture(scope="module", params=MODELS)
def trio(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trio]:
    found = Trio(request.param, tmp_path_factory.mktemp("base"))
    yield found
    found.close()


def answer(
    driver: Driver, slots: list[int], chunk: int, sampling: SamplingParams | None = None
) -> list[Stream]:
    streams = [
        Stream(
            driver,
            row,
            prompt(PROMPTS[row % len(PROMPTS)], row),
            slot=slot,
            sampling=sampling or forced(3 + row % 90),
        )
        for row, slot in enumerate(slots)
    ]
    generate(driver, streams, STEPS, chunk)
    for stream in streams:
        stream.free()
    return streams


def logprobs(streams: list[Stream]) -> torch.Tensor:
    """Of the prompts' tokens, and of the whole vocabulary at every decoded place."""
    values: list[float] = []
    for stream in streams:
        values += [found.logprob or 0.0 for found in stream.prompt_logprobs]
        for found in stream.logprobs:
            values += [value for _, value in sorted(found.top)]
    return torch.tensor(values)


def assert_near(trio: Trio, slots: list[int], chunk: int) -> None:
    exact, rough, gpu = (
        logprobs(answer(driver, slots, chunk)) for driver in (trio.exact, trio.rough, trio.gpu)
    )
    error = _rms(rough, exact)
    assert torch.isfinite(gpu).all()
    assert _rms(gpu, exact) < SLACK * error + 1e-3
    if max(slots) >= 0:  # rounding is not what tells an adapter from none
        base = logprobs(answer(trio.exact, [-1] * len(slots), chunk))
        assert error < 0.6 * _rms(base, exact)


def _rms(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).square().mean().sqrt())


@pytest.mark.parametrize("chunk", [7, 64])
def test_base(trio: Trio, chunk: int) -> None:
    assert_near(trio, [-1] * 7, chunk)


@pytest.mark.parametrize("batch", [1, 3, 40, 70])
def test_adapters_of_layers(trio: Trio, batch: int) -> None:
    """These run in graphs: no adapter touches the embedding or the head."""
    names = [n for n in trio.slots if n not in ("rank64_everything", "embed_only", "head_only")]
    slots = [trio.slots[names[(1 + i) % len(names)]] for i in range(batch)]
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


def test_hundreds_of_decodes(tmp_path: Path) -> None:
    """In one graph, beyond what one program routes; short chunks, since a step takes 2,048 tokens.

    Sequences of one token of prompt still run when the longest prompts are in.
    """
    found = Trio("llama3", tmp_path, 530)
    names = ["rank1", "rank3_rslora", "rank24_patterns", None]
    try:
        assert_near(found, [found.slots[names[row % 4]] for row in range(530)], 3)
    finally:
        found.close()


def test_steps_of_many_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no graph takes, here from 33 on: what takes up a product expands it; with ranks of
    eights the activation shrinks, too."""
    from server.model.ops import lora_strategy, sizes

    monkeypatch.setattr(lora_strategy, "FEW_TOKENS", 32)
    monkeypatch.setattr(lora_strategy, "MIXED_TOKENS", 32)
    monkeypatch.setattr(sizes, "_MOST_TOKENS", 32)
    monkeypatch.setattr(sizes, "_MOST_WORK", 0)
    found = Trio("llama3", tmp_path, 24)
    try:
        for names in (["rank16", "rank8_one_layer", None], [*ZOO, None]):
            assert_near(found, [found.slots[names[row % len(names)]] for row in range(20)], 64)
    finally:
        found.close()


@pytest.mark.parametrize("mixed", [32, 2048])
def test_graphs_of_many_tokens(tmp_path: Path, mixed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models with small layers: what graphs take, here from 33 on, goes through the kernels for
    many tokens; or through those for steps where prompts and decodes are mixed."""
    from server.model.ops import lora_strategy

    monkeypatch.setattr(lora_strategy, "FEW_TOKENS", 32)
    monkeypatch.setattr(lora_strategy, "MIXED_TOKENS", mixed)
    found = Trio("llama3", tmp_path, 24)
    try:
        for names in (["rank16", "rank8_one_layer", None], ["rank1", "rank3_rslora", None]):
            assert_near(found, [found.slots[names[row % len(names)]] for row in range(20)], 64)
    finally:
        found.close()


def test_attention_between_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts, where no graph can launch it: other GPUs than Hopper's."""
    from server.model.ops import attention_cuda

    monkeypatch.setattr(attention_cuda, "prompt_backend", lambda capability: "fa2")
    found = Trio("llama3", tmp_path, 24)
    try:
        names = ["rank16", "rank3_rslora", None]
        assert_near(found, [found.slots[names[row % 3]] for row in range(20)], 64)
    finally:
        found.close()
