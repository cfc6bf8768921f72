"""Stored answers of `/v1/responses`, by the published SDK: on disk, and in Redis."""

import errno
import hashlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai.types.responses import Response

from loraplex.router.api.responses.stored import StoredResponse, unpack
from loraplex.router.files.store import DiskShelf, FileStore
from loraplex.router.files.stored_file import RESPONSE_ID, new_id
from loraplex.router.policy.batch_limits import ResponsesLimits
from loraplex.router.responses.desk import ResponseDesk
from loraplex.server.protocol import ErrorCode, GenerateRequest
from tests.router.batches.running_batches import BatchUser, Held, until
from tests.router.fake_worker import BASE_NAME, FakeWorker, ids_of
from tests.router.serving import Running, poll, running_router
from tests.router.shared.redis_server import running_redis

ANSWER = "base says hello 0"
KEYS = {"acme": "lpx_acme", "other": "lpx_other"}
LIMITS = ResponsesLimits(keep_s=3600)


@pytest.fixture(params=["disk", "redis"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[dict[str, Any]]:
    """Options of a router."""
    options: dict[str, Any] = {"responses": LIMITS, "files_dir": tmp_path / "files"}
    if request.param == "disk":
        yield options
        return
    async with running_redis() as server:
        yield {**options, "redis": server.url, "redis_timeout_s": 5.0}


@pytest.fixture
async def storing(
    tmp_path: Path, worker: FakeWorker, place: dict[str, Any]
) -> AsyncIterator[Running]:
    digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
    keys = [{"id": name, "tenant": name, "sha256": digest} for name, digest in digests.items()]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": keys}))
    async with running_router(
        tmp_path, worker, keys_file=tmp_path / "keys.json", admin_key="lpx_admin", **place
    ) as router:
        yield router


@asynccontextmanager
async def client(router: Running, key: str = "lpx_acme") -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{router.client.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as found:
        yield found


@pytest.fixture
async def sdk(storing: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client(storing) as found:
        yield found


def was_asked(worker: FakeWorker, prompt: str) -> bool:
    return worker.requests[-1].prompt_ids == ids_of(prompt)


async def until_over(sdk: openai.AsyncOpenAI, name: str) -> Response:
    async def is_over() -> bool:
        return (await sdk.responses.retrieve(name)).status not in ("queued", "in_progress")

    await poll(is_over)
    return await sdk.responses.retrieve(name)


async def test_an_answer_is_kept_followed_and_deleted(
    storing: Running, sdk: openai.AsyncOpenAI, worker: FakeWorker
) -> None:
    first = await sdk.responses.create(
        model=BASE_NAME, input="ab", instructions="Be kind", metadata={"a": "b"}
    )
    assert await sdk.responses.retrieve(first.id) == first
    assert first.model_dump()["store"] is True
    second = await sdk.responses.create(
        model=BASE_NAME, input="cd", previous_response_id=first.id, store=True
    )
    assert was_asked(worker, f"<user>ab<assistant>{ANSWER}<user>cd<assistant>")
    assert second.previous_response_id == first.id
    await sdk.responses.delete(first.id)
    for call in (sdk.responses.retrieve, sdk.responses.delete, sdk.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match=first.id):
            await call(first.id)
    stream = await sdk.responses.create(
        model=BASE_NAME, input="ef", previous_response_id=second.id, stream=True
    )
    events = [event async for event in stream]
    last = events[-1]
    assert last.type == "response.completed"
    assert await sdk.responses.retrieve(last.response.id) == last.response
    begun = f"<user>ab<assistant>{ANSWER}<user>cd<assistant>{ANSWER}<user>ef<assistant>"
    assert was_asked(worker, begun)
    listed = [item async for item in sdk.responses.input_items.list(last.response.id, limit=2)]
    texts = [item.model_dump()["content"][0]["text"] for item in listed]
    assert texts == ["ef", ANSWER, "cd", ANSWER, "ab"]
    ordered = await sdk.responses.input_items.list(last.response.id, order="asc", limit=1)
    assert (ordered.data[0].id, ordered.has_more) == (listed[-1].id, True)
    raw = await storing.client.get(
        f"/v1/responses/{second.id}", headers={"authorization": "Bearer lpx_acme"}
    )
    assert raw.json()["store"] is True


async def test_what_is_not_to_be_kept_is_not(sdk: openai.AsyncOpenAI, worker: FakeWorker) -> None:
    answer = await sdk.responses.create(model=BASE_NAME, input="ab", store=False)
    assert answer.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await sdk.responses.create(model=BASE_NAME, input="ab", previous_response_id=answer.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "response_not_found")
    more: Any
    for more in ({"stream": True}, {"store": False}):
        with pytest.raises(openai.BadRequestError, match="background|store"):
            await sdk.responses.create(
                model=BASE_NAME, input="ab", background=True, extra_body=more
            )
    assert len(worker.requests) == 1


async def test_answers_are_their_tenants(storing: Running, sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.responses.create(model=BASE_NAME, input="ab")
    async with client(storing, KEYS["other"]) as other:
        for call in (
            other.responses.retrieve,
            other.responses.delete,
            other.responses.cancel,
            other.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError):
                await call(answer.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(
                model=BASE_NAME, input="ab", previous_response_id=answer.id
            )
    async with client(storing, "lpx_admin") as admin:
        with pytest.raises(openai.AuthenticationError):
            await admin.responses.retrieve(answer.id)
    assert (await sdk.responses.retrieve(answer.id)).output_text == ANSWER


async def test_in_the_background(
    storing: Running, sdk: openai.AsyncOpenAI, worker: FakeWorker
) -> None:
    held = Held(worker)
    begun = await sdk.responses.create(model=BASE_NAME, input="ab", background=True)
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    assert (await sdk.responses.retrieve(begun.id)).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="not over"):
        await sdk.responses.create(model=BASE_NAME, input="c", previous_response_id=begun.id)
    held.open.set()
    over = await until_over(sdk, begun.id)
    assert (over.status, over.output_text, over.id) == ("completed", ANSWER, begun.id)
    assert over.created_at == begun.created_at
    assert (await sdk.responses.cancel(begun.id)).status == "completed"
    await sdk.responses.create(model=BASE_NAME, input="c", previous_response_id=begun.id)
    assert was_asked(worker, f"<user>ab<assistant>{ANSWER}<user>c<assistant>")
    headers = {"authorization": "Bearer lpx_acme"}
    usage = (await storing.client.get("/v1/usage/requests", headers=headers)).json()["data"]
    assert [one["key"] for one in usage] == ["acme", "acme"]


@pytest.mark.parametrize("way", ["cancel", "delete"])
async def test_the_background_ends_early(
    way: str, storing: Running, sdk: openai.AsyncOpenAI, worker: FakeWorker
) -> None:
    Held(worker)
    begun = await sdk.responses.create(model=BASE_NAME, input="ab", background=True)
    await until(lambda: bool(worker.requests))
    if way == "delete":
        await sdk.responses.delete(begun.id)
    else:
        for _ in range(2):
            assert (await sdk.responses.cancel(begun.id)).status == "cancelled"
        assert (await sdk.responses.retrieve(begun.id)).status == "cancelled"
    await storing.until_idle()


async def test_a_late_sign_of_life_undoes_no_answer(
    storing: Running,
    sdk: openai.AsyncOpenAI,
    worker: FakeWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store may do what a router has given up, between the router's next look and change."""
    held = Held(worker)
    begun = await sdk.responses.create(model=BASE_NAME, input="ab", background=True)
    desk = storing.service.responses
    assert desk is not None
    shelve = desk.shelf.shelve

    async def late(tenant: str, name: str, old: bytes, new: bytes, *bounds: Any) -> bool:
        monkeypatch.undo()
        alive = msgspec.structs.replace(unpack(old), alive_until=time.time() + 20)
        assert await shelve(tenant, name, old, alive.pack(), *bounds)
        return await shelve(tenant, name, old, new, *bounds)

    monkeypatch.setattr(desk.shelf, "shelve", late)
    held.open.set()
    assert (await until_over(sdk, begun.id)).status == "completed"


async def test_why_the_background_failed(sdk: openai.AsyncOpenAI, worker: FakeWorker) -> None:
    async def fail(_: FakeWorker, request: GenerateRequest, index: int) -> ErrorCode | None:
        return "internal"

    for body, status in (({"model": "missing/adapter"}, 404), ({"temperature": -1}, 400)):
        wrong: Any = {"model": BASE_NAME, "input": "ab", "background": True, **body}
        if status == 400:  # what the body alone shows is said at once
            with pytest.raises(openai.BadRequestError):
                await sdk.responses.create(**wrong)
            continue
        over = await until_over(sdk, (await sdk.responses.create(**wrong)).id)
        assert over.status == "failed"
        assert over.error is not None
        assert "missing" in over.error.message
    worker.before_token = fail
    begun = await sdk.responses.create(model=BASE_NAME, input="ab", background=True)
    over = await until_over(sdk, begun.id)
    assert (over.status, over.output) == ("failed", [])


async def test_a_stream_that_breaks_off_is_kept(
    sdk: openai.AsyncOpenAI, worker: FakeWorker
) -> None:
    async def fail(_: FakeWorker, request: GenerateRequest, index: int) -> ErrorCode | None:
        return "internal" if index == 2 else None

    worker.before_token = fail
    stream = await sdk.responses.create(model=BASE_NAME, input="ab", stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.failed"
    assert (await sdk.responses.retrieve(last.response.id)).status == "failed"


async def test_another_router_sees_and_cancels(
    tmp_path: Path,
    worker: FakeWorker,
    place: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loraplex.router.responses.desk._BEAT_S", 0.02)
    held = Held(worker)
    async with (
        running_router(tmp_path, worker, **place) as one,
        running_router(tmp_path, worker, **place) as two,
        client(one) as mine,
        client(two) as theirs,
    ):
        begun = await mine.responses.create(model=BASE_NAME, input="ab", background=True)
        await until(lambda: bool(worker.requests))
        assert (await theirs.responses.retrieve(begun.id)).status == "in_progress"
        assert (await theirs.responses.cancel(begun.id)).status == "cancelled"
        await one.until_idle()
        held.open.set()
        begun = await mine.responses.create(model=BASE_NAME, input="ab", background=True)
        assert (await until_over(theirs, begun.id)).output_text == ANSWER
        follow = await theirs.responses.create(
            model=BASE_NAME, input="cd", previous_response_id=begun.id
        )
        assert (await mine.responses.retrieve(follow.id)).output_text == ANSWER


async def test_no_end_of_a_router_leaves_an_answer_open(
    tmp_path: Path, worker: FakeWorker, place: dict[str, Any]
) -> None:
    """One that is stopped says so; one that is killed says nothing any more."""
    Held(worker)
    async with running_router(tmp_path, worker, **place) as one, client(one) as sdk:
        stopped = await sdk.responses.create(model=BASE_NAME, input="ab", background=True)
        kept = await sdk.responses.create(model=BASE_NAME, input="ab", background=True)
        await sdk.responses.cancel(kept.id)
    async with running_router(tmp_path, worker, **place) as two, client(two) as sdk:
        over = await sdk.responses.retrieve(stopped.id)
        assert (over.status, over.error and "stopped" in over.error.message) == ("failed", True)
        assert (await sdk.responses.retrieve(kept.id)).status == "cancelled"
        assert two.service.responses is not None
        name = new_id(RESPONSE_ID, time.time(), "0" * 12)
        left = StoredResponse({**stopped.model_dump(), "id": name}, [], time.time() + 20).pack()
        shelf = two.service.sharing.shelf or DiskShelf(FileStore(place["files_dir"]))
        assert await shelf.shelve("", name, b"", left, LIMITS, "")
        assert (await sdk.responses.retrieve(name)).status == "in_progress"
        ahead(two.service.responses, 30)
        over = await sdk.responses.retrieve(name)
        assert (over.status, over.error and "died" in over.error.message) == ("failed", True)


def ahead(desk: ResponseDesk, seconds: float) -> None:
    before = desk.clock
    desk.clock = lambda: before() + seconds


async def test_answers_expire(storing: Running, sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.responses.create(model=BASE_NAME, input="ab")
    assert storing.service.responses is not None
    ahead(storing.service.responses, LIMITS.keep_s - 30)
    await sdk.responses.retrieve(answer.id)
    ahead(storing.service.responses, 60)
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve(answer.id)


async def test_a_conversation_is_no_longer_than_a_body(
    tmp_path: Path, worker: FakeWorker, place: dict[str, Any]
) -> None:
    async with (
        running_router(tmp_path, worker, max_body_bytes=2000, **place) as router,
        client(router) as sdk,
    ):
        item: Any = {"role": "user", "content": "ab", "unread": "x" * 700}
        one = await sdk.responses.create(model=BASE_NAME, input=[item])
        two = await sdk.responses.create(
            model=BASE_NAME, input="cd", previous_response_id=one.id, store=False
        )
        assert two.output_text == ANSWER
        item["unread"] = "x" * 900
        two = await sdk.responses.create(model=BASE_NAME, input=[item], previous_response_id=one.id)
        with pytest.raises(openai.BadRequestError, match="2000") as caught:
            await sdk.responses.create(model=BASE_NAME, input="ef", previous_response_id=two.id)
        assert caught.value.param == "previous_response_id"


async def test_lines_of_batches_are_not_kept(
    tmp_path: Path, worker: FakeWorker, place: dict[str, Any]
) -> None:
    async with running_router(tmp_path, worker, **place) as router:
        user = BatchUser(router)
        route, body = "/v1/responses", {"model": BASE_NAME, "input": "ab", "store": True}
        lines = [
            {"custom_id": name, "method": "POST", "url": route, "body": {**body, **more}}
            for name, more in (
                ("plain", {}),
                ("behind", {"background": True}),
                ("after", {"previous_response_id": "resp_" + "0" * 24}),
            )
        ]
        over = await user.until_over((await user.start(lines, route))["id"])
        plain = (await user.answers(over["output_file_id"]))["plain"]["response"]["body"]
        assert plain["store"] is False
        await user.call("GET", f"/v1/responses/{plain['id']}", 404)
        refused = await user.answers(over["error_file_id"])
        statuses = {name: answer["response"]["status_code"] for name, answer in refused.items()}
        assert statuses == {"behind": 400, "after": 400}


async def test_nothing_is_lost_but_the_store(tmp_path: Path, worker: FakeWorker) -> None:
    """Answers are given, and say that they are not kept; what needs the store is refused."""
    async with (
        running_redis() as server,
        running_router(
            tmp_path, worker, redis=server.url, redis_timeout_s=5.0, responses=LIMITS
        ) as router,
        client(router) as sdk,
    ):
        kept = await sdk.responses.create(model=BASE_NAME, input="ab")
        await server.kill()
        answer = await sdk.responses.create(model=BASE_NAME, input="ab")
        assert (answer.output_text, answer.model_dump()["store"]) == (ANSWER, False)
        stream = await sdk.responses.create(model=BASE_NAME, input="ab", stream=True)
        last = [event async for event in stream][-1]
        assert last.type == "response.completed"
        assert last.response.model_dump()["store"] is False
        for refused in (
            sdk.responses.retrieve(kept.id),
            sdk.responses.create(model=BASE_NAME, input="c", previous_response_id=kept.id),
            sdk.responses.create(model=BASE_NAME, input="c", background=True),
        ):
            with pytest.raises(openai.InternalServerError) as caught:
                await refused
            assert caught.value.status_code == 503


async def test_a_full_disk_costs_nothing_but_the_store(
    tmp_path: Path, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("loraplex.router.files.store.write_whole", full)
    async with (
        running_router(tmp_path, worker, responses=LIMITS, files_dir=tmp_path / "files") as router,
        client(router) as sdk,
    ):
        answer = await sdk.responses.create(model=BASE_NAME, input="ab", metadata={"a": "b"})
        stream = await sdk.responses.create(model=BASE_NAME, input="ab", stream=True)
        last = [event async for event in stream][-1]
        assert last.type == "response.completed"
        for given in (answer.model_dump(), last.response.model_dump()):
            assert given["store"] is False
            with pytest.raises(openai.NotFoundError):
                await sdk.responses.retrieve(given["id"])


async def test_where_nothing_is_stored(router: Running) -> None:
    async with client(router) as sdk:
        answer = await sdk.responses.create(model=BASE_NAME, input="ab", store=True)
        assert answer.model_dump()["store"] is False
        more: Any
        for more in ({"background": True}, {"previous_response_id": answer.id}):
            with pytest.raises(openai.BadRequestError, match="--responses-keep-s"):
                await sdk.responses.create(model=BASE_NAME, input="ab", extra_body=more)
        with pytest.raises(openai.APIStatusError, match="--responses-keep-s") as caught:
            await sdk.responses.retrieve(answer.id)
        assert caught.value.status_code == 501
