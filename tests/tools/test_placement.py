"""The simulated fleet, and what the router's placement must show on it."""

import json

import pytest

from loraplex.router.policy.placement.placement import Placer
from tests.grids import beyond
from tools.bench.__main__ import main
from tools.bench.placement import POLICIES, PlacementResult, PlacementScene, simulate
from tools.bench.simulation.fleet import SimulatedFleet
from tools.bench.simulation.traffic import SHAPES, Shape, Traffic
from tools.bench.simulation.worker import WorkerModel

SLOTS = 16


def run(
    policy: str, *, shape: Shape = "zipf", adapters: int = 256, use: float = 0.7
) -> PlacementResult:
    """4 workers with room for 64 adapters together."""
    model = WorkerModel(rows=16, ahead=8, slots=SLOTS, load_s=0.05)
    return simulate(PlacementScene(shape, 4, adapters, 2000, 1.0, use, model, seed=1), policy)


def test_a_run_is_the_same_every_time() -> None:
    assert run("loraplex") == run("loraplex")


@pytest.mark.parametrize("shape", SHAPES)
def test_every_request_is_computed_once(shape: Shape) -> None:
    traffic = Traffic(shape, 500, 200.0, 100)
    fleet = SimulatedFleet(3, WorkerModel(rows=8, ahead=8, slots=8), Placer())
    fleet.run(traffic.arrivals())
    assert len(fleet.jobs) == 500
    assert all(job.arrived_s <= job.started_s < job.ended_s for job in fleet.jobs)


@pytest.mark.parametrize("shape", beyond(1, SHAPES))
def test_misses_and_waits_beside_simple_policies(shape: Shape) -> None:
    """Far fewer misses than policies that know no adapters, and shorter waits than all."""
    ours = run("loraplex", shape=shape)
    others = {name: run(name, shape=shape) for name in POLICIES if name != "loraplex"}
    for name, other in others.items():
        assert ours.wait_p99_ms < other.wait_p99_ms, name
        if name != "affinity-only":
            assert ours.miss_rate < 0.75 * other.miss_rate, name
        else:
            assert ours.miss_rate < 1.25 * other.miss_rate


@pytest.mark.exhaustive
def test_no_cliff_as_adapters_outgrow_the_fleet() -> None:
    results = [run("loraplex", adapters=count) for count in (32, 64, 128, 256)]
    misses = [result.miss_rate for result in results]
    assert misses == sorted(misses)
    assert max(b - a for a, b in zip(misses, misses[1:], strict=False)) < 0.25
    assert max(result.wait_p99_ms for result in results) < 1000.0
    assert min(r.goodput_per_s for r in results) > 0.95 * max(r.goodput_per_s for r in results)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--requests", "300", "--adapters", "20,40", "--workers", "2", "--policy", "random"]
    main(["placement", *arguments, "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["adapters"] for line in lines] == [20, 40]
    assert {(line["requests"], line["warm_up"]) for line in lines} == {(210, 90)}
    main(["placement", *arguments])
    table = capsys.readouterr().out
    assert "random" in table
    assert "warm_up" in table
