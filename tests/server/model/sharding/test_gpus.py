"""A model that two GPUs share, in bfloat16, with adapters of parity's table."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.gpu_trio import (
    ADAPTER_STRENGTH,
    PROMPTS,
    SIZES,
    SLACK,
    STEPS,
    Trio,
    assert_near,
    forced,
    prompt,
)
from tests.server.model.hub_models import VOCAB, add_adapter, make_model
from tests.server.model.sharding.processes import GroupDriver, enough_gpus
from tests.server.model.slabs import pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not enough_gpus(2), reason="fewer than two CUDA devices"),
    pytest.mark.filterwarnings("ignore"),
]
# A row of parity's table -> what differs from it and from `gpu_trio.SIZES`.
MODELS: dict[str, dict[str, Any]] = {
    "llama3": {},
    "gemma3": {},
    "gpt-oss": {},
    "olmo3": {},
    "phi3": {"num_key_value_heads": 4},
    "qwen3-moe": {"moe_intermediate_size": 128},
}
# Behind the base's tables.
NEW = [VOCAB, VOCAB + 1, VOCAB + 2]


@pytest.mark.parametrize("name", MODELS)
def test_family(name: str, tmp_path: Path) -> None:
    """In its own process: only the first group of a process can share memory of GPUs."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(_check, name, tmp_path).result()


def test_new_ids(tmp_path: Path) -> None:
    """In whole tables and in trained rows; beside rows of the base and of plain adapters."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(_check_new_ids, tmp_path).result()


def _trio(name: str, folder: Path) -> Trio:
    def make_gpu(base: Path, **options: Any) -> GroupDriver:
        return GroupDriver(base, 2, folder / "meeting", **options)

    return Trio(name, MODELS[name], folder / "base", 24, make_gpu=make_gpu)


def _check(name: str, folder: Path) -> None:
    trio = _trio(name, folder)
    try:
        assert trio.gpu.devices()[0]._graphs is not None
        for chunk in (7, 64):
            assert_near(trio, [-1] * 24, chunk)
        # In graphs: no adapter touches the embedding or the head.
        assert_near(trio, trio.slots_of_layers, 64)
        assert_near(trio, [*trio.slots.values()], 11)
    finally:
        trio.close()


def _check_new_ids(folder: Path) -> None:
    trio = _trio("llama3", folder)
    first = max(trio.slots.values()) + 1
    rows = {"trainable_token_indices": {"embed_tokens": NEW, "lm_head": NEW}}
    try:
        for slot, options in ((first, {}), (first + 1, rows)):
            _load_larger(trio, slot, options)
        slots = [first, -1, first + 1, trio.slots["rank16"], first, -1]
        for chunk in (7, 64):
            exact, rough, gpu = (
                _logprobs(driver, slots, chunk, first)
                for driver in (trio.exact, trio.rough, trio.gpu)
            )
            error, found = ((each - exact).square().mean().sqrt() for each in (rough, gpu))
            assert found < SLACK * error + 1e-3
    finally:
        trio.close()


def _load_larger(trio: Trio, slot: int, options: dict[str, Any]) -> None:
    """With three ids more than the base has."""
    base, model = (make_model("llama3", **SIZES) for _ in range(2))
    model.resize_token_embeddings(VOCAB + len(NEW))
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **options)
    oracle, extents = add_adapter(model, "one", config, slot), 0
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if "lora_B" in name:
                parameter.mul_(ADAPTER_STRENGTH)
    for driver in (trio.exact, trio.rough, trio.gpu):
        of = driver.config
        forms: dict[str, Any] = {"dtype": of.dtype, "shards": of.shards, "resized_from": base}
        layout, slab = pack(oracle, "one", saves_tables=not options, **forms)
        assert driver.load(slot, layout, slab, trio.next_extent).error is None
        extents = max(extents, sum(layout.runs))
    trio.next_extent += extents


def _logprobs(driver: Driver, slots: list[int], chunk: int, first: int) -> torch.Tensor:
    """Of all ids that each row has, at every decoded place; contexts are the same for all drivers.
    first: the first slot with new ids, which are in contexts, too."""
    streams = []
    for row, slot in enumerate(slots):
        has_new = slot >= first
        begun = [NEW[row % len(NEW)]] if has_new else []
        stream = Stream(
            driver,
            row,
            [*begun, *prompt(PROMPTS[row % len(PROMPTS)], row)],
            slot=slot,
            sampling=forced(NEW[-1 - row % len(NEW)] if has_new else 3 + row),
        )
        streams.append(stream.with_ids(VOCAB + len(NEW) if has_new else None))
    generate(driver, streams, STEPS, chunk)
    found: list[float] = []
    for stream in streams:
        stream.free()
        size = VOCAB + len(NEW) if stream.slot >= first else VOCAB
        assert len(stream.logprobs) == STEPS
        for place in stream.logprobs:
            known = [value for token, value in sorted(place.top) if token < size]
            assert len(known) == size
            found += known
    return torch.tensor(found)
