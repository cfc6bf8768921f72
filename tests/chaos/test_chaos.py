"""A few faults of each kind under load. `python -m tests.chaos --long` does hundreds."""

from pathlib import Path

from tests.chaos.campaign import Plan, run
from tests.chaos.processes import Shape


async def test_clients_see_pauses_and_nothing_else(tmp_path: Path) -> None:
    faults = {
        "worker killed": 2,
        "engine killed": 1,
        "worker frozen": 1,
        "engine frozen": 1,
        "router and worker parted": 1,
        "parted one way": 1,
        "network slow": 1,
        "router killed": 1,
        **{f"redis {how}": 1 for how in ("killed", "emptied", "frozen", "slow")},
    }
    plan = Plan(faults, seed=1, shape=Shape(workers=2), clients=10, calm_s=0.5)
    report = await run(plan, tmp_path)
    assert not report.problems()
    assert len(report.faults) == sum(faults.values())
    assert report.count("ok") > 50, "the load was not there"
    assert any(max(report.pauses(fault)) > 0.2 for fault in faults), "no fault was ever felt"
