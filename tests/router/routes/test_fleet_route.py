"""`GET /v1/fleet`: the picture as JSON and as a stream of its changes."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from loraplex.router.operations import fleet_watch
from loraplex.server.protocol import AdapterPlace
from tests.router.fake_worker import FakeWorker, make_manifest
from tests.router.serving import Running, poll, running_router

PIRATE = make_manifest("org/pirate").digest
OTHER = make_manifest("org/other").digest
STREAM = {"accept": "text/event-stream"}


def place(digest: str, first: int = 0, pinned: bool = False) -> AdapterPlace:
    return AdapterPlace(digest, "ready", "ready", pinned, 1000, 0.5, ((first, 2),), ((first, 2),))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_watch, "LOOK_EVERY_S", 0.02)


async def fleet(router: Running) -> Any:
    answer = await router.client.get("/v1/fleet")
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


async def pictures(router: Running) -> AsyncGenerator[Any]:
    async with (
        asyncio.timeout(240),
        router.client.stream("GET", "/v1/fleet", headers=STREAM) as got,
    ):
        assert got.headers["content-type"].startswith("text/event-stream")
        async for line in got.aiter_lines():
            if line.startswith("data:"):
                yield json.loads(line.removeprefix("data:"))


async def test_workers_arenas_and_adapters(router: Running, worker: FakeWorker) -> None:
    for name in ("pirate", "org/other"):
        body = {"inputs": "hi", "parameters": {"adapter_id": name}}
        assert (await router.client.post("/generate", json=body)).status_code == 200
    worker.place(place(PIRATE, pinned=True), place(OTHER, 4))
    got = await fleet(router)
    assert got["base"]["name"] == "fake-base"
    assert got["base"]["chat"] is True
    assert got["base"]["gives"] == ["text", "vectors"]
    (one,) = got["workers"]
    assert (one["id"], one["state"], one["problem"]) == ("fake-0", "ready", None)
    assert (one["kv_pages"], one["device_extents"], one["host_extents"]) == (100, 64, 128)
    first, second = one["places"]
    assert first["device_spans"] == [[0, 2]]
    assert (first["digest"], first["pinned"], first["load_s"]) == (PIRATE, True, 0.5)
    assert (second["digest"], second["name"]) == (OTHER, "hub:org/other")
    (pirate,) = got["adapters"]
    assert (pirate["name"], pirate["digest"], pirate["ranks"]) == ("pirate", PIRATE, [8])


async def test_other_work(tmp_path: Path, worker: FakeWorker) -> None:
    """Vectors by use, and batches where they are served."""
    async with running_router(tmp_path, worker) as router:
        assert (await fleet(router))["work"]["batches"] is None
        body = {"model": "fake-base", "input": ["a", "b"]}
        assert (await router.client.post("/v1/embeddings", json=body)).status_code == 200

        async def is_counted() -> bool:
            counts = (await fleet(router))["work"]["vectors"]
            return bool(counts == {"vector": 2, "classes": 0, "fit": 0})

        await poll(is_counted)
    async with running_router(tmp_path, worker, files_dir=tmp_path / "files") as router:
        batches = (await fleet(router))["work"]["batches"]
        assert (batches["running"], batches["rows"], batches["files"]) == (0, 0, 0)
        assert batches["rows_limit"] > 0


async def test_a_stream_shows_places_and_adapters_once(router: Running, worker: FakeWorker) -> None:
    worker.place(place(PIRATE))
    seen = pictures(router)
    first = await anext(seen)
    assert [p["digest"] for p in first["workers"][0]["places"]] == [PIRATE]
    assert first["adapters"] is not None
    worker.output_tokens = 7
    again = await anext(seen)
    assert (again["workers"][0]["places"], again["adapters"]) == (None, None)
    worker.place(place(OTHER))
    async for later in seen:
        if later["workers"][0]["places"] is not None:
            assert [p["digest"] for p in later["workers"][0]["places"]] == [OTHER]
            assert later["workers"][0]["output_tokens"] == 7
            break
    await seen.aclose()


async def test_a_stream_shows_when_a_rollout_moves(router: Running) -> None:
    seen = pictures(router)
    first = await anext(seen)
    assert [one["rollout"] for one in first["adapters"]] == [None]
    body = {"versions": [{"reference": "hub:org/other", "weight": 5}]}
    answer = await router.client.post("/v1/adapters/pirate/rollout", json=body)
    assert answer.status_code == 200, answer.text
    states = []
    async for later in seen:
        for adapter in later["adapters"] or ():
            old, new = adapter["rollout"]["versions"]
            assert (old["digest"], new["digest"]) == (PIRATE, OTHER)
            states.append((new["state"], new["weight"], new["live_weight"]))
        if states and states[-1][0] == "serving":
            break
    await seen.aclose()
    assert states[-1] == ("serving", 5, 5)
    assert adapter["rollout"]["measured"] is None


async def test_errors_are_listed_once_and_counted(router: Running) -> None:
    for _ in range(3):
        body = {"inputs": "hi", "parameters": {"adapter_id": "nobody"}}
        await router.client.post("/generate", json=body)
    await router.client.get("/no/such/route")
    (error,) = (await fleet(router))["errors"]
    assert (error["count"], error["cause"], error["path"]) == (3, "adapter_not_found", "/generate")
    assert "nobody" in error["message"]
    assert error["request_id"]


async def test_a_worker_that_is_gone_says_why(router: Running, worker: FakeWorker) -> None:
    await worker.stop()

    async def gone() -> bool:
        return bool((await fleet(router))["workers"][0]["state"] == "unreachable")

    await poll(gone)
    (got,) = (await fleet(router))["workers"]
    assert got["problem"]
    assert got["places"] == []
    await worker.start()
    await router.until_ready()


async def test_a_worker_without_a_report_hides_nobody(
    tmp_path: Path, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_watch, "LOOK_TIMEOUT_S", 0.05)
    other = FakeWorker(worker_id="fake-1")
    worker.hides = True
    other.place(place(PIRATE))
    await other.start()
    try:
        async with running_router(tmp_path, worker, other) as router:
            async with asyncio.timeout(240):
                while True:
                    silent, telling = (await fleet(router))["workers"]
                    if telling["places"]:
                        break
            assert silent["places"] == []
            assert silent["state"] == "ready"
    finally:
        await other.stop()


async def test_it_wants_the_admin_key(tmp_path: Path, worker: FakeWorker) -> None:
    async with running_router(tmp_path, worker, admin_key="let-me") as router:
        for headers in ({}, {"authorization": "Bearer wrong"}, STREAM):
            answer = await router.client.get("/v1/fleet", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        right = {"authorization": "Bearer let-me"}
        assert (await router.client.get("/v1/fleet", headers=right)).status_code == 200


async def test_other_pages_of_a_browser_may_not_look(router: Running) -> None:
    answer = await router.client.get("/v1/fleet", headers={"origin": "http://evil.example"})
    assert answer.status_code == 403


async def test_so_many_streams_and_no_more(
    router: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_watch, "MAX_WATCHERS", 2)
    streams = [pictures(router) for _ in range(2)]
    for stream in streams:
        await anext(stream)
    refused = await router.client.get("/v1/fleet", headers=STREAM)
    assert refused.status_code == 429
    assert refused.headers["retry-after"]
    await streams[0].aclose()

    async def room() -> bool:
        third = pictures(router)
        try:
            await anext(third)
        except AssertionError:
            return False
        finally:
            await third.aclose()
        return True

    await poll(room)
    await streams[1].aclose()


async def test_streams_end_when_the_router_stops(router: Running) -> None:
    stream = pictures(router)
    await anext(stream)
    router.service.watch.close()
    async for _ in stream:
        pass
