"""What each worker of `loraplex serve` has of the machine."""

import os
from contextlib import ExitStack

import pytest

from loraplex.launcher.options import OptionError
from loraplex.launcher.serving.local_worker import (
    LocalWorker,
    local_workers,
    visible,
    watched_ports,
)
from loraplex.launcher.serving.plan import LocalBase, ServePlan
from loraplex.launcher.worker_groups import AskedGroups, WorkerGroups, undivided
from loraplex.router.config import RouterConfig
from loraplex.server.config import WorkerConfig
from loraplex.server.worker.address import AddressError
from tests.ports import free_port


@pytest.mark.parametrize(
    ("named", "places", "shown"),
    [
        (None, (0,), "0"),
        (None, (2, 3), "2,3"),
        ("4,5,6,7", (2, 3), "6,7"),
        ("GPU-8932f937, GPU-ab", (1,), "GPU-ab"),
        ("MIG-1,MIG-2", (0,), "MIG-1"),
    ],
)
def test_gpus_are_named_as_cuda_does(
    named: str | None, places: tuple[int, ...], shown: str
) -> None:
    assert visible(named, places) == shown


def made(groups: WorkerGroups, environ: dict[str, str]) -> list[LocalWorker]:
    with ExitStack() as held:
        workers = local_workers([(groups, WorkerConfig("m"))], environ)
        for worker in workers:
            held.callback(worker.close)
        return workers


def test_each_has_its_gpus_name_and_port() -> None:
    workers = made(WorkerGroups(2, ((0, 1), (2, 3)), ""), {"PATH": "/bin"})
    assert [worker.config.worker_id for worker in workers] == ["worker-0", "worker-1"]
    assert [worker.service.name for worker in workers] == ["worker-0", "worker-1"]
    assert [worker.environ["CUDA_VISIBLE_DEVICES"] for worker in workers] == ["0,1", "2,3"]
    assert {(worker.config.tp, worker.environ["PATH"]) for worker in workers} == {(2, "/bin")}
    assert len({worker.address for worker in workers}) == 2


def test_one_worker_has_all_as_it_is() -> None:
    (worker,) = made(undivided(AskedGroups(), "the CPU"), {"PATH": "/bin"})
    assert (worker.config.worker_id, worker.service.name) == ("", "worker")
    assert worker.environ == {"PATH": "/bin"}


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(17)))
    groups = undivided(AskedGroups(2, 2), "the CPU")
    assert [worker.environ["OMP_NUM_THREADS"] for worker in made(groups, {})] == ["4", "4"]
    given = made(groups, {"OMP_NUM_THREADS": "3"})
    assert [worker.environ["OMP_NUM_THREADS"] for worker in given] == ["3", "3"]


@pytest.mark.parametrize(
    ("first", "workers", "ports"),
    [(8078, 2, "8079 to 8080"), (65534, 2, "65535 to 65536"), (8079, 1, "8080")],
)
def test_ports_for_metrics_that_cannot_be(first: int, workers: int, ports: str) -> None:
    """Taken by the router, or beyond the last."""
    chosen = asked(first, workers)
    with pytest.raises(OptionError, match=f"--metrics-port {first}: .* {ports}"):
        watched_ports(chosen)


def test_each_worker_has_a_port_for_metrics() -> None:
    first = free_port(3)
    sockets = watched_ports(asked(first, 2))
    assert [watched.getsockname() for watched in sockets] == [
        ("127.0.0.1", first + 1),
        ("127.0.0.1", first + 2),
    ]
    sockets[1].listen()
    with pytest.raises(AddressError, match="choose another with --metrics-port"):
        watched_ports(asked(first + 1, 1))
    for watched in sockets:
        watched.close()


def asked(first: int, workers: int) -> ServePlan:
    groups = AskedGroups(worker_count=workers)
    router = RouterConfig(port=8080, metrics_port=first)
    base = LocalBase(undivided(groups, "the CPU"), WorkerConfig("m"))
    return ServePlan((base,), router, groups, (), "")
