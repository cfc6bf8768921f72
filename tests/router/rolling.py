"""Two routers and two workers that share a real Redis, and a name that is rolled out there."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.server.protocol import ErrorCode, GenerateRequest
from tests.router.fake_worker import FakeWorker, make_manifest, running_worker
from tests.router.operations.test_shared_adapters import call, generate
from tests.router.serving import Running, poll, running_router
from tests.router.shared.redis_server import RedisServer

OLD, NEW = (make_manifest(f"org/{name}").digest for name in ("old", "new"))
USERS = [f"user-{number}" for number in range(60)]


async def fail_the_new(
    worker: FakeWorker, request: GenerateRequest, index: int
) -> ErrorCode | None:
    """For a worker's `before_token`."""
    return "internal" if request.adapter == NEW and index else None


class Fleet:
    def __init__(self, routers: list[Running], workers: list[FakeWorker]) -> None:
        self.one, self.two = routers
        self.workers = workers
        self._callers = itertools.count()

    async def digest(self, router: Running, user: str, **more: Any) -> str:
        answer = await generate(router, "mine", user=user, **more)
        assert answer.status_code == 200, answer.text
        return str(answer.headers["x-loraplex-adapter-digest"])

    async def digests(self, router: Running) -> list[str]:
        return [await self.digest(router, user) for user in USERS]

    async def until(self, router: Running, *states: str) -> dict[str, Any]:
        """Until its versions are in these states."""
        shown: dict[str, Any] = {}

        async def are_so() -> bool:
            shown.clear()
            shown.update((await call(router, "GET", "/mine")).json())
            versions = (shown.get("rollout") or {"versions": []})["versions"]
            return tuple(version["state"] for version in versions) == states

        await poll(are_so)
        return shown

    async def roll_out(self, weight: int, **more: Any) -> httpx.Response:
        versions = [{"reference": "hub:org/new", "weight": weight}]
        answer = await call(
            self.one, "POST", "/mine/rollout", versions=versions, **{"guards": None, **more}
        )
        assert answer.status_code == 200, answer.text
        return answer

    async def send(self, *routers: Running, each: int) -> None:
        """Requests of so many users to each, new ones every time: a user's draw is for good.

        How they end is not looked at.
        """
        for router in routers:
            users = [f"caller-{next(self._callers)}" for _ in range(each)]
            await asyncio.gather(*(generate(router, "mine", user=user) for user in users))


@asynccontextmanager
async def running_fleet(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Fleet]:
    """`mine` is registered, and known to both."""
    monkeypatch.setattr("loraplex.router.operations.rollouts.TICK_S", 0.05)
    monkeypatch.setattr("loraplex.router.operations.rollouts.LEASE_S", 0.5)
    monkeypatch.setattr("loraplex.router.operations.rollouts._RETRY_S", 0.05)
    workers = [FakeWorker(worker_id=name) for name in "ab"]
    options: dict[str, Any] = {"redis": redis.url, "redis_timeout_s": 30.0, "admin_key": "admin"}
    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(running_worker(worker))
        routers = [
            await stack.enter_async_context(
                running_router(tmp_path / name, *workers, auth="none", **options)
            )
            for name in ("one", "two")
        ]
        fleet = Fleet(routers, workers)
        for router in routers:

            async def connected(router: Running = router) -> bool:
                return len(router.service.bases.first.fleet.sessions) == 2

            await poll(connected)
        answer = await call(fleet.one, "POST", "", name="mine", ref="org/old")
        assert answer.status_code == 200, answer.text

        async def known() -> bool:
            return (await call(fleet.two, "GET", "/mine")).status_code == 200

        await poll(known)
        yield fleet
