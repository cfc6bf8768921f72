"""`/abort_request`: who may end which requests, and what they get."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.fake_worker import FakeWorker
from tests.router.routes.test_keys import bearer, create, keyed
from tests.router.serving import Running, events_of

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def asks(router: Running, path: str, body: dict[str, Any], **more: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(router.client.post(path, json=body, **more))


async def abort(router: Running, body: dict[str, Any], **more: Any) -> httpx.Response:
    return await router.client.post("/abort_request", json=body, **more)


@pytest.mark.parametrize(
    ("asked", "headers", "said"),
    [
        ({"rid": "mine"}, {}, {"rid": "mine"}),
        ({"rid": ["a", "b"], "text": ["x", "y"]}, {}, {"rid": "b"}),
        ({}, {"x-request-id": "edge-7"}, {"rid": "edge-7", "abort_message": "enough"}),
        ({"sampling_params": {"n": 2}}, {}, {"abort_all": True, "rid": None}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_answer_is_what_there_was(
    router: Running,
    worker: FakeWorker,
    asked: dict[str, Any],
    headers: dict[str, str],
    said: dict[str, Any],
    stream: bool,
) -> None:
    worker.hold_finish = True
    body = {"text": "hi", "stream": stream, **asked}
    asking = asks(router, "/generate", body, headers=headers)
    several = isinstance(body["text"], list) or "sampling_params" in body
    await worker.until(lambda: worker.held == (2 if several else 1))
    assert (await abort(router, said)).status_code == 200
    answer = await asking
    assert answer.status_code == 200
    ends = events_of(answer.text)[-2:] if stream else answer.json()
    for one in ends if isinstance(ends, list) else [ends]:
        ended = one["meta_info"]["finish_reason"]
        if ended is not None:
            assert ended == {"type": "abort", "message": "aborted by the caller"}
            assert one["text"].startswith("base says hello")
    await worker.until(lambda: len(worker.aborts) == (2 if several else 1))
    await router.until_idle()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "request_id": "r"}),
        ("/v1/messages", {**CHAT, "max_tokens": 200, "request_id": "r"}),
        ("/v1/responses", {"input": "hi", "request_id": "r"}),
    ],
)
async def test_other_routes_answer_an_error(
    router: Running, worker: FakeWorker, path: str, body: dict[str, Any]
) -> None:
    """Which no client tries again."""
    worker.hold_finish = True
    asking = asks(router, path, body)
    await worker.until(lambda: worker.held == 1)
    assert (await abort(router, {"rid": "s"})).status_code == 200
    assert not worker.aborts
    await abort(router, {"rid": "r"})
    answer = await asking
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    assert "was aborted" in answer.text
    await router.until_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "rid": "r"}),
        ("/inference/v1/generate", {"token_ids": [104], "sampling_params": {}, "request_id": "r"}),
    ],
)
async def test_texts_end_as_vllms_do(
    router: Running, worker: FakeWorker, path: str, body: dict[str, Any], stream: bool
) -> None:
    worker.hold_finish = True
    asking = asks(router, path, {**body, "stream": stream, "return_token_ids": True})
    await worker.until(lambda: worker.held == 1)
    await abort(router, {"rid": "r"})
    answer = await asking
    assert answer.status_code == 200
    parts = events_of(answer.text) if stream else [answer.json()]
    choices = [choice for part in parts for choice in part["choices"]]
    assert choices[-1]["finish_reason"] == "abort"
    ids = [token for choice in choices for token in choice["token_ids"] or ()]
    assert bytes(ids[:15]) == b"base says hello"
    await router.until_idle()


async def test_a_tenant_aborts_its_own(tmp_path: Path, worker: FakeWorker) -> None:
    worker.hold_finish = True
    async with keyed(tmp_path, worker) as router:
        own = [bearer(await create(router, tenant=name)) for name in ("acme", "acme", "other")]
        asking = [
            asks(router, "/generate", {"text": "hi", "rid": "same"}, headers=headers)
            for headers in own
        ]
        await worker.until(lambda: worker.held == 3)
        assert (await abort(router, {"abort_all": True})).status_code == 401
        await abort(router, {"rid": "same"}, headers=own[2])
        assert (await asking[2]).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert not any(one.done() for one in asking[:2])
        await abort(router, {"abort_all": True}, headers=own[0])
        for one in asking[:2]:
            assert (await one).json()["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "rid"), ({"rid": 3}, "rid"), ({"rids": ["a"]}, "rids"), ({"rid": ""}, "rid")],
)
async def test_what_aborts_nothing(router: Running, body: dict[str, Any], param: str) -> None:
    answer = await abort(router, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
