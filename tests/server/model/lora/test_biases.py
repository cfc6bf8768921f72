"""Biases that adapters bring are PEFT's: float32, logprobs within 1e-4."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from peft import LoraConfig

from loraplex.adapters.errors import AdapterError
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.parity import GREEDY, TOLERANCE, assert_parity, prompt
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import make_model, reference_logprobs, save_model
from tests.server.model.lora.biased_adapters import Biased, biased, biased_configs

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    # PEFT warns where a base without biases gets one of B.
    pytest.mark.filterwarnings("ignore:`lora_bias=True`"),
]
# Biases everywhere and tied tables; biases of q, k and v; none at all.
FAMILIES = ["llama-biases-tied", "qwen2", "gemma3"]


class Fleet(NamedTuple):
    driver: Driver
    adapters: dict[str, Biased]


@pytest.fixture(scope="module", params=FAMILIES)
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    name = request.param
    configs = biased_configs(VARIANTS[name])
    adapters = {each: biased(name, 3 + i, configs[each]) for i, each in enumerate(configs)}
    driver = Driver(save_model(make_model(name), tmp_path_factory.mktemp("base")))
    yield Fleet(driver, adapters)
    driver.close()


@pytest.mark.parametrize(("chunk", "shift"), [(64, 0), (3, 2)])
def test_in_one_batch_and_after_a_reload(fleet: Fleet, chunk: int, shift: int) -> None:
    slots = fleet.driver.load_all(fleet.adapters, shift, first=5 * shift)
    streams = [
        Stream(fleet.driver, row, prompt((9, 2, 14)[row % 3], row), slot=slot, sampling=GREEDY)
        for row, slot in enumerate(slots.values())
    ]
    generate(fleet.driver, streams, 5, chunk)
    for name, stream in zip(slots, streams, strict=True):
        if name is not None:
            assert_parity(fleet.adapters[name].oracle, "one", stream)
        stream.free()
    base = fleet.adapters["plain"].oracle  # its biases are the base's
    assert_parity(base, None, streams[0])


def test_alone(fleet: Fleet) -> None:
    slots = fleet.driver.load_all(fleet.adapters, 0, first=0)
    for name, adapter in fleet.adapters.items():
        stream = Stream(fleet.driver, 0, prompt(11, 2), slot=slots[name], sampling=GREEDY)
        generate(fleet.driver, [stream], 4, 4)
        assert_parity(adapter.oracle, "one", stream)
        stream.free()


def test_biases_change_the_answer(fleet: Fleet) -> None:
    """Guards the tests above, where the base has biases."""
    ids = prompt(12, 5)
    for name, adapter in fleet.adapters.items():
        oracle = adapter.oracle
        biases = {
            each: parameter.detach().clone()
            for each, parameter in oracle.named_parameters()
            if each.endswith(".bias") and parameter.requires_grad
        }
        if not biases:
            assert name in ("plain", "of_targets", "of_all", "dora")
            continue
        found = reference_logprobs(oracle, "one", ids)
        with torch.no_grad():
            for each in biases:
                oracle.get_parameter(each).zero_()
            changed = reference_logprobs(oracle, "one", ids)
            for each, bias in biases.items():
                oracle.get_parameter(each).copy_(bias)
        assert (found - changed).abs().max() > 100 * TOLERANCE


def test_a_factor_that_lies_behind_a_product_leaves_no_bias_out() -> None:
    """Falcon-H1 multiplies what attention and Mamba read; here what they give has that factor."""
    config = LoraConfig(r=2, target_modules=["q_proj", "in_proj"], lora_bias=True)
    with pytest.raises(AdapterError, match="inputs have a factor"):
        biased("falcon-h1", 3, config)
    config.target_modules = {"up_proj"}
    assert biased("falcon-h1", 3, config).layout.sites
