"""A request of many sequences is taken whole, or refused whole before it is charged."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.router.tenancy.metering import Charge
from tests.router.fake_worker import BASE_NAME, FakeWorker, running_worker
from tests.router.serving import Running, poll, running_router


def ask(router: Running, **fields: Any) -> "asyncio.Task[httpx.Response]":
    body = {"model": BASE_NAME, "prompt": "x", **fields}
    return asyncio.create_task(router.client.post("/v1/completions", json=body))


async def until_queued(router: Running, count: int) -> None:
    async def queued() -> bool:
        return len(router.service.bases.first.fleet.queue) == count

    await poll(queued)


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> list[Charge]:
    """Who was charged."""
    charged: list[Charge] = []
    admit: Callable[..., Awaitable[None]] = Charge.admit

    async def noted(self: Charge, *args: Any) -> None:
        charged.append(self)
        await admit(self, *args)

    monkeypatch.setattr(Charge, "admit", noted)
    return charged


async def test_an_idle_server_takes_all_that_its_queue_may_hold(tmp_path: Path) -> None:
    worker = FakeWorker()
    worker.credits = 1
    worker_waits = asyncio.Event()

    async def before_token(*_: object) -> None:
        await worker_waits.wait()

    worker.before_token = before_token
    async with running_worker(worker), running_router(tmp_path, worker, max_queue=90) as router:
        asking = ask(router, prompt=["x"] * 90)
        await until_queued(router, 89)
        worker_waits.set()
        assert (await asking).status_code == 200
        await router.until_idle()
        router.service.bases.first.fleet.queue.check_room("", 90, 256 << 20, 0.0)


async def test_what_is_refused_was_not_charged(tmp_path: Path, admitted: list[Charge]) -> None:
    worker = FakeWorker()
    worker.credits = 1
    worker.before_token = _never
    async with running_worker(worker), running_router(tmp_path, worker, max_queue=90) as router:
        asking = [ask(router), ask(router)]
        await until_queued(router, 1)
        assert (await ask(router, prompt=["x"] * 88)).status_code == 429
        assert len(admitted) == 2
        for task in asking:
            task.cancel()


async def test_what_comes_in_between_takes_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a store is asked for its quota, a request's room is kept."""
    worker = FakeWorker()
    worker.credits = 1
    asked, answered = asyncio.Event(), asyncio.Event()
    admit: Callable[..., Awaitable[None]] = Charge.admit

    async def late(self: Charge, *args: Any) -> None:
        if not asked.is_set():
            asked.set()
            await answered.wait()
        await admit(self, *args)

    monkeypatch.setattr(Charge, "admit", late)
    async with running_worker(worker), running_router(tmp_path, worker, max_queue=9) as router:
        first = ask(router, prompt=["x"] * 8)
        async with asyncio.timeout(240):
            await asked.wait()
        assert (await ask(router, prompt=["x"] * 2)).status_code == 429
        answered.set()
        assert (await first).status_code == 200


async def test_prompts_that_no_queue_could_hold(tmp_path: Path, admitted: list[Charge]) -> None:
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, max_queue_bytes=36 * 100) as router,
    ):
        assert (await ask(router, prompt="y" * 60, n=2)).status_code == 400
        assert not admitted
        assert (await ask(router, prompt="y" * 60)).status_code == 200


async def _never(*_: object) -> None:
    await asyncio.Event().wait()
