"""Pins, loads, evictions and tiers through the real worker and the certifying engine."""

import asyncio
from collections.abc import Iterator

import psutil
import pytest

from loraplex.server import protocol
from tests.server.worker.small_memory import admit_all, running_small
from tests.server.worker.worker_process import (
    LONG,
    TIMEOUT_S,
    Router,
    Worker,
    connected,
    request,
)

ADAPTERS = 12
RESIDENT = 6
ABSENT = "0" * 64


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with running_small(tmp_path_factory, ADAPTERS) as worker:
        yield worker


async def use(router: Router, name: str, *digests: str) -> None:
    names = [f"{name}/{digest}" for digest in digests]
    await router.send(*(request(f"{name}/{digest}", 4, digest) for digest in digests))
    finished = await router.until_finished(*names)
    assert all(finished[n].error is None for n in names), finished


async def test_load_shows_every_tier_and_evict_frees_them(worker: Worker) -> None:
    async with connected(worker) as router:
        digests = await admit_all(router, ADAPTERS)
        before = await router.order("before", "status", digests[0], ABSENT)
        assert [(t.disk, t.host, t.device) for t in before.tiers] == [
            (True, "absent", "absent"),
            (False, "absent", "absent"),
        ]
        loaded = await router.order("load", "load", digests[0])
        assert loaded.error is None
        (tiers,) = loaded.tiers
        assert (tiers.host, tiers.device) == ("ready", "ready")
        assert tiers.slab_bytes > 0
        assert tiers.load_s is not None
        assert tiers.idle_s is None
        await use(router, "used", digests[0])
        (tiers,) = (await router.order("used", "status", digests[0])).tiers
        assert tiers.idle_s is not None
        evicted = await router.order("evict", "evict", digests[0])
        assert evicted.error is None
        (tiers,) = evicted.tiers
        assert (tiers.disk, tiers.host, tiers.device) == (True, "absent", "absent")
        await use(router, "again", digests[0])


async def test_a_hint_brings_an_adapter_to_host_memory(worker: Worker) -> None:
    async with connected(worker) as router:
        digests = await admit_all(router, ADAPTERS)
        hinted = digests[5]
        assert (await router.order("evict", "evict", hinted)).error is None
        await router.send(protocol.AdapterPrefetch((ABSENT, hinted, hinted)))
        async with asyncio.timeout(TIMEOUT_S):
            for number in range(10_000):
                (tiers,) = (await router.order(f"status {number}", "status", hinted)).tiers
                if tiers.host == "ready":
                    break
        assert (tiers.host, tiers.device) == ("ready", "absent")
        await use(router, "hinted", hinted)


async def test_eviction_waits_for_those_who_use_it(worker: Worker) -> None:
    async with connected(worker) as router:
        digests = await admit_all(router, ADAPTERS)
        await router.send(request("long", LONG, digests[1]))
        await router.until_started("long")
        await router.send(protocol.AdapterOrder("evict", "evict", (digests[1],)))
        await use(router, "other", digests[2])
        assert "evict" not in router.reports
        await router.send(protocol.Abort("long", 0))
        report = await router.until_report("evict")
        assert report.error is None
        assert report.tiers[0].device == "absent"
        assert "long" in router.finished


async def test_a_failed_load_says_why(worker: Worker) -> None:
    async with connected(worker) as router:
        report = await router.order("load", "load", ABSENT)
        assert report.error is not None
        assert "not in the store" in report.error


async def test_pins_survive_pressure_and_the_engine_and_end_with_their_router(
    worker: Worker,
) -> None:
    async with connected(worker, "other") as other:
        async with connected(worker) as router:
            digests = await admit_all(router, ADAPTERS)
            pinned, *rest = digests
            await router.send(protocol.AdapterPins((pinned,)))
            await resident(router, pinned)
            for turn in range(3):
                await use(router, f"turn {turn}", *rest)
                status = await router.order(f"status {turn}", "status", pinned, *rest)
                assert status.tiers[0].device == "ready"
                assert status.tiers[0].pinned
                assert sum(tiers.device == "ready" for tiers in status.tiers) <= RESIDENT
            refused = await other.order("evict", "evict", pinned)
            assert refused.error is not None
            assert "pinned" in refused.error
            psutil.Process(worker.engine_pid).kill()
            await router.until_status(ready=False)
            await router.until_status(ready=True)
            await resident(router, pinned)
        async with asyncio.timeout(TIMEOUT_S):
            for number in range(10_000):
                report = await other.order(f"again {number}", "evict", pinned)
                if report.error is None:
                    break
        assert report.tiers[0].device == "absent"


async def resident(router: Router, digest: str) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not (router.statuses and digest in router.statuses[-1].resident):
            await router.receive()


async def test_malformed_orders_cost_the_connection(worker: Worker) -> None:
    async with connected(worker) as router:
        await router.send(protocol.AdapterPins(("../../etc",)))
        assert "64 hexadecimal" in await router.until_closed()
    async with connected(worker) as router:
        await router.send(protocol.AdapterPrefetch(("A" * 64,)))
        assert "64 hexadecimal" in await router.until_closed()
