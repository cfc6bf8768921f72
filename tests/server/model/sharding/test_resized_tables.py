"""Tables that a training has resized, in a model that devices share: as PEFT, and as one device.

Some adapters have ids behind the base's tables. The vocabulary does not divide.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from loraplex.server.protocol import SamplingParams
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.parity import GREEDY, assert_parity
from tests.server.model.hub_models import VOCAB, make_model, save_model
from tests.server.model.lora import test_resized_tables as of_one
from tests.server.model.lora.test_resized_tables import (
    RESIZED,
    ROWS_ALONE,
    Tables,
    known_prompt,
    resized,
)
from tests.server.model.sharding.lockstep import ShardedDriver, ThreadGroup
from tests.server.model.sharding.near import assert_near
from tests.server.model.sharding.processes import GroupDriver

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
# Tables of their own; tied tables; a scaled embedding, tied.
ROWS = [("llama3", 2)]
OTHERS = [("llama-biases-tied", 2), ("llama-biases-tied", 4), ("llama3", 4), ("gemma3", 2)]
# Of stronger rows rounding alone makes more than 1e-5.
STRENGTH = 0.1
WIDE = [name for name, (size, _) in RESIZED.items() if size > VOCAB]
HOT = SamplingParams(temperature=1.4, top_k=70, top_p=0.95, logprobs=3, repetition_penalty=1.2)


class Both(NamedTuple):
    """The same adapters on one device and on several."""

    one: Tables
    several: Tables

    def load_all(self, shift: int) -> dict[str | None, int]:
        slots, other = (
            tables.driver.load_all(tables.adapters, shift, first=7 * shift) for tables in self
        )
        assert slots == other
        return slots


def tables_of(name: str, driver: Driver, names: Sequence[str] = tuple(RESIZED)) -> Tables:
    adapters = {
        each: resized(
            name,
            3 + [*RESIZED].index(each),
            *RESIZED[each],
            saves_tables=each not in ROWS_ALONE,
            shards=driver.config.shards,
            strength=STRENGTH,
        )
        for each in names
    }
    return Tables(driver, adapters)


@pytest.fixture(
    scope="module",
    params=[*ROWS, *(pytest.param(row, marks=pytest.mark.exhaustive) for row in OTHERS)],
    ids=lambda row: f"{row[0]}-{row[1]}",
)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    name, shards = request.param
    folder = save_model(make_model(name), tmp_path_factory.mktemp("base"))
    drivers = Driver(folder), ShardedDriver(folder, shards)
    yield Both(*(tables_of(name, driver) for driver in drivers))
    for driver in drivers:
        driver.close()


def run(
    tables: Tables,
    slots: dict[str | None, int],
    names: Sequence[str | None],
    sampling: SamplingParams,
    chunk: int,
) -> list[Stream]:
    """A sequence of each, with its adapter's last token in the prompt."""
    streams = [
        Stream(
            tables.driver,
            row,
            known_prompt((9, 2, 14)[row % 3], row, tables.adapters[name].size if name else VOCAB),
            slot=slots[name],
            sampling=sampling,
            seed=row,
        )
        for row, name in enumerate(names)
    ]
    generate(tables.driver, streams, 8, chunk)
    for stream in streams:
        stream.free()
    return streams


@pytest.mark.parametrize(("chunk", "shift"), [(64, 0), (3, 2)])
def test_in_one_batch_and_after_a_reload(both: Both, chunk: int, shift: int) -> None:
    """With plain ones, DoRA and the base; slots and extents change hands."""
    slots = both.load_all(shift)
    names = [*slots, *slots]
    expected, found = (run(tables, slots, names, GREEDY, chunk) for tables in both)
    assert_near(found, expected)
    for name, stream in zip(names, found, strict=True):
        oracle = both.several.adapters[name or "plain"].oracle
        assert_parity(oracle, None if name is None else "one", stream)


def test_alone(both: Both) -> None:
    slots = both.load_all(0)
    for name in RESIZED:
        expected, found = (run(tables, slots, [name], GREEDY, 4) for tables in both)
        assert_near(found, expected)
        assert_parity(both.several.adapters[name].oracle, "one", found[0])


def test_draws_are_those_of_one_device(both: Both) -> None:
    """New ids too: some adapter draws them."""
    slots = both.load_all(0)
    names = [None, *WIDE, "plain", "saved", *WIDE, *WIDE]
    expected, found = (run(tables, slots, names, HOT, 5) for tables in both)
    assert [stream.output for stream in found] == [stream.output for stream in expected]
    assert max(token for stream in found for token in stream.output) >= VOCAB


@pytest.mark.parametrize(
    "check",
    [
        of_one.test_the_base_and_plain_adapters_are_as_without_new_ids_beside_them,
        of_one.test_every_rule_reaches_new_ids,
        of_one.test_drafts_of_new_ids_are_taken,
        of_one.test_no_id_beyond_the_table_is_ever_drawn,
    ],
)
def test_what_holds_on_one_device(both: Both, check: Callable[[Tables], None]) -> None:
    check(both.several)


def test_only_steps_with_new_ids_exchange_more(both: Both) -> None:
    """One gathering more."""
    slots, driver = both.load_all(0), both.several.driver
    executor: Any = driver.executor
    group: ThreadGroup = executor.groups[0]
    greedy, exchanges = SamplingParams(temperature=0.0), []
    for neighbour in ("plain", "dora", "saved", "larger_saved", "new_rows"):
        before = group.sums, group.gathers, driver.step
        run(both.several, slots, [None, "plain", neighbour], greedy, 64)
        steps = driver.step - before[2]
        exchanges.append(((group.sums - before[0]) / steps, (group.gathers - before[1]) / steps))
    (sums, _), *_ = exchanges
    assert exchanges == [*3 * [(sums, 1)], *2 * [(sums, 2)]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("shards", [2, 4])
def test_by_processes(shards: int, tmp_path: Path) -> None:
    driver = GroupDriver(
        save_model(make_model("llama3"), tmp_path / "base"), shards, tmp_path / "meeting"
    )
    tables = tables_of("llama3", driver, ("larger_padded", "new_rows", "plain", "larger_dora"))
    for shift in (0, 1):
        slots = driver.load_all(tables.adapters, shift, first=7 * shift)
        for name, stream in zip(slots, run(tables, slots, [*slots], GREEDY, 5), strict=True):
            oracle = tables.adapters[name or "plain"].oracle
            assert_parity(oracle, None if name is None else "one", stream)
    driver.close()
