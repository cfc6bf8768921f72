"""With `--batch-invariant` no bit of an answer depends on what is computed beside it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.server.config import ConfigError, EngineConfig
from loraplex.server.model.executor import TorchExecutor
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.start import require_invariance
from tests.server.model.adapter_zoo import few_of, zoo_of
from tests.server.model.driver import Driver, engine_config
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import make_model, save_model
from tests.server.model.invariance import (
    PROCESSED,
    RANDOM,
    Ask,
    Bits,
    ask_all,
    invariant_driver,
    resumed,
)
from tests.server.model.lora.dora_adapters import dora_adapters

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning",
    "ignore::UserWarning",
    "ignore:The following .*_pattern keys:RuntimeWarning",
)
# A family whose layers all attend to everything, and one with windows and soft caps.
FAMILIES = ("llama3", "gemma2")
# Options of `engine_config`, on each device.
DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {"max_running": 12},
    "cuda": {
        "device": "cuda",
        "dtype": "bfloat16",
        "page_size": 16,
        "kv_memory": 512 << 20,
        "adapter_memory": 64 << 20,
        "host_arena_bytes": 16 << 20,
        "max_step_tokens": 8192,
        "max_running": 272,
    },
}
TOKENS = 4


class Served(NamedTuple):
    """A driver, its slots, and how many requests are beside another at most."""

    driver: Driver
    slots: list[int]
    most_beside: int


ON_CPU = [pytest.param(("cpu", name), id=f"cpu-{name}") for name in FAMILIES]
ON_GPU = [
    pytest.param(("cuda", name), id=f"cuda-{name}", marks=pytest.mark.gpu) for name in FAMILIES
]


@pytest.fixture(scope="module", params=[*ON_CPU, *ON_GPU])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    device, name = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # who divide a library's sums, too
    variant = VARIANTS[name]
    configs = {**zoo_of(variant), **dora_adapters(variant)}
    folder = tmp_path_factory.mktemp(name)
    driver, slots = invariant_driver(folder, name, configs, **DEVICES[device])
    assert device == "cpu" or "one kernel of each kind" in driver.executor.summary[0]
    yield Served(driver, list(slots.values()), driver.config.max_running - 1)
    driver.close()
    torch.set_num_threads(threads)


def asks(slots: list[int]) -> st.SearchStrategy[Ask]:
    return st.builds(
        Ask,
        length=st.integers(1, 40),
        slot=st.sampled_from(slots),
        seed=st.integers(0, 1000),
        chunk=st.sampled_from((1, 3, 7, 16, 512)),
        sampling=st.sampled_from((RANDOM, PROCESSED)),
    )


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_alone_and_beside_others(served: Served, data: st.DataObject) -> None:
    """Neighbours, slices, and a resumption after a preemption."""
    own = data.draw(asks(served.slots))
    others = data.draw(st.lists(asks(served.slots), max_size=min(5, served.most_beside)))
    (alone,) = ask_all(served.driver, [own], TOKENS)
    place = data.draw(st.integers(0, len(others)))
    batch = [*others[:place], own._replace(chunk=data.draw(st.integers(1, 50))), *others[place:]]
    assert ask_all(served.driver, batch, TOKENS)[place] == alone
    kept = data.draw(st.integers(1, TOKENS - 1))
    sliced = own._replace(chunk=data.draw(st.integers(1, 50)))
    assert resumed(served.driver, sliced, alone, kept, others) == alone


@pytest.mark.parametrize("served", ON_GPU, indirect=True)
@pytest.mark.parametrize("beside", [1, 7, 63, 255])
@pytest.mark.parametrize("length", [1, 65, 230])
def test_among_many(served: Served, beside: int, length: int) -> None:
    """Decodes and prompts of many tiles, each with another adapter."""
    slots = served.slots
    for slot in slots[:: max(1, len(slots) // 4)]:
        own = Ask(length, slot, seed=length)
        (alone,) = ask_all(served.driver, [own], TOKENS)
        others = [
            Ask(1 + 37 * i % 90, slots[i % len(slots)], i, 1 + 13 * i % 64) for i in range(beside)
        ]
        for chunk in (512, 64, 17):
            found = ask_all(served.driver, [*others, own._replace(chunk=chunk)], TOKENS)[-1]
            assert_same_bits(found, alone)


def assert_same_bits(found: Bits, expected: Bits) -> None:
    """Says by how much they differ, and from which token on."""
    pairs = zip(found.prompt, expected.prompt, strict=True)
    differing = [(place, *both) for place, both in enumerate(pairs) if both[0] != both[1]]
    assert not differing, f"tokens of the prompt: {differing[:5]}"
    for number, (one, other) in enumerate(zip(found.logprobs, expected.logprobs, strict=True)):
        apart = max((abs(one[token] - other[token]) for token in other), default=0.0)
        assert not apart, f"token {number} of the answer: {apart}"
    assert found == expected


def test_without_the_option_bits_differ(tmp_path: Path) -> None:
    """Otherwise the tests above would show nothing."""
    from tests.server.model.invariance import SIZES

    model = make_model("llama3", **SIZES)
    driver = Driver(save_model(model, tmp_path), **DEVICES["cpu"])
    own = Ask(40)
    (alone,) = ask_all(driver, [own], TOKENS)
    beside = ask_all(driver, [own._replace(chunk=7), *[Ask(9, seed=i) for i in range(6)]], TOKENS)
    driver.close()
    assert beside[0].prompt != alone.prompt


def spec(name: str, **changes: Any) -> ModelSpec:
    from loraplex.server.model.families.registry import read_model

    return msgspec.structs.replace(read_model(make_model(name).config.to_dict()), **changes)


def config(**changes: Any) -> EngineConfig:
    return engine_config(Path("/nowhere"), batch_invariant=True, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama3", {"shards": 2}, "--tp 2"),
        ("llama3", {"max_draft": 3}, "--max-draft 3"),
        ("qwen3-next", {}, "states"),
        ("qwen3-moe", {"device": "cuda"}, "mixtures of experts"),
        ("deepseek-v3", {"device": "cuda"}, "latents.*; mixtures"),
    ],
)
def test_what_would_vary_is_refused(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"--batch-invariant: .*{words}"):
        require_invariance(spec(name), config(**changes))


def test_refused_at_start(tmp_path: Path) -> None:
    save_model(make_model("llama3"), tmp_path)
    with pytest.raises(ConfigError, match="--batch-invariant: --max-draft 2"):
        TorchExecutor(
            engine_config(tmp_path, batch_invariant=True, max_draft=2), memoryview(bytearray(8))
        )


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_a_cpu_serves_experts_and_latents(name: str, tmp_path: Path) -> None:
    configs = few_of(VARIANTS[name])
    driver, slots = invariant_driver(tmp_path, name, configs, **DEVICES["cpu"])
    own, *others = (Ask(20 + slot, slot, seed=slot, chunk=3) for slot in slots.values())
    (alone,) = ask_all(driver, [own], TOKENS)
    found = ask_all(driver, [*others, own._replace(chunk=7)], TOKENS)[-1]
    driver.close()
    assert found == alone
