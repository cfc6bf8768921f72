"""Own rows of the embedding and the head, norms and score heads, in a model that devices share: as
PEFT, and as one device."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.server.protocol import VectorParams
from tests.grids import beyond
from tests.server.model.driver import Driver, Packed, Stream, generate
from tests.server.model.families.parity import GREEDY, TOLERANCE, assert_parity, prompt
from tests.server.model.hub_models import make_model, save_model
from tests.server.model.lora import test_own_heads as of_heads
from tests.server.model.lora import test_own_tables as of_tables
from tests.server.model.lora.norm_adapters import saved_norms, with_norms
from tests.server.model.sharding import near
from tests.server.model.sharding.lockstep import ShardedDriver
from tests.server.model.sharding.processes import GroupDriver

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]
# Tied tables; tables of their own and fewer KV heads than devices; a scaled embedding, tied.
ROWS = beyond(1, [("llama3", 2), ("gemma3", 2), ("llama-biases-tied", 4), ("llama3", 4)])


def near_one_device(
    one: Driver, several: Driver, of_one: Mapping[str, Packed], of_several: Mapping[str, Packed]
) -> list[Stream]:
    """The sequences of several devices, by adapter; twice, with slots and extents exchanged."""
    found = []
    for shift in (0, 3):
        slots = one.load_all(of_one, shift, first=7 * shift)
        assert several.load_all(of_several, shift, first=7 * shift) == slots
        expected = near.run(one, [*slots.values()], GREEDY)
        found = near.run(several, [*slots.values()], GREEDY)
        near.assert_near(found, expected)
        for stream in (*expected, *found):
            stream.free()
    return found


def names_of(family: str) -> list[str]:
    # On tied tables PEFT saves the base's head of it, under a name of its own.
    return [n for n in of_tables.SAVED if family == "llama3" or n != "tokens_and_head"]


@pytest.mark.parametrize(("name", "shards"), ROWS)
def test_tables(name: str, shards: int, tmp_path: Path) -> None:
    """All of them in one batch, and alone. The vocabulary does not divide."""
    folder = save_model(make_model(name), tmp_path)
    packed = [
        {
            n: of_tables.saved(name, 3 + i, of_tables.SAVED[n], count)
            for i, n in enumerate(names_of(name))
        }
        for count in (1, shards)
    ]
    one, several = Driver(folder), ShardedDriver(folder, shards)
    found = near_one_device(one, several, *packed)
    for adapter, stream in zip(packed[1], found[1:], strict=True):
        assert_parity(packed[1][adapter].oracle, "one", stream)
    slots = several.load_all(packed[1], 0, first=0)
    for adapter, each in packed[1].items():
        stream = Stream(several, 0, prompt(11, 2), slot=slots[adapter], sampling=GREEDY)
        generate(several, [stream], 4, 4)
        assert_parity(each.oracle, "one", stream)
        stream.free()
    one.close()
    several.close()


@pytest.mark.parametrize(
    ("name", "shards"), [*ROWS, ("falcon-new", 2), ("olmo2", 4), ("cohere-norms", 2)]
)
def test_norms(name: str, shards: int, tmp_path: Path) -> None:
    """All of them in one batch, twice. Each device has them whole."""
    driver = ShardedDriver(save_model(make_model(name), tmp_path), shards)
    options = saved_norms(name)
    adapters = {
        each: with_norms(name, 3 + i, options[each], shards) for i, each in enumerate(options)
    }
    for shift in (0, 2):
        slots = driver.load_all(adapters, shift, first=7 * shift)
        streams = {
            each: Stream(driver, row, prompt(9, row), slot=slots[each], sampling=GREEDY)
            for row, each in enumerate(adapters)
        }
        generate(driver, [*streams.values()], 5, 5)
        for each, stream in streams.items():
            assert_parity(adapters[each].oracle, "one", stream)
            stream.free()
    driver.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("shards", [2, 4])
def test_tables_by_processes(shards: int, tmp_path: Path) -> None:
    folder = save_model(make_model("llama3"), tmp_path / "base")
    names = ("both_dora", "tokens_of_both", "plain")
    adapters = {
        n: of_tables.saved("llama3", 3 + i, of_tables.SAVED[n], shards) for i, n in enumerate(names)
    }
    driver = GroupDriver(folder, shards, tmp_path / "meeting")
    for shift in (0, 1):
        slots = driver.load_all(adapters, shift, first=5 * shift)
        streams = near.run(driver, [*slots.values()], GREEDY)
        for name, stream in zip(names, streams[1:], strict=True):
            assert_parity(adapters[name].oracle, "one", stream)
            stream.free()
        streams[0].free()
    driver.close()


def scores(driver: Driver, slots: Sequence[int]) -> list[np.ndarray]:
    streams = [
        Stream(driver, row, prompt(7 + row, row), slot=slot).read_for(VectorParams("scores"))
        for row, slot in enumerate(slots)
    ]
    generate(driver, streams, 0, 4)
    found = [stream.vector for stream in streams]
    assert all(vector is not None for vector in found)
    return [vector for vector in found if vector is not None]


@pytest.mark.parametrize("shards", beyond(1, [2, 4]))
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_score_heads(family: str, shards: int, tmp_path: Path) -> None:
    """Each device has the whole head, since each has whole hidden states."""
    base = save_model(make_model(family), tmp_path / "base")
    listed = {"three": 3, "one": 1, "many": 70}
    packed: list[dict[str, Any]] = [
        {
            name: of_heads.saved(tmp_path / str(count), base, name, labels, 3 + i, count)
            for i, (name, labels) in enumerate(listed.items())
        }
        for count in (1, shards)
    ]
    one, several = Driver(base), ShardedDriver(base, shards)
    slots = one.load_all(packed[0], 0, first=0)
    assert several.load_all(packed[1], 0, first=0) == slots
    rows = [slots[name] for name in listed]
    heads = of_heads.Heads(several, None, packed[1], False)
    found = zip(listed, scores(one, rows), scores(several, rows), strict=True)
    for row, (name, expected, vector) in enumerate(found):
        assert np.abs(vector - expected).max() < near.NEAR * max(1, np.abs(expected).max())
        wanted = of_heads.expected(heads, name, prompt(7 + row, row))
        assert np.abs(vector - wanted).max() < TOLERANCE
    one.close()
    several.close()
