"""Norms that adapters bring are PEFT's: float32, logprobs within 1e-4."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.grids import beyond
from tests.server.model.driver import Driver, Stream, generate, step
from tests.server.model.families.parity import GREEDY, TOLERANCE, assert_parity, prompt
from tests.server.model.hub_models import make_model, reference_logprobs, save_model
from tests.server.model.lora.norm_adapters import OTHERS, WithNorms, saved_norms, with_norms

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
# Tied tables and biases; norms of q and k; weights less one, and all norms that there are.
FAMILIES = ["llama-biases-tied", "qwen3", "gemma3"]


class Norms(NamedTuple):
    name: str
    driver: Driver
    adapters: dict[str, WithNorms]


@pytest.fixture(scope="module", params=FAMILIES)
def norms(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Norms]:
    name = request.param
    options = saved_norms(name)
    adapters = {each: with_norms(name, 3 + i, options[each]) for i, each in enumerate(options)}
    driver = Driver(save_model(make_model(name), tmp_path_factory.mktemp("base")))
    yield Norms(name, driver, adapters)
    driver.close()


@pytest.mark.parametrize(("chunk", "shift"), [(64, 0), (3, 5), (1, 2)])
def test_in_one_batch_and_after_a_reload(norms: Norms, chunk: int, shift: int) -> None:
    """With plain ones, DoRA and the base; slots and extents change hands."""
    slots = norms.driver.load_all(norms.adapters, shift, first=7 * shift)
    streams = [
        Stream(norms.driver, row, prompt((9, 2, 14)[row % 3], row), slot=slot, sampling=GREEDY)
        for row, slot in enumerate([*slots.values(), *slots.values()])
    ]
    generate(norms.driver, streams, 5, chunk)
    for name, stream in zip([*slots, *slots], streams, strict=True):
        oracle = norms.adapters[name or "plain"].oracle
        assert_parity(oracle, None if name is None else "one", stream)
        stream.free()


def test_alone(norms: Norms) -> None:
    slots = norms.driver.load_all(norms.adapters, 0, first=0)
    for name, adapter in norms.adapters.items():
        stream = Stream(norms.driver, 0, prompt(11, 2), slot=slots[name], sampling=GREEDY)
        generate(norms.driver, [stream], 4, 4)
        assert_parity(adapter.oracle, "one", stream)
        stream.free()


def test_a_slot_that_loses_its_norms(norms: Norms) -> None:
    """While a neighbour with norms runs."""
    driver, adapters = norms.driver, norms.adapters
    slots = driver.load_all(adapters, 0, first=0)
    neighbour = Stream(driver, 0, prompt(12, 1), slot=slots["end"], sampling=GREEDY)
    generate(driver, [neighbour], 2, 64)
    plain = adapters["plain"]
    driver.begin_load(slots["every"], plain.layout, plain.slab, 1000)
    step(driver, [(neighbour, 1)])
    assert driver.wait_for_copy().error is None
    stream = Stream(driver, 1, prompt(9, 3), slot=slots["every"], sampling=GREEDY)
    generate(driver, [neighbour, stream], 6, 5)
    for name, each in (("end", neighbour), ("plain", stream)):
        assert_parity(adapters[name].oracle, "one", each)
        each.free()


def test_own_norms_change_the_answer(norms: Norms) -> None:
    """Guards the tests above."""
    ids = prompt(12, 5)
    for name, adapter in norms.adapters.items():
        oracle = adapter.oracle
        of_norms = {
            each: parameter
            for each, parameter in oracle.named_parameters()
            if ".modules_to_save." in each and "norm" in each
        }
        assert bool(of_norms) is (name not in ("plain", "dora"))
        found = reference_logprobs(oracle, "one", ids)
        for parameter in of_norms.values():
            before = parameter.detach().clone()
            with torch.no_grad():
                parameter.mul_(torch.linspace(0.5, 1.5, len(parameter)))
            changed = reference_logprobs(oracle, "one", ids)
            with torch.no_grad():
                parameter.copy_(before)
            assert (found - changed).abs().max() > 100 * TOLERANCE


def test_plain_steps_norm_nothing_again(norms: Norms, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each norm is computed once, for plain adapters beside the base, and DoRA."""
    driver, counts = norms.driver, list[int]()
    slots = driver.load_all(norms.adapters, 0, first=0)
    ops = driver.executor._decoder.ops
    norm = type(ops).norm

    def counted(self: object, *arguments: object) -> object:
        counts.append(1)
        return norm(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(ops), "norm", counted)
    used = []
    for slot in (-1, slots["plain"], slots["dora"], slots["end"], slots["every"]):
        counts.clear()
        stream = Stream(driver, 0, prompt(7, 2), slot=slot, sampling=GREEDY)
        generate(driver, [stream], 1, 64)
        stream.free()
        used.append(len(counts))
    base, plain, dora, end, every = used
    assert base == plain == dora
    assert end > base
    assert every > end + 2 * len(driver.executor._decoder.weights.layers) - 1


@pytest.mark.parametrize("family", beyond(3, ["falcon-new", "opt-narrow", "bloom", *OTHERS]))
def test_layer_norms_in_one_batch(family: str, tmp_path: Path) -> None:
    """Weights and biases: of norms before steps and of residual sums, an MLP's own, and that of the
    embedding."""
    options = saved_norms(family)
    adapters = {each: with_norms(family, 3 + i, options[each]) for i, each in enumerate(options)}
    driver = Driver(save_model(make_model(family), tmp_path))
    slots = driver.load_all(adapters, 1, first=3)
    streams = {
        each: Stream(driver, row, prompt((9, 2, 14)[row % 3], row), slot=slot, sampling=GREEDY)
        for row, (each, slot) in enumerate(slots.items())
    }
    generate(driver, [*streams.values()], 5, 5)
    for name, stream in streams.items():
        oracle = adapters[name or "plain"].oracle
        assert_parity(oracle, None if name is None else "one", stream)
    driver.close()


@pytest.mark.parametrize(
    ("family", "norm"), [("lfm2", "embedding_norm"), ("bamba", "final_layernorm")]
)
def test_the_last_norm_by_its_own_name(family: str, norm: str, tmp_path: Path) -> None:
    adapter = with_norms(family, 3, {"modules_to_save": [norm]})
    driver = Driver(save_model(make_model(family), tmp_path))
    slots = driver.load_all({"end": adapter}, 0, first=0)
    stream = Stream(driver, 0, prompt(11, 2), slot=slots["end"], sampling=GREEDY)
    generate(driver, [stream], 4, 4)
    assert_parity(adapter.oracle, "one", stream)
    driver.close()
