"""Hidden states of last tokens (`return_hidden_states`): read behind the text that came before."""

import asyncio
from typing import Any

import msgspec
import pytest

from loraplex.server.protocol import ErrorCode, GenerateRequest, SamplingParams, VectorParams
from tests.router.fake_worker import BASE_NAME, EOS, FakeWorker, ids_of, numbers_of
from tests.router.serving import Running, events_of

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
}
TEXT = "some words"


def is_reading(request: GenerateRequest) -> bool:
    return request.vector is not None


async def ask(router: Running, path: str, **fields: Any) -> Any:
    body = {"model": BASE_NAME, "max_tokens": 99, "return_hidden_states": True}
    answer = await router.client.post(path, json=body | ROUTES[path] | fields)
    assert answer.status_code == 200, answer.text
    return events_of(answer.text) if fields.get("stream") else answer.json()


def states_of(worker: FakeWorker) -> dict[int, list[float]]:
    """Return the state that the worker gave for each choice, in its last attempt."""
    return {r.choice: numbers_of(r) for r in worker.requests if is_reading(r)}


@pytest.mark.parametrize("asked", [True, "last"])
@pytest.mark.parametrize("path", ROUTES)
async def test_each_choice_has_its_own(
    router: Running, worker: FakeWorker, path: str, asked: bool | str
) -> None:
    worker.script = lambda request: [*ids_of(TEXT * (1 + request.choice)), EOS]
    fields = {"model": "local:tuned", "n": 2, "return_hidden_states": asked}
    answer = await ask(router, path, **fields)
    drawn = {r.choice: r for r in worker.requests if not is_reading(r)}
    for request in filter(is_reading, worker.requests):
        told = drawn[request.choice]
        text = ids_of(TEXT * (1 + request.choice))
        same = {
            "request_id": request.request_id,
            "prompt_ids": [*told.prompt_ids, *text],
            "sampling": SamplingParams(max_tokens=0),
            "vector": VectorParams(),
            "drafts": None,
            "deadline_s": request.deadline_s,
        }
        assert request == msgspec.structs.replace(told, **same)
        assert request.request_id != told.request_id
    assert {c["index"]: c["hidden_states"] for c in answer["choices"]} == states_of(worker)
    assert len(states_of(worker)) == 2
    assert answer["usage"]["completion_tokens"] == 3 * len(TEXT) + 2


@pytest.mark.parametrize("path", ROUTES)
async def test_streams_end_with_them(router: Running, worker: FakeWorker, path: str) -> None:
    worker.script = lambda request: [*ids_of(TEXT), EOS]
    fields = {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *events, last = await ask(router, path, **fields)
    assert last["choices"] == []
    found: dict[int, list[float]] = {}
    ended = set()
    for [choice] in (event["choices"] for event in events):
        part = choice.get("delta", choice)
        if "hidden_states" in part:
            assert choice["index"] in ended
            assert choice["finish_reason"] is None
            found[choice["index"]] = part["hidden_states"]
        elif choice["finish_reason"] is not None:
            ended.add(choice["index"])
    assert found == states_of(worker)
    assert len(found) == 2


@pytest.mark.parametrize("path", ROUTES)
async def test_who_does_not_ask_has_none(router: Running, worker: FakeWorker, path: str) -> None:
    for asked in (None, False):
        answer = await ask(router, path, return_hidden_states=asked)
        assert "hidden_states" not in answer["choices"][0]
    events = await ask(router, path, return_hidden_states=False, stream=True)
    assert "hidden_states" not in str(events)
    assert not any(map(is_reading, worker.requests))


async def test_a_stop_string_ends_what_is_read(router: Running, worker: FakeWorker) -> None:
    worker.script = lambda request: [*ids_of(TEXT), EOS]
    answer = await ask(router, "/v1/completions", stop=["wo"])
    [reading] = filter(is_reading, worker.requests)
    assert bytes(reading.prompt_ids).endswith(b"abcsome w")
    assert answer["choices"][0]["hidden_states"] == numbers_of(reading)


async def test_a_prompt_alone_has_its_own(router: Running, worker: FakeWorker) -> None:
    answer = await ask(router, "/v1/completions", max_tokens=0, echo=True)
    [reading] = filter(is_reading, worker.requests)
    assert bytes(reading.prompt_ids).endswith(b"abc")
    assert answer["choices"][0]["hidden_states"] == numbers_of(reading)


async def test_a_lost_worker_costs_no_state(router: Running, worker: FakeWorker) -> None:
    """Once under the text, and once under the state."""

    async def before_token(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        if request.attempt == 0 and (is_reading(request) or index == 3):
            worker.drop_connections()
        await asyncio.sleep(0)
        return None

    worker.script = lambda request: [*ids_of(TEXT), EOS]
    worker.before_token = before_token
    answer = await ask(router, "/v1/completions")
    assert [(is_reading(r), r.attempt) for r in worker.requests] == [
        *((False, 0), (False, 1)),
        *((True, 0), (True, 1)),
    ]
    choice = answer["choices"][0]
    assert choice["text"] == TEXT
    assert choice["hidden_states"] == states_of(worker)[0]


async def test_a_state_that_is_given_up(router: Running, worker: FakeWorker) -> None:
    """The answer is aborted while its state is read: the text stays, the state is missing."""

    async def before_token(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        if is_reading(request):
            await worker.until(lambda: bool(worker.aborts))
        return None

    worker.script = lambda request: [*ids_of(TEXT), EOS]
    worker.before_token = before_token
    asking = asyncio.create_task(ask(router, "/v1/completions", request_id="mine"))
    await worker.until(lambda: any(map(is_reading, worker.requests)))
    await router.client.post("/abort_request", json={"rid": "mine"})
    [choice] = (await asking)["choices"]
    assert choice["text"] == TEXT
    assert "hidden_states" not in choice
    assert [each.request_id for each in worker.aborts] == [worker.requests[-1].request_id]
    await router.until_idle()
