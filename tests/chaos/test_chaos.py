"""A few faults under load. `python -m tests.chaos --long` does hundreds."""

import asyncio
import math
from pathlib import Path

import pytest

from tests.chaos.campaign import Plan, run
from tests.chaos.processes import Shape
from tests.chaos.state_base import ROWS, StateBase

# Each process is killed once, and the first of each further way to be away is there.
FEW = ("worker killed", "engine killed", "router killed", "engine frozen", "parted one way")
ALL = (
    *FEW,
    *("worker killed", "worker frozen", "router and worker parted", "network slow"),
    *(f"redis {how}" for how in ("killed", "emptied", "frozen", "slow")),
)


@pytest.mark.parametrize(
    ("faults", "clients", "longest_s"),
    [(FEW, 4, 2.0), pytest.param(ALL, 10, math.inf, marks=pytest.mark.exhaustive)],
    ids=["few", "all"],
)
async def test_clients_see_pauses_and_nothing_else(
    tmp_path: Path, faults: tuple[str, ...], clients: int, longest_s: float
) -> None:
    counts = {fault: faults.count(fault) for fault in faults}
    shape = Shape(workers=2)
    plan = Plan(counts, 1, shape, clients, calm_s=0.5, longest_s=longest_s)
    report = await run(plan, tmp_path)
    assert not report.problems()
    assert len(report.faults) == len(faults)
    assert report.count("ok") > clients, "the load was not there"
    assert report.felt(), "no fault was ever felt"


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore:.*pattern keys")
@pytest.mark.parametrize("row", ROWS)
async def test_a_base_with_states_gives_no_wrong_token(row: str, tmp_path: Path) -> None:
    """Sequences go on from snapshots, with drafts, and are computed again where one was lost."""
    base = await asyncio.to_thread(StateBase, tmp_path, row)
    counts = {"worker killed": 3, "engine killed": 3, "router killed": 1, "engine frozen": 1}
    shape = Shape(workers=2, served=base.served)
    plan = Plan(counts, seed=2, shape=shape, clients=8, min_tokens=8, max_tokens=70)
    report = await run(plan, tmp_path, base)
    assert not report.problems()
    assert report.count("ok") > 100, "the load was not there"
    assert report.felt(), "no fault was ever felt"
