"""`/invocations`, as SageMaker calls it."""

from pathlib import Path
from typing import Any

import pytest

from tests.router.fake_worker import BASE_NAME, FakeWorker, make_manifest
from tests.router.routes.test_keys import bearer, create, keyed
from tests.router.serving import Running, events_of, running_router

PIRATE = make_manifest("org/pirate").digest
CHAT = [{"role": "user", "content": "hi"}]
EVENTS = {"accept": "text/event-stream"}
ADAPTER = {"X-Amzn-SageMaker-Adapter-Identifier": "pirate"}
BODIES: dict[str, dict[str, Any]] = {
    "/": {"inputs": "hi", "parameters": {"max_new_tokens": 6}},
    "/v1/completions": {"prompt": "hi", "max_tokens": 6},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 6},
}


def text_of(answer: Any) -> str:
    if isinstance(answer, list):
        return str(answer[0]["generated_text"])
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def streamed_text(events: list[Any]) -> str:
    pieces = []
    for event in events:
        if "token" in event:
            pieces.append(event["token"]["text"])
            continue
        choice = event["choices"][0]
        pieces.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
    return "".join(pieces)


@pytest.mark.parametrize("path", BODIES)
async def test_each_body_is_answered_as_on_its_route(router: Running, path: str) -> None:
    body = BODIES[path]
    answer = await router.client.post("/invocations", json=body)
    expected = await router.client.post(path, json={"model": "", **body} if "/v1" in path else body)
    assert text_of(answer.json()) == text_of(expected.json()) == "base s"
    assert isinstance(answer.json(), list) == (path == "/")
    assert ("x-model-id" in answer.headers) == (path == "/")


@pytest.mark.parametrize("path", BODIES)
async def test_streams_and_adapters_by_header(
    router: Running, worker: FakeWorker, path: str
) -> None:
    answer = await router.client.post("/invocations", json=BODIES[path], headers=EVENTS | ADAPTER)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-loraplex-adapter-digest"] == PIRATE
    assert streamed_text(events_of(answer.text)) == PIRATE[:6]
    assert answer.text.endswith("data: [DONE]\n\n") == (path != "/")
    assert worker.requests[-1].adapter == PIRATE


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"inputs": "hi", "parameters": {"nonsense": 1}}, 422, "nonsense"),
        ({"prompt": "hi", "nonsense": 1}, 400, "nonsense"),
        ({"messages": [], "model": BASE_NAME}, 400, "messages"),
        ({"prompt": "hi", "inputs": "hi"}, 422, "prompt"),
        ({}, 422, "inputs"),
    ],
)
async def test_errors_have_the_bodys_shape(
    router: Running, body: dict[str, Any], status: int, field: str
) -> None:
    answer = await router.client.post("/invocations", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert f"{field}" in (error if status == 422 else error["message"])


async def test_it_counts_as_a_generation(router: Running) -> None:
    metric = 'loraplex_requests_total{route="/invocations",status="200"}'
    assert metric in (await router.client.get("/metrics")).text
    await router.client.post("/invocations", json={"inputs": "hi"})
    lines = (await router.client.get("/metrics")).text.splitlines()
    assert f"{metric} 1.0" in lines


async def test_it_wants_a_key_where_others_do(tmp_path: Path, worker: FakeWorker) -> None:
    async with keyed(tmp_path, worker) as router:
        body = {"inputs": "hi"}
        assert (await router.client.post("/invocations", json=body)).status_code == 401
        key = await create(router, models=["pirate"])
        mine = bearer(key)
        answer = await router.client.post("/invocations", json=body, headers=mine | ADAPTER)
        assert answer.status_code == 200, answer.text
        other = {"X-Amzn-SageMaker-Adapter-Identifier": "org/other"}
        answer = await router.client.post("/invocations", json=body, headers=mine | other)
        assert answer.status_code == 403


async def test_a_streamed_retry_does_not_run_again(tmp_path: Path, worker: FakeWorker) -> None:
    async with running_router(tmp_path, worker) as router:
        headers = EVENTS | {"Idempotency-Key": "a"}
        first = await router.client.post("/invocations", json={"inputs": "hi"}, headers=headers)
        assert first.status_code == 200
        again = await router.client.post("/invocations", json={"inputs": "hi"}, headers=headers)
        assert again.status_code == 409


async def test_texts_are_read_and_sessions_refused(router: Running) -> None:
    body = {"input": ["hi"], "encoding_format": "float"}
    answer = await router.client.post("/invocations", json=body, headers=EVENTS)
    expected = await router.client.post("/v1/embeddings", json=body)
    assert answer.json()["data"] == expected.json()["data"]
    refused = await router.client.post("/invocations", json={"requestType": "NEW_SESSION"})
    assert refused.status_code in (400, 422)
    assert "keep no state" in refused.text
