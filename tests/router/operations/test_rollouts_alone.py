"""Guards while there is no Redis: each router judges by its own counts, and reports when Redis is
back."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.router.operations.test_shared_adapters import call, generate
from tests.router.rolling import NEW, OLD, USERS, Fleet, fail_the_new, running_fleet
from tests.router.serving import Running, poll, running_router
from tests.router.shared.redis_server import RedisServer

GUARDS = {"min_requests": 5, "max_error_increase": 0.2, "max_latency_ratio": None}
ALONE = 'loraplex_adapter_rollbacks_total{by="guard_alone"}'


@pytest.fixture
async def fleet(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Fleet]:
    """Half of the callers of `mine` have its new version."""
    async with running_fleet(tmp_path, redis, monkeypatch) as fleet:
        await fleet.roll_out(50, guards=GUARDS)
        for router in (fleet.one, fleet.two):
            await fleet.until(router, "serving", "serving")
        yield fleet


async def until_alone(router: Running) -> None:
    async def is_so() -> bool:
        return not router.service.sharing.is_up

    await poll(is_so)


async def until_taken_back(fleet: Fleet, *routers: Running) -> None:
    """While callers come to these."""
    for worker in fleet.workers:
        worker.before_token = fail_the_new

    async def is_so() -> bool:
        await fleet.send(*routers, each=10)
        told = [(await call(router, "GET", "/mine")).json() for router in routers]
        return all(one["rollout"]["versions"][1]["state"] == "rolled_back" for one in told)

    await poll(is_so)


def rollbacks(shown: dict[str, Any]) -> list[str]:
    return [change["note"] for change in shown["history"] if change["action"] == "rollback"]


@pytest.mark.parametrize("fault", ["frozen", "killed"])
async def test_a_bad_version_goes_back_on_each_router(
    fleet: Fleet, redis: RedisServer, fault: str, tmp_path: Path
) -> None:
    """And on all for good, once Redis is back: as it was, or empty."""
    both = (fleet.one, fleet.two)
    if fault == "frozen":
        redis.freeze()
    else:
        await redis.kill()
    for router in both:
        await until_alone(router)
    assert set(await fleet.digests(fleet.one)) == {OLD, NEW}, "nothing moves for that alone"
    await until_taken_back(fleet, *both)
    for router in both:
        assert set(await fleet.digests(router)) == {OLD}
        assert await router.metric(ALONE) == 1
        shown = (await call(router, "GET", "/mine/rollout")).json()
        assert shown["versions"][1]["live_weight"] == 0
        assert "without Redis" in shown["versions"][1]["why"]
        measured = {one["digest"]: one["failed"] for one in shown["measured"]}
        assert shown["measured_by"] == "this_router"
        assert measured[NEW] >= 5
        assert measured[OLD] == 0
        change = await call(router, "DELETE", "/mine/rollout")
        assert change.status_code == 503, "what all share is changed with Redis only"
    if fault == "frozen":
        redis.thaw()
    else:
        await redis.start()

    async def agreed() -> bool:
        told = [(await call(router, "GET", "/mine")).json() for router in both]
        kept = [router.service.keeper._alone._verdicts for router in both]
        return told[0]["history"] == told[1]["history"] and not any(kept)

    await poll(agreed)
    shown = await fleet.until(fleet.two, "serving", "rolled_back")
    [why] = rollbacks(shown)
    assert "without Redis" in why
    options: dict[str, Any] = {"redis": redis.url, "redis_timeout_s": 30.0, "admin_key": "admin"}
    async with running_router(tmp_path / "new", *fleet.workers, auth="none", **options) as new:
        assert set(await fleet.digests(new)) == {OLD}, "who starts now knows it, too"
        assert rollbacks((await call(new, "GET", "/mine")).json()) == [why]
    measured = (await call(fleet.two, "GET", "/mine/rollout")).json()
    assert measured["measured_by"] == "all"
    assert sum(one["failed"] for one in measured["measured"]) >= 10, "told when Redis was back"


async def test_what_one_router_found_holds_for_all_when_redis_is_back(
    fleet: Fleet, redis: RedisServer
) -> None:
    redis.freeze()
    for router in (fleet.one, fleet.two):
        await until_alone(router)
    await until_taken_back(fleet, fleet.one)
    for user in USERS:  # one request that fails is too few to judge by
        if await fleet_digest(fleet.two, user) == NEW:
            break
    else:
        pytest.fail("the other saw nothing, and gives the version its share")
    assert await fleet.two.metric(ALONE) == 0
    redis.thaw()
    await fleet.until(fleet.two, "serving", "rolled_back")
    assert set(await fleet.digests(fleet.two)) == {OLD}


async def fleet_digest(router: Running, user: str) -> str:
    """Also of an answer that failed."""
    answer = await generate(router, "mine", user=user)
    return str(answer.headers["x-loraplex-adapter-digest"])


async def test_what_an_operator_said_meanwhile_counts(fleet: Fleet) -> None:
    """One router alone has lost Redis; through the other the shares were set anew."""
    link = fleet.one.service.sharing.link
    assert link is not None
    link.is_up = False
    await until_taken_back(fleet, fleet.one)
    versions = [{"reference": "hub:org/new", "weight": 60}]
    set_anew = await call(fleet.two, "POST", "/mine/rollout", versions=versions, guards=None)
    assert set_anew.status_code == 200
    link.is_up = True

    async def is_settled() -> bool:
        told = [(await call(router, "GET", "/mine")).json() for router in (fleet.one, fleet.two)]
        live = [one["rollout"]["versions"][1]["live_weight"] for one in told]
        return live == [60, 60] and not fleet.one.service.keeper._alone._verdicts

    await poll(is_settled)
