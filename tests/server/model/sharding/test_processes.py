"""Processes of one model carry out the same steps and hold the same adapters."""

from functools import partial
from pathlib import Path

import pytest

from loraplex.server.engine.group.group import GroupLost
from tests.grids import beyond
from tests.server.model.adapter_zoo import with_zoo
from tests.server.model.driver import Stream, generate, step
from tests.server.model.families.parity import GREEDY, Served, assert_parity, prompt
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import make_model, save_model
from tests.server.model.lora.dora_adapters import dora_adapters
from tests.server.model.sharding.processes import GroupDriver
from tests.server.model.slabs import pack

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]


@pytest.mark.parametrize("shards", beyond(1, [2, 4]))
def test_every_adapter_in_one_batch(shards: int, tmp_path: Path) -> None:
    make = partial(GroupDriver, shards=shards, meeting=tmp_path / "meeting")
    served = Served("llama3", tmp_path / "base", None, make, shards)
    served.assert_together((9, 2, 23, 14), 3, 64)
    served.driver.close()


@pytest.mark.parametrize("shards", beyond(1, [2, 4]))
def test_dora_after_a_reload(shards: int, tmp_path: Path) -> None:
    """Lengths are added up between steps; slots change hands while a neighbour runs."""
    make = partial(GroupDriver, shards=shards, meeting=tmp_path / "meeting")
    adapters = dora_adapters(VARIANTS["qwen2"])
    served = Served("qwen2", tmp_path / "base", None, make, shards, adapters=adapters)
    driver, slots = served.driver, served.slots
    neighbour = Stream(driver, 0, prompt(12, 1), slot=slots["dora_few"], sampling=GREEDY)
    generate(driver, [neighbour], 2, 64)
    first = served.next_extent
    for adapter, slot in (("plain", slots["dora"]), ("dora", slots["plain"])):
        layout, slab = served.slabs[adapter]
        driver.begin_load(slot, layout, slab, first)
        step(driver, [(neighbour, 1)])
        assert driver.wait_for_copy().error is None
        first += sum(layout.runs)
    slots["dora"], slots["plain"] = slots["plain"], slots["dora"]
    streams = [
        Stream(driver, 1 + i, prompt(9, i), slot=slots[name], sampling=GREEDY)
        for i, name in enumerate(slots)
    ]
    generate(driver, [neighbour, *streams], 5, 4)
    for name, stream in zip(("dora_few", *slots), (neighbour, *streams), strict=True):
        assert_parity(served.oracle, name, stream)
        stream.free()
    driver.close()


def test_a_process_that_dies_while_dora_loads(tmp_path: Path) -> None:
    """The adapter can be used nowhere, and the group is lost."""
    oracle = with_zoo(make_model("qwen2"), dora_adapters(VARIANTS["qwen2"]))
    folder = save_model(make_model("qwen2"), tmp_path / "base")
    driver = GroupDriver(folder, 2, tmp_path / "meeting")
    driver.stop(1)
    driver.begin_load(3, *pack(oracle, "dora", shards=2), 0)
    for _ in range(1000):  # more than this process needs for its own part
        assert driver.executor.poll_copies() == []
    driver.kill(1)
    with pytest.raises(GroupLost, match="is gone"):
        driver.wait_for_news()
    assert driver.devices()[0]._table._slots[3] is None
    driver.close()
