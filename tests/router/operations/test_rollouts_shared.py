"""Rollouts in a fleet: two routers, two workers, a real Redis."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import AdapterRef
from loraplex.server.protocol import ErrorCode, GenerateRequest
from tests.router.fake_worker import FakeWorker
from tests.router.operations.test_shared_adapters import ADMIN, call, generate
from tests.router.rolling import NEW, OLD, USERS, Fleet, fail_the_new, running_fleet
from tests.router.serving import Running, events_of, poll
from tests.router.shared.redis_server import RedisServer

HALF = [{"reference": "org/old", "weight": 50}, {"reference": "org/new", "weight": 50}]


@pytest.fixture
async def fleet(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path, redis, monkeypatch) as fleet:
        yield fleet


async def test_from_nothing_to_all(fleet: Fleet) -> None:
    assert set(await fleet.digests(fleet.two)) == {OLD}
    await fleet.roll_out(0)
    await fleet.until(fleet.two, "serving", "idle")
    assert set(await fleet.digests(fleet.two)) == {OLD}
    await fleet.roll_out(50)
    shown = await fleet.until(fleet.two, "serving", "serving")
    await fleet.until(fleet.one, "serving", "serving")  # who asks a router makes it catch up
    by_one, by_two = await fleet.digests(fleet.one), await fleet.digests(fleet.two)
    assert by_one == by_two, "a user has one version, whichever router is asked"
    assert set(by_one) == {OLD, NEW}
    assert by_one == await fleet.digests(fleet.one)
    versions = shown["rollout"]["versions"]
    assert [version["live_weight"] for version in versions] == [50, 50]
    assert versions[1]["resident_on"], "warm before it served"
    await fleet.roll_out(75)
    await fleet.until(fleet.two, "serving", "serving")

    async def is_so() -> bool:
        shown = (await call(fleet.two, "GET", "/mine")).json()["rollout"]["versions"]
        return bool(shown[1]["live_weight"] == 75)

    await poll(is_so)
    more = await fleet.digests(fleet.two)
    assert all(now == NEW for was, now in zip(by_two, more, strict=True) if was == NEW)
    await fleet.roll_out(100)
    await fleet.until(fleet.two, "idle", "serving")
    assert set(await fleet.digests(fleet.two)) == {NEW}
    assert (await call(fleet.two, "POST", "/mine/promote")).status_code == 200
    shown = (await call(fleet.two, "GET", "/mine")).json()
    assert (shown["digest"], shown["rollout"], shown["ref"]) == (NEW, None, "hub:org/new")
    assert set(await fleet.digests(fleet.two)) == {NEW}
    found = (await call(fleet.two, "GET", "/mine/history")).json()["data"]
    assert [change["action"] for change in found] == ["promote", *["rollout"] * 4, "register"]
    assert (found[0]["before"], found[0]["by"]) == (OLD, "api 127.0.0.1")
    models = (await fleet.two.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models].count("mine") == 1


async def test_streams_show_their_version_and_finish_on_it(fleet: Fleet) -> None:
    gate = asyncio.Event()

    async def wait(worker: FakeWorker, request: GenerateRequest, index: int) -> ErrorCode | None:
        if index:
            await gate.wait()
        return None

    for worker in fleet.workers:
        worker.before_token = wait
    body = {"model": "mine", "prompt": "x", "stream": True, "user": "u", "max_tokens": 32}
    async with fleet.two.client.stream("POST", "/v1/completions", json=body) as old:
        assert old.headers["x-loraplex-adapter-digest"] == OLD
        await fleet.roll_out(100)
        await fleet.until(fleet.two, "idle", "serving")
        await call(fleet.two, "POST", "/mine/promote")
        async with fleet.two.client.stream("POST", "/v1/completions", json=body) as new:
            assert new.headers["x-loraplex-adapter-digest"] == NEW
            gate.set()
            texts = [
                b"".join([chunk async for chunk in answer.aiter_raw()]) for answer in (old, new)
            ]
    for text, digest in zip(texts, (OLD, NEW), strict=True):
        said = "".join(
            event["choices"][0]["text"] for event in events_of(text.decode()) if event["choices"]
        )
        assert said == f"{digest[:6]} says hello 0"


async def test_what_is_not_warm_gets_nothing(fleet: Fleet) -> None:
    for worker in fleet.workers:
        worker.order_error = "no room for it"
    await fleet.roll_out(100)

    async def reported() -> bool:
        shown = [(await call(router, "GET", "/mine")).json() for router in (fleet.one, fleet.two)]
        return any("no room for it" in (one["error"] or "") for one in shown)

    await poll(reported)
    await fleet.until(fleet.one, "serving", "warming")
    assert set(await fleet.digests(fleet.one)) == {OLD}
    fleet.workers[1].order_error = None
    await fleet.until(fleet.one, "idle", "serving")
    assert set(await fleet.digests(fleet.one)) == {NEW}
    assert NEW in fleet.workers[1].resident


async def test_a_bad_version_goes_back_by_itself(fleet: Fleet) -> None:
    await fleet.roll_out(50, guards={"min_requests": 5, "max_error_increase": 0.2})
    await fleet.until(fleet.two, "serving", "serving")
    measured = (await call(fleet.two, "GET", "/mine/rollout")).json()["measured"]
    assert {one["digest"]: one["verdict"] for one in measured} == {OLD: None, NEW: "early"}
    for worker in fleet.workers:
        worker.before_token = fail_the_new
    answers = await asyncio.gather(*(generate(fleet.one, "mine", user=u) for u in USERS[:4]))
    found = {(a.status_code, a.headers["x-loraplex-adapter-digest"]) for a in answers}
    assert found <= {(200, OLD), (500, NEW)}, "an error tells whose it is, too"

    async def back() -> bool:
        await fleet.send(fleet.one, fleet.two, each=10)
        shown = (await call(fleet.two, "GET", "/mine")).json()
        return bool(shown["rollout"]["versions"][1]["state"] == "rolled_back")

    await poll(back)
    shown = await fleet.until(fleet.one, "serving", "rolled_back")
    assert "requests failed" in shown["rollout"]["versions"][1]["why"]
    assert (shown["history"][-1]["action"], shown["history"][-1]["by"]) == ("rollback", "guard")
    assert set(await fleet.digests(fleet.one)) == {OLD}

    async def counted() -> bool:
        name = 'loraplex_adapter_rollbacks_total{by="guard"}'
        return sum([await router.metric(name) for router in (fleet.one, fleet.two)]) == 1

    await poll(counted)

    async def audited() -> bool:
        found = (await fleet.one.client.get("/v1/audit", headers=ADMIN)).json()["data"]
        return any("rollback by guard" in one["action"] for one in found)

    await poll(audited)


async def test_a_slow_version_goes_back_by_itself(fleet: Fleet) -> None:
    async def crawl(worker: FakeWorker, request: GenerateRequest, index: int) -> ErrorCode | None:
        if request.adapter == NEW and not index:
            await asyncio.sleep(1.0)
        return None

    for worker in fleet.workers:
        worker.before_token = crawl
    await fleet.roll_out(50, guards={"min_requests": 5, "max_latency_ratio": 3.0})
    await fleet.until(fleet.two, "serving", "serving")

    async def back() -> bool:
        await fleet.send(fleet.two, each=16)
        shown = (await call(fleet.two, "GET", "/mine")).json()
        return bool(shown["rollout"]["versions"][1]["state"] == "rolled_back")

    await poll(back, 30.0)
    shown = await fleet.until(fleet.one, "serving", "rolled_back")
    assert "p95 time to first token" in shown["rollout"]["versions"][1]["why"]


async def test_a_version_of_worse_scores_goes_back_by_itself(fleet: Fleet) -> None:
    await fleet.roll_out(50, guards={"score_error": 0.001})
    await fleet.until(fleet.two, "serving", "serving")
    await fleet.until(fleet.one, "serving", "serving")

    async def score(router: Running, request_id: str, value: float) -> Any:
        body = {"request_id": request_id, "score": value}
        return await router.client.post("/v1/feedback", json=body)

    async def asked(user: str) -> tuple[str, str]:
        answer = await generate(fleet.one, "mine", user=user)
        digest = answer.headers["x-loraplex-adapter-digest"]
        return answer.json()["id"], digest

    answers = await asyncio.gather(*(asked(user) for user in USERS))
    found = {digest: [id for id, other in answers if other == digest] for digest in (OLD, NEW)}
    for request_id in found[OLD]:
        said = (await score(fleet.two, request_id, 1.0)).json()
        assert (said["counted"], said["version"]) == (True, "old"), said
    again = await score(fleet.one, request_id, 1.0)
    assert (again.json()["counted"], again.status_code) == (False, 200)
    assert (await score(fleet.one, request_id, 0.5)).status_code == 409
    for number, other in enumerate(found[NEW]):
        said = (await score(fleet.two, other, 0.25)).json()
        assert (said["version"], said["reason"]) == ("new", None) or number > 5, said
    unknown = {"request_id": request_id, "score": 1.0, "text": "good"}
    assert (await fleet.one.client.post("/v1/feedback", json=unknown)).status_code == 400
    assert "no request of a rollout" in (await score(fleet.one, "none", 0.5)).json()["reason"]
    for bad in (-0.1, 1.1, "good"):
        assert (await score(fleet.one, request_id, bad)).status_code == 400  # type: ignore[arg-type]
    shown = await fleet.until(fleet.one, "serving", "rolled_back")
    assert "its mean score is 0.25 over" in shown["rollout"]["versions"][1]["why"]
    assert await fleet.two.metric('loraplex_feedback_total{counted="old"}') == len(found[OLD])


async def test_an_operator_takes_it_back_and_goes_further_back(fleet: Fleet) -> None:
    answer = await call(fleet.one, "POST", "", name="mine", versions=HALF)
    assert answer.status_code == 200, answer.text
    await fleet.until(fleet.two, "serving", "serving")
    back = await call(fleet.two, "POST", "/mine/rollback")
    assert back.json()["rollout"]["versions"][1]["state"] == "rolled_back"
    assert set(await fleet.digests(fleet.two)) == {OLD}
    assert (await call(fleet.two, "DELETE", "/mine/rollout")).json()["rollout"] is None
    replaced = await call(fleet.two, "POST", "", name="mine", ref="org/new", replace=True)
    assert replaced.json()["digest"] == NEW
    earlier = await call(fleet.two, "POST", "/mine/rollback")
    assert (earlier.status_code, earlier.json()["digest"]) == (200, OLD), earlier.text
    named = await call(fleet.two, "POST", "/mine/rollback", digest=NEW[:12])
    assert named.json()["digest"] == NEW
    assert (await fleet.two.metric('loraplex_adapter_rollbacks_total{by="operator"}')) == 3


async def test_nobody_goes_back_to_what_the_source_has_no_more(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = await call(fleet.one, "POST", "", name="mine", ref="org/new", replace=True)
    assert replaced.json()["digest"] == NEW

    def gone(ref: AdapterRef, token: str | None) -> AdapterRef:
        raise AdapterError("not_found", f"no repository {ref.name}")

    monkeypatch.setattr(fleet.one.hub, "resolve", gone)
    back = await call(fleet.one, "POST", "/mine/rollback")
    assert (back.status_code, "no repository" in back.text) == (409, True)
    assert (await call(fleet.one, "GET", "/mine")).json()["digest"] == NEW


async def test_another_router_goes_on_when_the_one_that_kept_it_is_gone(
    fleet: Fleet, tmp_path: Path, redis: RedisServer
) -> None:
    """It says nothing before it goes: its lease ends."""
    for worker in fleet.workers:
        worker.order_error = "no room for it"
    await fleet.roll_out(100)
    keeper = await redis.command("GET", "loraplex:value:rollouts:keeper")
    by_id = {router.service.router_id: router for router in (fleet.one, fleet.two)}

    async def kept() -> bool:
        nonlocal keeper
        keeper = await redis.command("GET", "loraplex:value:rollouts:keeper")
        return keeper is not None

    await poll(kept)
    assert isinstance(keeper, bytes)
    first = by_id.pop(keeper.decode())
    [other] = by_id.values()

    async def nothing() -> None:
        return None

    first.service.keeper.step = nothing  # type: ignore[method-assign]
    for task in first.service.keeper._warming.values():
        task.cancel()
    for worker in fleet.workers:
        worker.order_error = None
    await fleet.until(other, "idle", "serving")


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"versions": []}, 400, "versions"),
        ({"versions": [{"reference": "org/new", "weight": 101}]}, 400, "weight"),
        ({"versions": [{"reference": "plain", "weight": 1}]}, 400, "names no source"),
        ({"versions": [{"reference": "org/old", "weight": 1}]}, 409, "beside the present one"),
        ({"versions": [{"reference": "org/missing", "weight": 1}]}, 404, "no repository"),
        ({"versions": HALF * 2}, 409, "twice"),
        ({"versions": HALF, "guards": {"window_s": 1}}, 400, "window_s"),
        ({"versions": HALF, "gards": {}}, 400, "gards"),
    ],
)
async def test_what_cannot_be_rolled_out(
    router: Running, body: dict[str, Any], status: int, words: str
) -> None:
    assert (await call(router, "POST", "", name="mine", ref="org/old")).status_code == 200
    answer = await call(router, "POST", "/mine/rollout", **body)
    assert (answer.status_code, words in answer.text) == (status, True), answer.text
    assert (await call(router, "GET", "/mine")).json()["rollout"] is None
    for path in ("/mine/promote", "/mine/rollback", "/mine/rollout"):
        method = "DELETE" if path.endswith("rollout") else "POST"
        assert (await call(router, method, path)).status_code in (404, 409)
