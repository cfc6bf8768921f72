"""DoRA and biases in a model that devices share: as PEFT, and as one device."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.grids import MARK, beyond
from tests.server.model.adapter_zoo import with_zoo
from tests.server.model.driver import Driver, Stream, generate, step
from tests.server.model.families.parity import GREEDY, Served, assert_parity, prompt
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import make_model, save_model
from tests.server.model.lora.biased_adapters import Biased, biased, biased_configs
from tests.server.model.lora.dora_adapters import dora_adapters
from tests.server.model.sharding import near
from tests.server.model.sharding.lockstep import ShardedDriver

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
    # PEFT warns where a base without biases gets one of B.
    pytest.mark.filterwarnings("ignore:`lora_bias=True`"),
]
# Biases and tied tables; q, k and v in one; a scaled embedding; fewer KV heads than devices.
FAMILIES = [
    *[("llama-biases-tied", 2), ("phi3", 2)],
    *(
        pytest.param(row, marks=MARK)
        for row in [("gemma3", 2), ("llama-biases-tied", 4), ("qwen2", 4), ("deepseek-v3", 2)]
    ),
]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda row: f"{row[0]}-{row[1]}")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    name, shards = request.param
    found = Served(
        name,
        tmp_path_factory.mktemp("base"),
        None,
        partial(ShardedDriver, shards=shards),
        shards,
        adapters=dora_adapters(VARIANTS[name]),
    )
    yield found
    found.driver.close()


@pytest.mark.parametrize("chunk", beyond(1, [3, 64]))
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
        step(driver, [(neighbour, 1)])  # before the devices have added up what they measured
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


@pytest.mark.parametrize("shards", beyond(1, [2, 4]))
@pytest.mark.parametrize("inner", [98, 40])
def test_features_that_do_not_divide(shards: int, inner: int, tmp_path: Path) -> None:
    """Rows of zeros fill parts up, and have no length. As one device, too."""
    model = make_model("qwen2", intermediate_size=inner)
    adapters = dora_adapters(VARIANTS["qwen2"])
    folder, oracle = save_model(model, tmp_path), with_zoo(model, adapters)
    one, several = Driver(folder), ShardedDriver(folder, shards)
    slots = [-1, *near.load_adapters(one, oracle, 1, [*adapters]).values()]
    near.load_adapters(several, oracle, shards, [*adapters])
    found = near.run(several, slots, GREEDY)
    near.assert_near(found, near.run(one, slots, GREEDY))
    for adapter, stream in zip((None, *adapters), found, strict=True):
        assert_parity(oracle, adapter, stream)
    one.close()
    several.close()


@pytest.mark.parametrize(
    ("name", "shards"), beyond(1, [("llama-biases-tied", 2), ("gemma3", 2), ("qwen2", 4)])
)
def test_biases(name: str, shards: int, tmp_path: Path) -> None:
    """Each is added by one device: as PEFT, and as one device has it."""
    configs, folder = biased_configs(VARIANTS[name]), save_model(make_model(name), tmp_path)
    of_all: dict[str, Biased] = {}
    streams: list[list[Stream]] = []
    drivers = [Driver(folder), ShardedDriver(folder, shards)]
    for driver, count in zip(drivers, (1, shards), strict=True):
        of_all = {n: biased(name, 3 + i, c, count) for i, (n, c) in enumerate(configs.items())}
        slots = driver.load_all(of_all, 0, first=0)
        streams.append(near.run(driver, [*slots.values()], GREEDY))
    near.assert_near(streams[1], streams[0])
    for adapter, stream in zip(of_all, streams[1][1:], strict=True):
        assert_parity(of_all[adapter].oracle, "one", stream)
    for driver in drivers:
        driver.close()
