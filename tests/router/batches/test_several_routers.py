"""Batches over the ends of routers, and of several routers on one folder."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from loraplex.router.batches.desk import BatchDesk
from loraplex.router.batches.folder import BatchFolder, Claims
from loraplex.router.files.store import FileStore
from loraplex.router.lines.records import RECORD_BEGIN
from loraplex.router.policy.batch_limits import BatchLimits
from loraplex.router.shared.memory_store import MemoryStore
from tests.router.batches.running_batches import BatchUser, Held, line, until
from tests.router.fake_worker import FakeWorker
from tests.router.serving import Running, running_router
from tests.router.shared.redis_server import RedisServer


async def check_answered_once(user: BatchUser, over: Any, count: int) -> None:
    assert over["request_counts"] == {"total": count, "completed": count, "failed": 0}
    answers = await user.answers(over["output_file_id"])
    assert sorted(answers) == sorted(f"{i}" for i in range(count))


def has_asked(worker: FakeWorker, count: int) -> bool:
    return len(worker.requests) >= count


def runs_rows(desk: BatchDesk, count: int) -> bool:
    return desk.keeper.rows.running == count


def refuses(desk: BatchDesk) -> bool:
    return desk.keeper.refusal is not None


async def test_a_batch_goes_on_in_the_next_router(tmp_path: Path, worker: FakeWorker) -> None:
    options: dict[str, Any] = {"files_dir": tmp_path / "files", "batch": BatchLimits(rows=4)}
    held = Held(worker)
    held.open.set()
    made: Any = None
    for done in (0, 10, 20):
        asked = len(worker.requests)
        async with running_router(tmp_path, worker, **options) as router:
            user = BatchUser(router)
            if made is None:
                made = await user.start([line(f"{i}") for i in range(40)])
            desk = router.service.batches
            assert desk is not None
            if done < 20:
                await worker.until(partial(has_asked, worker, asked + 10))
                held.open.clear()
                # What was in flight is asked again by the next router.
                await until(partial(runs_rows, desk, 4))
            else:
                over = await user.until_over(made["id"])
                await check_answered_once(user, over, 40)
        held.open.set()
        for journal in (tmp_path / "files").rglob("*.out.jsonl"):  # as a kill leaves it
            journal.write_bytes(journal.read_bytes() + RECORD_BEGIN)
    assert len(worker.requests) < 40 + 3 * 4


async def test_routers_without_redis_do_not_run_a_batch_twice(
    tmp_path: Path, worker: FakeWorker
) -> None:
    await check_two_routers(tmp_path, worker, {})


async def test_routers_share_batches_by_redis(
    tmp_path: Path, worker: FakeWorker, redis: RedisServer
) -> None:
    await check_two_routers(tmp_path, worker, {"redis": redis.url, "redis_timeout_s": 5.0})


async def check_two_routers(tmp_path: Path, worker: FakeWorker, options: dict[str, Any]) -> None:
    """Either runs it, both show it; when that one stops the other goes on."""
    held = Held(worker)
    folder = tmp_path / "files"
    async with AsyncExitStack() as stack:

        async def start(name: str) -> tuple[Running, AsyncExitStack]:
            own = await stack.enter_async_context(AsyncExitStack())
            router = await own.enter_async_context(
                running_router(tmp_path / name, worker, files_dir=folder, **options)
            )
            return router, own

        routers = [await start("a"), await start("b")]
        users = [BatchUser(router) for router, _ in routers]
        made = await users[0].start([line(f"{i}") for i in range(20)])
        await worker.until(lambda: len(worker.requests) == 20)
        running = [router.service.batches.keeper.running for router, _ in routers]  # type: ignore[union-attr]
        assert sorted(running) == [0, 1]
        first = running.index(1)
        await routers[first][1].aclose()
        held.open.set()
        other = users[1 - first]
        over = await other.until_over(made["id"])
        await check_answered_once(other, over, 20)
        assert len(worker.requests) == 40


async def test_cancelled_by_another_router(
    tmp_path: Path, worker: FakeWorker, redis: RedisServer
) -> None:
    Held(worker)
    folder = tmp_path / "files"
    options: dict[str, Any] = {"redis": redis.url, "redis_timeout_s": 5.0, "files_dir": folder}
    async with (
        running_router(tmp_path / "a", worker, **options) as one,
        running_router(tmp_path / "b", worker, **options) as two,
    ):
        made = await BatchUser(one).start([line(f"{i}") for i in range(5)])
        await worker.until(lambda: len(worker.requests) == 5)
        for router in (one, two):
            assert (await BatchUser(router).batch(made["id"]))["status"] == "in_progress"
        await BatchUser(two).call("POST", f"/v1/batches/{made['id']}/cancel")
        for router in (one, two):
            assert (await BatchUser(router).until_over(made["id"]))["status"] == "cancelled"


async def test_folders_of_their_own_are_refused(
    tmp_path: Path, worker: FakeWorker, redis: RedisServer
) -> None:
    options: dict[str, Any] = {"redis": redis.url, "redis_timeout_s": 5.0}
    async with running_router(tmp_path / "a", worker, files_dir=tmp_path / "1", **options) as one:
        user = BatchUser(one)
        await user.call("GET", "/v1/files")
        async with running_router(
            tmp_path / "b", worker, files_dir=tmp_path / "2", **options
        ) as two:
            for router in (one, two):
                desk = router.service.batches
                assert desk is not None
                await until(partial(refuses, desk))
                answer = await router.client.get("/v1/batches")
                assert answer.status_code == 503
                assert "one shared folder" in answer.json()["error"]["message"]


async def test_a_lock_holds_where_no_lease_does(tmp_path: Path) -> None:
    """Two processes without a common store."""
    folder = BatchFolder(tmp_path, FileStore(tmp_path))
    (tmp_path / "tenants/_/batches").mkdir(parents=True)
    now = asyncio.get_running_loop().time
    one, two = (Claims(MemoryStore(now), folder, name) for name in ("one", "two"))
    assert await one.take("", "batch_1")
    assert not await two.take("", "batch_1")
    await one.give_back("batch_1")
    assert await two.take("", "batch_1")


async def test_a_lease_holds_where_no_lock_does(tmp_path: Path) -> None:
    """Two machines whose common folder has no locks: the lock is of different folders here."""
    time = [0.0]
    store = MemoryStore(lambda: time[0])
    claims = []
    for name in ("one", "two"):
        folder = BatchFolder(tmp_path / name, FileStore(tmp_path / name))
        (tmp_path / name / "tenants/_/batches").mkdir(parents=True)
        claims.append(Claims(store, folder, name))
    one, two = claims
    assert await one.take("", "batch_1")
    time[0] += 8.0
    assert await one.renew("batch_1")
    assert not await two.take("", "batch_1")
    time[0] += 11.0
    assert await two.take("", "batch_1")
    assert not await one.renew("batch_1")
