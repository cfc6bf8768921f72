"""Registrations of a fleet: made at one router, known to all, also after a restart."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.router.operations import folder_watch
from tests.router.fake_worker import FakeWorker, make_manifest
from tests.router.operations.test_watched_folders import digest_of, fill, load
from tests.router.serving import Running, poll
from tests.router.shared.redis_server import RedisServer
from tests.router.shared.test_redis import routers

ADMIN = {"authorization": "Bearer admin"}
ONE, TWO = (make_manifest(f"org/{name}").digest for name in ("one", "two"))


async def call(router: Running, method: str, path: str, **body: Any) -> httpx.Response:
    address = f"/v1/adapters{path}"
    return await router.client.request(method, address, json=body or None, headers=ADMIN)


async def generate(router: Running, name: str, **more: Any) -> httpx.Response:
    body = {"model": name, "prompt": "x", **more}
    return await router.client.post("/v1/completions", json=body)


async def until_state(router: Running, name: str, state: str) -> dict[str, Any]:
    shown: dict[str, Any] = {}

    async def is_so() -> bool:
        shown.update((await call(router, "GET", f"/{name}")).json())
        return shown.get("state") == state

    await poll(is_so)
    return shown


async def test_one_router_gets_the_order_and_all_serve(
    tmp_path: Path, redis: RedisServer, worker: FakeWorker
) -> None:
    async with routers(tmp_path, redis, worker, 2, auth="none") as (one, two):
        answer = await call(one, "POST", "", name="mine", ref="org/one")
        assert answer.status_code == 200, answer.text
        shown = await until_state(two, "mine", "ready")
        assert (shown["digest"], shown["origin"]) == (ONE, "api")
        [change] = shown["history"]
        assert (change["action"], change["by"]) == ("register", "api 127.0.0.1")
        served = await generate(two, "mine")
        assert served.headers["x-loraplex-adapter-digest"] == ONE
        await call(two, "POST", "/mine/unload")
        await until_state(one, "mine", "unloaded")
        assert (await generate(one, "mine")).status_code == 409
        await call(one, "POST", "/mine/load")
        changed = await call(one, "POST", "", name="mine", ref="org/two", replace=True)
        assert changed.json()["history"][-1]["before"] == ONE
        pinned = await call(one, "POST", "/mine/pin")
        assert pinned.status_code == 200
        secret = await call(one, "POST", "", name="x", ref="org/one", token="hf_secret")
        assert (secret.status_code, "HF_TOKEN" in secret.text) == (409, True)
    async with routers(tmp_path / "again", redis, worker, 1, auth="none") as (three,):
        shown = (await call(three, "GET", "/mine")).json()
        assert (shown["digest"], shown["pinned"], len(shown["history"])) == (TWO, True, 2)
        loads = len(worker.loads)
        assert (await generate(three, "mine")).status_code == 200
        told = [load.expected_digest for load in worker.loads[loads:]]
        assert set(told) <= {TWO}, "nothing was resolved again"
        assert (await call(three, "DELETE", "/mine")).status_code == 200
        assert (await generate(three, "mine")).status_code == 410


async def test_an_unload_whose_router_stops_is_taken_up(
    tmp_path: Path, redis: RedisServer, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before: a router that is there is left to it. Of two that take it up one has it."""
    monkeypatch.setattr("loraplex.router.operations.admin._HEARD_S", 600.0)
    async with routers(tmp_path, redis, worker, 2, auth="none") as (two, three):
        watchers = [router.service.orphaned_unloads for router in (two, three)]
        async with routers(tmp_path / "one", redis, worker, 1, auth="none") as (one,):
            await call(one, "POST", "", name="mine", ref="org/one")
            assert (await call(one, "POST", "/mine/load")).json()["resident_on"] == ["fake-0"]
            assert (await call(one, "POST", "/mine/unload", wait_s=0)).status_code == 202
            for router in (two, three):
                await until_state(router, "mine", "unloading")
            for watcher in watchers * 2:
                await watcher.step()
            [row] = two.service.catalog.rules.aliases.all()
            assert row.drainer == one.service.router_id
        monkeypatch.setattr("loraplex.router.operations.admin._HEARD_S", 0.0)
        for _ in range(2):
            await asyncio.gather(*(watcher.step() for watcher in watchers))
        for router in (two, three):
            assert (await until_state(router, "mine", "unloaded"))["error"] is None
        assert worker.resident == set()
        [row] = two.service.catalog.rules.aliases.all()
        assert row.drainer == ""
        assert [action for action, _ in worker.orders if action == "evict"] == ["evict"]
        assert (await call(three, "POST", "/mine/load")).json()["state"] == "ready"


async def test_an_unload_goes_on_when_its_router_starts_again(
    tmp_path: Path, redis: RedisServer, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.router.operations.admin.UNLOADS_TICK_S", 0.05)
    monkeypatch.setattr("loraplex.router.operations.admin._HEARD_S", 600.0)
    async with routers(tmp_path, redis, worker, 1, auth="none") as (one,):
        await call(one, "POST", "", name="mine", ref="org/one", pin=True)
        assert (await call(one, "POST", "/mine/unload", wait_s=0)).status_code == 202
    assert worker.resident == {ONE}
    monkeypatch.setattr("loraplex.router.operations.admin._HEARD_S", 0.0)
    async with routers(tmp_path / "again", redis, worker, 1, auth="none") as (again,):
        await until_state(again, "mine", "unloaded")
        assert worker.resident == set()


async def test_without_redis_what_was_known_is_served(
    tmp_path: Path, redis: RedisServer, worker: FakeWorker
) -> None:
    async with routers(tmp_path, redis, worker, 1, auth="none") as (one,):
        await call(one, "POST", "", name="mine", ref="org/one")
        await redis.kill()
        for method, path in (("POST", "/mine/refresh"), ("DELETE", "/mine")):
            refused = await call(one, method, path)
            assert (refused.status_code, "no Redis" in refused.text) == (503, True), refused.text
            assert "retry-after" in refused.headers
        assert (await generate(one, "mine")).status_code == 200
        async with routers(tmp_path / "two", redis, worker, 1, auth="none") as (two,):
            unknown = await generate(two, "mine")
            assert unknown.status_code == 503, "it may be registered: nobody knows"
            assert "not known yet" in unknown.text
            assert (await generate(two, "fake-base")).status_code == 200
            await redis.start()

            async def known() -> bool:
                return (await generate(two, "mine")).status_code == 200

            await poll(known)


async def test_routers_watch_one_folder_each_for_itself(
    tmp_path: Path, redis: RedisServer, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change at one router holds at the others, and for one that starts again."""
    monkeypatch.setattr(folder_watch, "POLL_S", 0.05)
    worker.loader = load
    root = tmp_path / "root"
    root.mkdir()
    fill(root / "run", "one")
    options: dict[str, Any] = {"auth": "none", "watch_folders": (root,)}

    async def until_all(routers: Sequence[Running], digest: str) -> None:
        async def so() -> bool:
            shown = [(await call(router, "GET", "/run")).json() for router in routers]
            return all((one["digest"], one["pinned"]) == (digest, True) for one in shown)

        await poll(so)

    async with routers(tmp_path, redis, worker, 2, **options) as (one, two):
        await until_state(two, "run", "ready")
        assert (await call(one, "POST", "/run/pin")).status_code == 200
        await until_all((one, two), digest_of("one"))
        fill(root / "run", "two")
        await until_all((one, two), digest_of("two"))
        assert not (*one.service.declarations.problems, *two.service.declarations.problems)
    async with routers(tmp_path / "again", redis, worker, 1, **options) as (three,):
        await until_all((three,), digest_of("two"))
        (root / "run").rename(root / ".run")

        async def is_gone() -> bool:
            return (await generate(three, "run")).status_code == 410

        await poll(is_gone)
