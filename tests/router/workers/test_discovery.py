"""Routers find workers that enlist themselves in a real Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.common.worker_record import GROUP, WorkerRecord, signed, verified
from loraplex.server.config import WorkerConfig
from loraplex.server.worker.adapters.registry import Registry
from loraplex.server.worker.address import AddressError, advertised
from tests.router.fake_worker import BASE_NAME, SECRET, FakeWorker, running_worker
from tests.router.serving import Running, poll, running_router
from tests.router.shared.redis_server import RedisServer

CONFIG = WorkerConfig("model", secret=SECRET)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.server.worker.adapters.registry.PERIOD_S", 0.05)
    monkeypatch.setattr("loraplex.router.workers.discovery.PERIOD_S", 0.05)


@asynccontextmanager
async def enlisted(
    redis: RedisServer, url: str, worker_id: str = "w", epoch: int = 1
) -> AsyncIterator[None]:
    registry = Registry(replace(CONFIG, redis=redis.url), url, worker_id)
    running = asyncio.create_task(registry.run(lambda: epoch, lambda: True))
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def router_without_names(
    tmp_path: Path, redis: RedisServer, **options: Any
) -> AsyncIterator[Running]:
    options = {"redis": redis.url, "redis_timeout_s": 30.0, **options}
    async with running_router(tmp_path, wait=False, **options) as router:
        yield router


async def until_clients(router: Running, *urls: str) -> None:
    async def there() -> bool:
        return {client.url for client in router.service.roster.clients} == set(urls)

    await poll(there)


async def test_workers_come_and_go(tmp_path: Path, redis: RedisServer) -> None:
    async with router_without_names(tmp_path, redis) as router:
        async with running_worker(FakeWorker()) as one, running_worker(FakeWorker()) as two:
            async with enlisted(redis, one.url, "one"):
                await router.until_ready()
                body = {"model": BASE_NAME, "prompt": "x"}
                assert (await router.client.post("/v1/completions", json=body)).status_code == 200
                async with enlisted(redis, two.url, "two"):
                    await until_clients(router, one.url, two.url)
            # They have left the list, and are used as long as they are connected.
            await asyncio.gather(*(router.client.get("/health") for _ in range(3)))
            assert router.service.bases.first.fleet.ready
        await until_clients(router)


async def test_an_emptied_or_dead_redis_loses_no_worker(
    tmp_path: Path, redis: RedisServer, worker: FakeWorker
) -> None:
    async with router_without_names(tmp_path, redis) as router, enlisted(redis, worker.url):
        await router.until_ready()
        await redis.command("FLUSHALL")

        async def back() -> bool:
            return list(await router.service.sharing.store.leased(GROUP)) == ["w"]

        await poll(back)
        assert router.service.bases.first.fleet.ready
        await redis.kill()
        body = {"model": BASE_NAME, "prompt": "x"}
        assert (await router.client.post("/v1/completions", json=body)).status_code == 200
        await redis.start()

        async def up() -> bool:
            return router.service.sharing.is_up and await back()

        await poll(up)
        assert len(router.service.roster.clients) == 1


async def test_who_has_not_the_secret_is_not_connected_to(
    tmp_path: Path, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with router_without_names(tmp_path, redis) as router:
        forged = signed(WorkerRecord("evil", "ws://127.0.0.1:9", 1), "guess")
        await router.service.sharing.store.lease(GROUP, "evil", forged, 60)

        async def told() -> bool:
            return "worker 'evil': enlisted without this router's secret" in caplog.text

        await poll(told)
        assert router.service.roster.clients == ()


async def test_of_two_with_one_name_the_later_is_real(
    tmp_path: Path, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with router_without_names(tmp_path, redis) as router:
        async with enlisted(redis, "ws://127.0.0.1:2", epoch=2):
            await until_clients(router, "ws://127.0.0.1:2")
            async with enlisted(redis, "ws://127.0.0.1:1", epoch=1):

                async def refused() -> bool:
                    return "another worker that began later is called w" in caplog.text

                await poll(refused)
            # The one that was refused takes nobody's place away when it goes.
            assert await router.service.sharing.store.leased(GROUP)
            async with enlisted(redis, "ws://127.0.0.1:3", epoch=3):
                await until_clients(router, "ws://127.0.0.1:3")
        await until_clients(router)


def test_records_are_signed_as_a_whole() -> None:
    record = WorkerRecord("w", "ws://10.0.0.7:8090", 7)
    data = signed(record, "secret")
    told = verified(data, "secret")
    assert told is not None
    assert (told.worker_id, told.url, told.epoch) == ("w", record.url, 7)
    assert verified(data, "other") is None
    assert verified(data.replace(b"10.0.0.7", b"10.0.0.8"), "secret") is None
    assert verified(data.replace(b":7,", b":8,"), "secret") is None
    for url in ("http://x", "ws://", "ws://x/path", "x", "ws://a..b:80", "ws://u:p@h:80"):
        assert verified(signed(WorkerRecord("w", url, 1), "s"), "s") is None
    assert verified(b"x" * 5000, "s") is None


def test_the_record_for_routers() -> None:
    assert advertised(replace(CONFIG, host="10.0.0.7"), 8090) == "ws://10.0.0.7:8090"
    assert advertised(replace(CONFIG, host="fd00::7"), 1) == "ws://[fd00::7]:1"
    assert advertised(replace(CONFIG, host="0.0.0.0", advertise="wss://gpu-1"), 1) == "wss://gpu-1"
    for bad in (replace(CONFIG, host="0.0.0.0"), replace(CONFIG, advertise="gpu-1")):
        with pytest.raises(AddressError, match="--advertise"):
            advertised(bad, 8090)


def test_a_password_in_a_url_is_refused() -> None:
    with pytest.raises(AddressError, match="LORAPLEX_REDIS_PASSWORD"):
        Registry(replace(CONFIG, redis="redis://:secret@x"), "ws://x", "w")
