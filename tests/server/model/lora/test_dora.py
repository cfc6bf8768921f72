"""DoRA is what PEFT computes: float32, logprobs within 1e-4."""

from collections.abc import Iterator

import pytest
import torch

from tests.grids import beyond
from tests.server.model.adapter_zoo import with_zoo
from tests.server.model.driver import Stream, generate, step
from tests.server.model.families.parity import (
    GREEDY,
    TOLERANCE,
    Served,
    assert_parity,
    prompt,
    round_adapters,
)
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import make_model, reference_logprobs
from tests.server.model.lora.dora_adapters import dora_adapters
from tests.server.model.slabs import pack

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]
# With biases and tied tables; one module of q, k and v; a scaled embedding, windows and caps; a
# product that is absorbed.
FAMILIES = beyond(2, ["llama-biases-tied", "phi3", "qwen2", "gemma3", "deepseek-v3"])


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("base")
    found = Served(request.param, folder, adapters=dora_adapters(VARIANTS[request.param]))
    yield found
    found.driver.close()


@pytest.mark.parametrize("chunk", beyond(2, [3, 64, 1]))
def test_beside_plain_ones_and_the_base(served: Served, chunk: int) -> None:
    served.assert_together((9, 2, 23, 14), 5, chunk)


def test_alone(served: Served) -> None:
    served.assert_alone()


def test_evicted_and_reloaded_elsewhere(served: Served) -> None:
    """Slots change hands between DoRA and plain, in other extents, while a neighbour runs."""
    driver, slots = served.driver, served.slots
    neighbour = Stream(driver, 0, prompt(12, 1), slot=slots["dora_few"], sampling=GREEDY)
    generate(driver, [neighbour], 2, 64)
    one, other, first = "dora", "plain", served.next_extent
    for adapter, slot in ((other, slots[one]), (one, slots[other])):
        layout, slab = served.slabs[adapter]
        driver.begin_load(slot, layout, slab, first)
        step(driver, [(neighbour, 1)])  # before what it brings is made
        assert driver.wait_for_copy().error is None
        first += sum(layout.runs)
    slots[one], slots[other] = slots[other], slots[one]
    streams = [
        Stream(driver, row, prompt(10, row), slot=slots[adapter], sampling=GREEDY)
        for row, adapter in ((1, one), (2, other), (3, None))
    ]
    generate(driver, [neighbour, *streams], 7, 5)
    names = ("dora_few", one, other, None)
    for name, stream in zip(names, (neighbour, *streams), strict=True):
        assert_parity(served.oracle, name, stream)
        stream.free()


def test_lengths_change_the_answer(served: Served) -> None:
    """Guards the tests above: what left them out would differ."""
    ids = prompt(12, 5)
    for adapter in [name for name in served.adapters if name != "plain"]:
        found = reference_logprobs(served.oracle, adapter, ids)
        lengths = {
            name: parameter.detach().clone()
            for name, parameter in served.oracle.named_parameters()
            if f"lora_magnitude_vector.{adapter}." in name
        }
        assert lengths
        with torch.no_grad():
            for name, length in lengths.items():
                factors = torch.linspace(0.5, 1.5, len(length))
                served.oracle.get_parameter(name).copy_(length * factors)
            changed = reference_logprobs(served.oracle, adapter, ids)
            for name, length in lengths.items():
                served.oracle.get_parameter(name).copy_(length)
        assert (found - changed).abs().max() > 100 * TOLERANCE


def test_stored_in_bfloat16(tmp_path_factory: pytest.TempPathFactory) -> None:
    """As PEFT with the stored values in float32."""
    folder, name = tmp_path_factory.mktemp("base"), "qwen2"
    found = Served(name, folder, torch.bfloat16, adapters=dora_adapters(VARIANTS[name]))
    stream = Stream(found.driver, 0, prompt(9, 1), slot=found.slots["dora"], sampling=GREEDY)
    generate(found.driver, [stream], 4, 5)
    assert_parity(found.oracle, "dora", stream)
    found.driver.close()


def test_lengths_stay_float32_in_a_slab_of_bfloat16() -> None:
    model = with_zoo(make_model("qwen2"), dora_adapters(VARIANTS["qwen2"]))
    layout, slab = pack(model, "dora", dtype="bfloat16")
    for site in layout.sites:
        assert site.vectors
    site = next(site for site in layout.sites if site.role == "o")
    stored = slab[site.vectors_offset : site.vectors_offset + 4 * 64]
    modules = dict(model.named_modules())
    module = modules[f"base_model.model.model.layers.{site.layer}.self_attn.o_proj"]
    expected = module.lora_magnitude_vector["dora"].weight.detach().clone()
    assert torch.equal(torch.frombuffer(bytearray(stored), dtype=torch.float32), expected)
    round_adapters(model, torch.bfloat16)
    assert not torch.equal(module.lora_magnitude_vector["dora"].weight.detach(), expected)
