"""`/v1/messages` over HTTP."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.server.protocol import ErrorCode, GenerateRequest
from tests.router.fake_worker import BASE_NAME, EOS, FakeWorker, ids_of
from tests.router.generation.test_tools import ANSWER, THOUGHT, WEATHER, scripted
from tests.router.routes.test_keys import bearer, create, keyed
from tests.router.serving import Running, events_of

SAID = "base says hello 0"
WEATHER_TOOL = {
    "name": "weather",
    "input_schema": WEATHER["function"]["parameters"],
}


async def ask(router: Running, path: str = "", **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {"anthropic-version": "2023-06-01"})
    messages = [{"role": "user", "content": "ab"}]
    body = {"model": BASE_NAME, "messages": messages, "max_tokens": 64} | fields
    return await router.client.post(f"/v1/messages{path}", json=body, headers=headers)


async def test_text(router: Running, worker: FakeWorker) -> None:
    answer = await ask(router, system="Be kind", temperature=0)
    found = answer.json()
    assert [block["text"] for block in found["content"]] == [SAID]
    assert (found["type"], found["role"], found["stop_reason"]) == (
        "message",
        "assistant",
        "end_turn",
    )
    rendered = "<system>Be kind<user>ab<assistant>"
    assert worker.requests[-1].prompt_ids == ids_of(rendered)
    usage = found["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(rendered)
    assert usage["output_tokens"] == len(SAID) + 1
    request_id = answer.headers["x-request-id"]
    assert (found["id"], answer.headers["request-id"]) == (f"msg_{request_id}", request_id)


async def test_streams(router: Running) -> None:
    answer = await ask(router, stream=True, stop_sequences=["hello"])
    events = events_of(answer.text)
    pieces = [one["delta"]["text"] for one in events if one["type"] == "content_block_delta"]
    assert "".join(pieces) == "base says "
    assert len(pieces) > 1
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "hello"}
    assert answer.text.startswith("event: message_start\ndata: ")
    whole = (await ask(router, stop_sequences=["hello"])).json()
    assert (whole["content"][0]["text"], whole["stop_sequence"]) == ("base says ", "hello")


async def test_an_answer_goes_on(router: Running, worker: FakeWorker) -> None:
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    answer = await ask(router, messages=turns, max_tokens=4)
    assert answer.json()["stop_reason"] == "max_tokens"
    assert worker.requests[-1].prompt_ids == ids_of("<user>ab<assistant>ba")


async def test_an_answer_that_breaks_off(router: Running, worker: FakeWorker) -> None:
    async def fail(_: FakeWorker, request: GenerateRequest, index: int) -> ErrorCode | None:
        return "internal" if index == 2 else None

    worker.script = lambda _: [*ids_of("hello"), EOS]
    worker.before_token = fail
    streamed = await ask(router, stream=True)
    last = events_of(streamed.text)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert last["request_id"] == streamed.headers["x-request-id"]
    whole = await ask(router)
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "api_error")


async def test_count_is_that_of_the_answer(router: Running) -> None:
    for fields in ({}, {"system": "Be kind", "model": "org/a"}):
        counted = await ask(router, "/count_tokens", **fields)
        usage = (await ask(router, **fields)).json()["usage"]
        read = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert counted.json() == {"input_tokens": read}
    assert counted.headers["request-id"] == counted.headers["x-request-id"]
    long = await ask(router, "/count_tokens", system="x" * 5000)
    assert long.json()["input_tokens"] > 5000


@pytest.mark.parametrize("path", ["", "/count_tokens"])
async def test_errors(router: Running, path: str) -> None:
    missing = await ask(router, path, model="org/missing")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"
    assert missing.json()["request_id"] == missing.headers["request-id"]
    source = {"type": "url", "url": "https://a.b/c.png"}
    image = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    refused = await ask(router, path, messages=image)
    assert refused.status_code == 400
    assert "reads no images" in refused.json()["error"]["message"]
    assert (await router.client.get(f"/v1/messages{path}")).json()["type"] == "error"


async def test_faults_of_the_prompt_name_its_fields(tmp_path: Path, router: Running) -> None:
    long = await ask(router, max_tokens=5000)
    assert "context is" in long.json()["error"]["message"]
    async with scripted(tmp_path) as model:
        effort = await ask(model.router, model="", output_config={"effort": "low"})
        assert effort.headers["x-loraplex-unbound"] == "output_config.effort"


@pytest.mark.parametrize("path", ["", "/count_tokens"])
async def test_keys_of_both_headers(tmp_path: Path, worker: FakeWorker, path: str) -> None:
    async with keyed(tmp_path, worker) as router:
        key = await create(router, models=[BASE_NAME])
        for headers in (bearer(key), {"x-api-key": key}, bearer(key) | {"x-api-key": "x"}):
            assert (await ask(router, path, headers=headers)).status_code == 200
        for headers in ({}, {"x-api-key": "wrong"}, bearer("wrong") | {"x-api-key": key}):
            answer = await ask(router, path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"
        barred = await ask(router, path, model="pirate", headers={"x-api-key": key})
        assert (barred.status_code, barred.json()["error"]["type"]) == (403, "permission_error")


async def test_an_idempotency_key_is_one_callers(tmp_path: Path, worker: FakeWorker) -> None:
    async with keyed(tmp_path, worker) as router:
        keys = [await create(router) for _ in range(2)]
        answers = [
            await ask(router, headers={"x-api-key": key, "idempotency-key": "once"})
            for key in (keys[0], keys[0], keys[1])
        ]
    first, again, other = answers
    assert first.json() == again.json() != other.json()
    assert [a.headers.get("idempotency-replayed") for a in answers] == [None, "true", None]
    assert again.headers["request-id"] == again.headers["x-request-id"]


async def test_quotas(tmp_path: Path, worker: FakeWorker) -> None:
    async with keyed(tmp_path, worker) as router:
        key = await create(router, limits={"requests_per_minute": 1})
        headers = {"x-api-key": key}
        assert (await ask(router, headers=headers)).status_code == 200
        answer = await ask(router, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(answer.headers["retry-after"]) > 0


async def test_tools_and_reasoning(tmp_path: Path) -> None:
    """Calls go back with their results; the stream has the same blocks as the whole answer."""
    async with scripted(tmp_path) as model:
        whole = (await ask(model.router, model="", tools=[WEATHER_TOOL], max_tokens=512)).json()
        kinds = [block["type"] for block in whole["content"]]
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        assert whole["stop_reason"] == "tool_use"
        details = whole["usage"]["output_tokens_details"]
        assert details == {"thinking_tokens": len(THOUGHT)}
        assert whole["usage"]["output_tokens"] == len(ANSWER.encode()) + 1
        calls = [block for block in whole["content"] if block["type"] == "tool_use"]
        assert [call["input"] for call in calls] == [{"place": "Köln"}] * 2
        streamed = await ask(
            model.router, model="", tools=[WEATHER_TOOL], max_tokens=512, stream=True
        )
        begun = [e["content_block"] for e in events_of(streamed.text) if "content_block" in e]
        assert [block["type"] for block in begun] == kinds
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"} for call in calls
        ]
        turns = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": whole["content"]},
            {"role": "user", "content": results},
        ]
        await ask(model.router, model="", messages=turns, thinking={"type": "disabled"})
        called = '<tool_call>{"name": "weather", "arguments": {"place": "Köln"}}</tool_call>'
        assert model.prompt == (
            f"<user>hi<assistant>I look.{called * 2}<tool>rain<tool>rain<assistant><think></think>"
        )


async def test_metrics_and_the_log_know_the_route(router: Running) -> None:
    await ask(router)
    text = (await router.client.get("/metrics")).text
    assert 'loraplex_requests_total{route="/v1/messages",status="200"} 1.0' in text
    await ask(router, model="org/missing")
    text = (await router.client.get("/metrics")).text
    assert 'loraplex_request_errors_total{cause="adapter_not_found",kind="generation"} 1.0' in text
