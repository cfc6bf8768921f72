"""Routers that share a real Redis, also one that is killed, emptied, frozen or slow."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.router.shared.store import StoreDown
from tests.router.fake_worker import FakeWorker, running_worker
from tests.router.generation.test_limits import hold
from tests.router.routes.test_keys import ADMIN, BODY, bearer, complete, create
from tests.router.serving import Running, events_of, poll, running_router
from tests.router.shared.redis_server import RedisServer


@asynccontextmanager
async def routers(
    tmp_path: Path, redis: RedisServer, worker: FakeWorker, count: int = 1, **options: Any
) -> AsyncIterator[list[Running]]:
    chosen: dict[str, Any] = {"auth": "keys", "admin_key": "admin"}
    chosen |= {"redis": redis.url, "redis_timeout_s": 1.0}
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                running_router(tmp_path / str(number), worker, **(chosen | options))
            )
            for number in range(count)
        ]


def statuses(answers: list[httpx.Response]) -> list[int]:
    return sorted(answer.status_code for answer in answers)


async def until_mode(router: Running, mode: str) -> None:
    async def is_in_force() -> bool:
        return await router.metric(f'loraplex_quota_mode{{mode="{mode}"}}') == 1

    await poll(is_in_force)


async def test_routers_share_keys_and_quotas(
    tmp_path: Path, redis: RedisServer, worker: FakeWorker
) -> None:
    async with routers(tmp_path, redis, worker, 2) as (one, two):
        key = await create(one, id="app", limits={"requests_per_minute": 6})
        asked = [complete(router, key) for router in (one, two) * 5]
        answers = await asyncio.gather(*asked)
        assert statuses(answers) == [200] * 6 + [429] * 4
        usage = await two.client.get("/v1/usage", headers=ADMIN)

        async def whole() -> bool:
            usage = await two.client.get("/v1/usage", headers=ADMIN)
            return [row["requests"] for row in usage.json()["data"]] == [6]

        await poll(whole)
        assert usage.status_code == 200
        await two.client.post("/v1/keys/app/block", headers=ADMIN)

        async def blocked() -> bool:
            return (await complete(one, key)).status_code == 401

        await poll(blocked)
        audit = (await one.client.get("/v1/audit", headers=ADMIN)).json()["data"]
        assert {entry["action"] for entry in audit} >= {"POST /v1/keys"}


async def test_concurrency_is_shared_and_a_dead_routers_places_come_back(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = FakeWorker()
    gate = hold(worker)
    async with running_worker(worker), routers(tmp_path, redis, worker, 2) as (one, two):
        key = await create(one, limits={"concurrency": 1})
        running = asyncio.create_task(complete(one, key))

        async def started() -> bool:
            return len(worker.requests) == 1

        await poll(started)
        assert (await complete(two, key)).status_code == 429

        async def let_in() -> bool:
            return (await complete(two, key, stream=True)).status_code == 200

        gate.set()
        assert (await running).status_code == 200
        admission = one.service.tenancy.metering.admission

        async def settled() -> bool:
            return not admission._live and not admission._tasks

        await poll(settled)
        # Nobody settles this one: it is a router's that has died.
        monkeypatch.setattr("loraplex.router.tenancy.metering.LEASE_MS", 400)
        monkeypatch.setattr(admission, "settle", lambda admitted, used: None)
        assert (await complete(one, key)).status_code == 200
        admission._live.clear()
        await poll(let_in)


async def kill(redis: RedisServer) -> None:
    await redis.kill()


async def freeze(redis: RedisServer) -> None:
    redis.freeze()


async def slow_down(redis: RedisServer) -> None:
    await redis.command("CLIENT", "PAUSE", 600_000, "ALL")


async def revive(redis: RedisServer) -> None:
    await redis.start()


async def thaw(redis: RedisServer) -> None:
    redis.thaw()


async def hurry(redis: RedisServer) -> None:
    await redis.kill()
    await redis.start()


Fault = Callable[[RedisServer], Awaitable[None]]
faults = pytest.mark.parametrize(
    ("fault", "repair"), [(kill, revive), (freeze, thaw), (slow_down, hurry)]
)


@faults
async def test_streams_go_on_and_all_recovers(
    tmp_path: Path, redis: RedisServer, fault: Fault, repair: Fault
) -> None:
    worker = FakeWorker()
    gate = hold(worker)
    options: dict[str, Any] = {"redis_timeout_s": 0.2}
    async with running_worker(worker), routers(tmp_path, redis, worker, **options) as (router,):
        key = await create(router, id="app", limits={"requests_per_minute": 3})
        stream = asyncio.create_task(complete(router, key, stream=True))

        async def started() -> bool:
            return len(worker.requests) == 1

        await poll(started)
        await fault(redis)
        gate.set()
        # The limit holds here, too: of this one router's share, which is all of it.
        answers = [await complete(router, key) for _ in range(4)]
        assert statuses(answers) == [200] * 3 + [429]
        await until_mode(router, "local-share")
        assert await router.metric("loraplex_redis_up") == 0
        streamed = await stream
        assert streamed.status_code == 200
        assert events_of(streamed.text)[-1]["choices"][0]["finish_reason"]
        refused = await router.client.post("/v1/keys", json={}, headers=ADMIN)
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        unknown = await complete(router, "lpx_unknown")
        assert unknown.status_code == 503  # it may be a key that was made elsewhere just now

        await repair(redis)
        await until_mode(router, "shared")
        second = await create(router, id="second")
        assert (await complete(router, second)).status_code == 200
        assert (await complete(router, "lpx_unknown")).status_code == 401

        async def keys_are_back() -> bool:
            rows = (await router.service.sharing.store.read("keys")).rows
            return set(rows) == {"app", "second"}

        await poll(keys_are_back)

        async def usage_is_whole() -> bool:
            usage = await router.client.get("/v1/usage?key=app", headers=ADMIN)
            return bool(usage.json()["data"])

        await poll(usage_is_whole)


async def test_an_emptied_redis_is_filled_again(
    tmp_path: Path, redis: RedisServer, worker: FakeWorker
) -> None:
    async with routers(tmp_path, redis, worker, 2) as (one, two):
        key = await create(one, id="app", limits={"requests_per_minute": 1000})
        gone = await create(one, id="gone")
        assert (await complete(two, key)).status_code == 200
        assert (await one.client.delete("/v1/keys/gone", headers=ADMIN)).status_code == 200

        async def known() -> bool:
            return (await complete(two, gone)).status_code == 401

        await poll(known)
        await redis.command("FLUSHALL")
        assert (await complete(one, key)).status_code == 200

        async def filled() -> bool:
            try:
                rows = (await one.service.sharing.store.read("keys")).rows
            except StoreDown:  # a busy machine may take longer than the routers wait
                return False
            return set(rows) == {"app", "gone"} and not rows["gone"].value

        await poll(filled)
        for router in (one, two):
            assert (await complete(router, key)).status_code == 200
            await until_mode(router, "shared")
            assert (await complete(router, gone)).status_code == 401


@pytest.mark.parametrize(("mode", "status"), [("open", 200), ("closed", 503)])
async def test_the_chosen_mode_holds(
    tmp_path: Path, redis: RedisServer, worker: FakeWorker, mode: str, status: int
) -> None:
    async with routers(tmp_path, redis, worker, quota_outage=mode) as (router,):
        key = await create(router, limits={"requests_per_minute": 1})
        await redis.kill()
        answers = [await complete(router, key) for _ in range(3)]
        assert statuses(answers)[-1] == status
        assert all(a.status_code == 200 or a.headers["retry-after"] for a in answers)
        await until_mode(router, mode)
        await redis.start()
        await until_mode(router, "shared")
        assert (await complete(router, key)).status_code == 200


async def test_closed_also_stops_keys_without_limits(
    tmp_path: Path, redis: RedisServer, worker: FakeWorker
) -> None:
    async with routers(tmp_path, redis, worker, quota_outage="closed") as (router,):
        key = await create(router)
        await redis.kill()
        await until_mode(router, "closed")
        refused = await complete(router, key)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        await redis.start()
        await until_mode(router, "shared")
        assert (await complete(router, key)).status_code == 200


async def test_it_starts_without_redis_and_finds_it_later(
    tmp_path: Path, redis: RedisServer, worker: FakeWorker
) -> None:
    await redis.kill()
    async with routers(tmp_path, redis, worker) as (router,):
        answer = await router.client.post("/v1/completions", json=BODY, headers=bearer("x"))
        assert answer.status_code == 503
        await redis.start()
        await until_mode(router, "shared")
        assert (await complete(router, await create(router))).status_code == 200
