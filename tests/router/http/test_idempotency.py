"""Idempotency keys: a retry waits, is answered with what is kept, or refused; it never runs."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.router.http import idempotency
from loraplex.router.shared.memory_store import MemoryStore
from loraplex.router.shared.store import StoreDown
from loraplex.server.protocol import ErrorCode, GenerateRequest
from tests.router.fake_worker import BASE_NAME, FakeWorker, running_worker
from tests.router.serving import Running, poll, running_router

BODY = {"model": BASE_NAME, "prompt": "x"}
KEY = {"Idempotency-Key": '"a-key"'}


def gated(worker: FakeWorker) -> asyncio.Event:
    """Set: tokens flow."""
    gate = asyncio.Event()

    async def before_token(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        await gate.wait()
        return None

    worker.before_token = before_token
    return gate


async def ask(
    router: Running, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    return await router.client.post(
        "/v1/completions", json={**BODY, **fields}, headers={**KEY, **(headers or {})}
    )


async def test_concurrent_retries_wait_for_the_one_that_runs(
    router: Running, worker: FakeWorker
) -> None:
    gate = gated(worker)
    asking = [asyncio.create_task(ask(router)) for _ in range(3)]
    await worker.until(lambda: bool(worker.requests))
    other = await ask(router, prompt="y")
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_mismatch")
    gate.set()
    answers = await asyncio.gather(*asking)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert sum("idempotency-replayed" in answer.headers for answer in answers) == 2
    assert len(worker.requests) == 1


async def test_a_finished_one_is_answered_as_before(router: Running, worker: FakeWorker) -> None:
    first, second = await ask(router), await ask(router)
    assert second.content == first.content
    assert second.headers["content-type"] == first.headers["content-type"]
    assert second.headers["x-request-id"] != first.headers["x-request-id"]
    assert (await ask(router, prompt="y")).status_code == 422
    assert len(worker.requests) == 1
    stranger = await ask(router, {"Authorization": "Bearer hf_another"})
    assert stranger.status_code == 200
    assert len(worker.requests) == 2, "keys are each caller's own"


async def test_a_failure_leaves_nothing_behind(router: Running, worker: FakeWorker) -> None:
    async def fail_once(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        return "internal" if len(worker.requests) == 1 else None

    worker.before_token = fail_once
    assert (await ask(router)).status_code == 500
    assert (await ask(router)).status_code == 200
    assert (await ask(router, prompt="y")).status_code == 422


async def test_streams_are_not_run_again(router: Running, worker: FakeWorker) -> None:
    gate = gated(worker)
    asking = asyncio.create_task(ask(router, stream=True))
    await worker.until(lambda: bool(worker.requests))
    gate.set()
    assert (await asking).text.endswith("data: [DONE]\n\n")
    again = await ask(router, stream=True)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "idempotency_conflict")
    assert len(worker.requests) == 1


async def test_a_stream_that_ended_in_an_error_may_run_again(
    router: Running, worker: FakeWorker
) -> None:
    async def fail_once(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        return "internal" if index == 3 and len(worker.requests) == 1 else None

    worker.before_token = fail_once
    failed = await ask(router, stream=True)
    assert failed.status_code == 200
    assert "error" in failed.text
    assert (await ask(router, stream=True)).text.endswith("data: [DONE]\n\n")
    assert (await ask(router, stream=True)).status_code == 409
    assert len(worker.requests) == 2


async def test_a_stream_under_way_is_not_joined(router: Running, worker: FakeWorker) -> None:
    """One that its client left was aborted, so that its retry may run."""

    async def hold_at_three(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        if index == 3 and len(worker.requests) == 1:
            await asyncio.Event().wait()
        return None

    worker.before_token = hold_at_three
    body = {**BODY, "stream": True}
    async with router.client.stream("POST", "/v1/completions", json=body, headers=KEY) as answer:
        assert answer.status_code == 200
        again = await ask(router, stream=True)
        assert (again.status_code, again.headers["retry-after"]) == (409, "1")
    await worker.until(lambda: bool(worker.aborts))

    async def runs() -> bool:
        return (await ask(router, stream=True)).status_code == 200

    await poll(runs)
    assert len(worker.requests) == 2


async def test_if_the_first_leaves_the_next_runs(router: Running, worker: FakeWorker) -> None:
    gate = gated(worker)
    first = asyncio.create_task(ask(router))
    await worker.until(lambda: bool(worker.requests))
    second = asyncio.create_task(ask(router))
    first.cancel()
    await worker.until(lambda: len(worker.requests) == 2)
    gate.set()
    assert (await second).status_code == 200
    assert len(worker.aborts) == 1


@pytest.mark.parametrize("key", ["", '""', "a b", "x" * 256, "\xe9"])
async def test_bad_keys(router: Running, key: str) -> None:
    headers = [(b"idempotency-key", key.encode("latin-1"))]
    answer = await router.client.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == 400


async def test_what_is_too_large_is_not_kept(
    router: Running, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_KEPT_BYTES", 10)
    assert (await ask(router)).status_code == 200
    assert (await ask(router)).status_code == 409
    assert len(worker.requests) == 1


async def test_kept_answers_are_bounded(
    router: Running, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_KEPT", 1)
    for key in ("one", "two"):
        assert (await ask(router, {"Idempotency-Key": key})).status_code == 200
    assert (await ask(router, {"Idempotency-Key": "two"})).status_code == 200
    assert (await ask(router, {"Idempotency-Key": "one"})).status_code == 409
    assert len(worker.requests) == 2


class Ahead:
    """Of the loop's clock, the store's is so far."""

    seconds = 0.0


async def test_an_answer_that_was_replayed_ends_like_others(
    router: Running, worker: FakeWorker
) -> None:
    ahead = Ahead()
    clock = asyncio.get_running_loop().time
    router.service.idempotency._store = MemoryStore(lambda: clock() + ahead.seconds)
    for _ in range(3):
        assert (await ask(router)).status_code == 200
    assert len(worker.requests) == 1
    ahead.seconds = router.service.config.idempotency_ttl_s
    other = await ask(router, prompt="y")
    assert (other.status_code, len(worker.requests)) == (200, 2)


@pytest.fixture
async def pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[FakeWorker, Running, Running]]:
    """Two routers with one store."""
    store = MemoryStore(lambda: asyncio.get_running_loop().time() + 1 + Ahead.seconds)
    worker = FakeWorker()
    async with (
        running_worker(worker),
        running_router(tmp_path, worker) as one,
        running_router(tmp_path, worker) as other,
    ):
        for router in (one, other):
            monkeypatch.setattr(router.service.idempotency, "_store", store)
        yield worker, one, other


async def test_across_routers(pair: tuple[FakeWorker, Running, Running]) -> None:
    worker, one, other = pair
    gate = gated(worker)
    asking = asyncio.create_task(ask(one))
    await worker.until(lambda: bool(worker.requests))
    assert (await ask(other)).status_code == 409
    assert (await ask(other, prompt="y")).status_code == 422
    gate.set()
    first = await asking
    again = await ask(other)
    assert (again.status_code, again.content) == (200, first.content)
    assert len(worker.requests) == 1


async def test_the_claim_of_a_dead_router_ends(
    pair: tuple[FakeWorker, Running, Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, one, other = pair
    monkeypatch.setattr(idempotency, "_RENEW_S", 600.0)  # as one that does not live to renew it
    gated(worker)
    asking = asyncio.create_task(ask(one))
    await worker.until(lambda: bool(worker.requests))
    assert (await ask(other)).status_code == 409
    worker.before_token = FakeWorker().before_token
    monkeypatch.setattr(Ahead, "seconds", idempotency.LEASE_S)
    assert (await ask(other)).status_code == 200
    asking.cancel()


class LateStore(MemoryStore):
    """Answers, or does not."""

    down = False

    async def add(self, key: str, value: bytes, ttl_s: float) -> bytes | None:
        self._check()
        return await super().add(key, value, ttl_s)

    async def swap(self, key: str, old: bytes, new: bytes | None, ttl_s: float) -> bool:
        self._check()
        return await super().swap(key, old, new, ttl_s)

    def _check(self) -> None:
        if self.down:
            raise StoreDown("it is late")


@pytest.mark.parametrize("mode", ["open", "local-share", "closed"])
async def test_without_the_store(tmp_path: Path, worker: FakeWorker, mode: str) -> None:
    async with running_router(tmp_path, worker, quota_outage=mode) as router:
        store = LateStore(lambda: 1.0)
        router.service.idempotency._store = store
        store.down = True
        answer = await ask(router)
        assert answer.status_code == (503 if mode == "closed" else 200)
        assert ("retry-after" in answer.headers) == (mode == "closed")
        no_key = await router.client.post("/v1/completions", json=BODY)
        assert no_key.status_code == 200
        store.down = False
        assert (await ask(router)).status_code == 200


async def test_a_late_store_gets_the_end_later(router: Running, worker: FakeWorker) -> None:
    """What is done does not run again because the store did not answer at its end."""
    store = LateStore(lambda: 1.0)
    router.service.idempotency._store = store
    gate = gated(worker)
    asking = asyncio.create_task(ask(router))
    await worker.until(lambda: bool(worker.requests))
    store.down = True
    gate.set()
    first = await asking
    assert first.status_code == 200
    store.down = False

    async def reported() -> bool:
        return not router.service.idempotency._late

    await poll(reported)
    again = await ask(router)
    assert (again.content, again.headers["idempotency-replayed"]) == (first.content, "true")
    assert len(worker.requests) == 1


async def test_a_blocked_key_is_not_answered_with_what_is_kept(
    tmp_path: Path, worker: FakeWorker
) -> None:
    admin = {"Authorization": "Bearer admin"}
    async with running_router(tmp_path, worker, auth="keys", admin_key="admin") as router:
        made = (await router.client.post("/v1/keys", json={"id": "app"}, headers=admin)).json()
        mine = {"Authorization": f"Bearer {made['key']}"}
        assert (await ask(router, mine)).status_code == 200
        assert (await ask(router, mine)).headers["idempotency-replayed"] == "true"
        blocked = await router.client.post("/v1/keys/app/block", headers=admin)
        assert blocked.status_code == 200
        assert (await ask(router, mine)).status_code in (401, 403)
        assert len(worker.requests) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**BODY, "stream": True}),
        ("/", {"inputs": "x", "stream": True}),
        ("/generate_stream", {"inputs": "x"}),
    ],
)
async def test_a_stream_without_a_token_is_not_waited_for(
    router: Running, worker: FakeWorker, path: str, body: dict[str, Any]
) -> None:
    gate = gated(worker)

    async def post() -> httpx.Response:
        return await router.client.post(path, json=body, headers=KEY)

    asking = asyncio.create_task(post())
    await worker.until(lambda: bool(worker.requests))
    again = await asyncio.wait_for(post(), 240)
    assert (again.status_code, again.headers["retry-after"]) == (409, "1")
    gate.set()
    assert (await asking).status_code == 200
    assert len(worker.requests) == 1


async def test_a_stream_that_a_route_does_not_have_is_refused_each_time(
    router: Running, worker: FakeWorker
) -> None:
    body = {"inputs": "x", "stream": True}
    for _ in range(2):
        answer = await router.client.post("/generate", json=body, headers=KEY)
        assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
    assert not worker.requests
