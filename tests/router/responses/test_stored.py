"""Stored answers of `/v1/responses`, by the published SDK."""

import errno
import hashlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from operator import add
from pathlib import Path
from typing import Any

import openai
import pytest

from loraplex.router.call import RequestError
from loraplex.router.policy.batch_limits import ResponsesLimits
from loraplex.server.protocol import ErrorCode, GenerateRequest
from tests.router.batches.running_batches import BatchUser
from tests.router.fake_worker import BASE_NAME, FakeWorker, ids_of
from tests.router.serving import Running, running_router

ANSWER = "base says hello 0"
KEYS = {"acme": "lpx_acme", "other": "lpx_other"}
LIMITS = ResponsesLimits(keep_s=3600)


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Any]:
    """Options of a router."""
    return {"responses": LIMITS, "files_dir": tmp_path / "files"}


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
    with pytest.raises(openai.BadRequestError, match="background"):
        await sdk.responses.create(model=BASE_NAME, input="ab", background=True)
    assert len(worker.requests) == 1


async def test_answers_are_their_tenants(storing: Running, sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.responses.create(model=BASE_NAME, input="ab")
    async with client(storing, KEYS["other"]) as other:
        for call in (
            other.responses.retrieve,
            other.responses.delete,
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


async def test_all_routers_of_a_folder_have_them(tmp_path: Path, worker: FakeWorker) -> None:
    place: Any = {"responses": LIMITS, "files_dir": tmp_path / "files"}
    async with running_router(tmp_path, worker, **place) as one, client(one) as sdk:
        first = await sdk.responses.create(model=BASE_NAME, input="ab")
        async with running_router(tmp_path, worker, **place) as two, client(two) as other:
            second = await other.responses.create(
                model=BASE_NAME, input="cd", previous_response_id=first.id
            )
        assert (await sdk.responses.retrieve(second.id)).output_text == ANSWER


async def test_answers_expire(storing: Running, sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.responses.create(model=BASE_NAME, input="ab")
    assert storing.service.responses is not None
    for clock, is_there in ((LIMITS.keep_s - 30, True), (LIMITS.keep_s + 30, False)):
        later = partial(add, time.time(), clock)
        desk = replace(storing.service.responses, clock=later)
        if is_there:
            assert (await desk.get("acme", answer.id)).answer["id"] == answer.id
            continue
        with pytest.raises(RequestError):
            await desk.get("acme", answer.id)


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
                ("behind", {"previous_response_id": "resp_" + "0" * 24}),
            )
        ]
        over = await user.until_over((await user.start(lines, route))["id"])
        plain = (await user.answers(over["output_file_id"]))["plain"]["response"]["body"]
        assert plain["store"] is False
        await user.call("GET", f"/v1/responses/{plain['id']}", 404)
        refused = (await user.answers(over["error_file_id"]))["behind"]["response"]
        assert refused["status_code"] == 400


async def test_nothing_is_lost_but_the_store(
    storing: Running, sdk: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are given, and say that they are not kept."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("loraplex.router.files.disk_shelf.write_whole", full)
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
        with pytest.raises(openai.BadRequestError, match="--responses-keep-s"):
            await sdk.responses.create(model=BASE_NAME, input="ab", previous_response_id=answer.id)
        with pytest.raises(openai.APIStatusError, match="--responses-keep-s") as caught:
            await sdk.responses.retrieve(answer.id)
        assert caught.value.status_code == 501
