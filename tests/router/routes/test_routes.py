"""Every route, in both shapes, whole and streamed."""

import asyncio
import json

import msgspec
import pytest

from loraplex.router.call import TextEvent
from loraplex.router.http import sse
from loraplex.router.text.stream import ChoiceStream
from loraplex.server.protocol import ErrorCode, GenerateRequest, TokenEvent
from tests.router.fake_worker import BASE_NAME, BOS, EOS, FakeWorker, ids_of, make_manifest
from tests.router.serving import Running, events_of

PIRATE = make_manifest("org/pirate").digest


async def test_generate(router: Running) -> None:
    answer = await router.client.post(
        "/generate", json={"inputs": "hi", "parameters": {"details": True}}
    )
    body = answer.json()
    assert body["generated_text"] == "base says hello 0"
    assert body["details"]["prompt_tokens"] == 2
    assert body["details"]["finish_reason"] == "eos_token"
    assert "x-loraplex-adapter-digest" not in answer.headers


async def test_lorax_headers(router: Running) -> None:
    body = {"inputs": "hi", "parameters": {"adapter_id": "pirate"}}
    whole = (await router.client.post("/generate", json=body)).headers
    assert (whole["x-model-id"], whole["x-adapter-id"]) == (BASE_NAME, "pirate")
    assert (whole["x-prompt-tokens"], whole["x-generated-tokens"]) == ("2", "20")
    assert int(whole["x-total-time"]) >= int(whole["x-time-to-first-token"])
    streamed = (await router.client.post("/generate_stream", json=body)).headers
    assert (streamed["x-model-id"], streamed["x-adapter-id"]) == (BASE_NAME, "pirate")


async def test_root_answers_a_list_or_a_stream(router: Running) -> None:
    whole = await router.client.post("/", json={"inputs": "hi"})
    assert [item["generated_text"] for item in whole.json()] == ["base says hello 0"]
    streamed = await router.client.post("/", json={"inputs": "hi", "stream": True})
    assert events_of(streamed.text)[-1]["generated_text"] == "base says hello 0"
    assert (await router.client.get("/")).status_code == 200
    browser = await router.client.get("/", headers={"accept": "text/html,*/*;q=0.8"})
    assert (browser.status_code, browser.headers["location"]) == (307, "console")


async def test_generate_stream(router: Running) -> None:
    body = {"inputs": "hi", "parameters": {"adapter_id": "pirate", "max_new_tokens": 6}}
    answer = await router.client.post("/generate_stream", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-loraplex-adapter-digest"] == PIRATE
    events = events_of(answer.text)
    assert "".join(event["token"]["text"] for event in events) == PIRATE[:6]
    assert "[DONE]" not in answer.text


async def test_completions(router: Running) -> None:
    body = {"model": "pirate", "prompt": [[97], [98, 99]], "n": 2, "max_tokens": 8}
    answer = await router.client.post("/v1/completions", json=body)
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert {choice["text"] for choice in choices} == {f"{PIRATE[:6]} s"}
    assert answer.json()["usage"]["prompt_tokens"] == 3
    assert answer.headers["x-loraplex-adapter-digest"] == PIRATE


async def test_completions_stream(router: Running) -> None:
    body = {"model": BASE_NAME, "prompt": "a", "n": 2, "stream": True, "max_tokens": 99}
    answer = await router.client.post("/v1/completions", json=body)
    assert answer.text.endswith("data: [DONE]\n\n")
    texts = {0: "", 1: ""}
    for event in events_of(answer.text):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "base says hello 0", 1: "base says hello 1"}


async def test_chat(router: Running, worker: FakeWorker) -> None:
    body = {"model": BASE_NAME, "messages": [{"role": "user", "content": "hi"}]}
    answer = await router.client.post("/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == "base says hello 0"
    assert bytes(worker.requests[0].prompt_ids) == b"<user>hi<assistant>"
    streamed = await router.client.post("/v1/chat/completions", json={**body, "stream": True})
    deltas = [event["choices"][0]["delta"] for event in events_of(streamed.text)]
    assert "".join(delta.get("content") or "" for delta in deltas) == "base says hello 0"


async def test_an_adapters_own_chat_template(router: Running, worker: FakeWorker) -> None:
    async def load(_: object) -> object:
        return make_manifest("org/shouty", chat_template="{{ messages[0].content | upper }}!")

    worker.loader = load  # type: ignore[assignment]
    body = {"model": "org/shouty", "messages": [{"role": "user", "content": "hi"}]}
    answer = await router.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert bytes(worker.requests[0].prompt_ids) == b"HI!"


def chat(content: str, **fields: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    return {"model": BASE_NAME, "messages": messages, **fields}


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, b"<user>hi<assistant>o<assistant>"),
        ({"add_generation_prompt": False}, b"<user>hi<assistant>o"),
        ({"continue_final_message": True}, b"<user>hi<assistant>o"),
        ({"chat_template": "default"}, b"<user>hi<assistant>o<assistant>"),
    ],
)
async def test_how_a_chats_prompt_ends(
    router: Running, worker: FakeWorker, fields: dict[str, object], prompt: bytes
) -> None:
    answer = await router.client.post("/v1/chat/completions", json=chat("o", **fields))
    assert answer.status_code == 200, answer.text
    assert bytes(worker.requests[0].prompt_ids) == prompt


@pytest.mark.parametrize("model", [BASE_NAME, "org/own"])
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"documents": [{"text": "a"}]}, "documents", "unsupported_parameter"),
        ({"chat_template": "rag"}, "chat_template", "unsupported_parameter"),
        ({"chat_template": "{{ messages }}"}, "chat_template", "unsupported_parameter"),
        (
            {"chat_template_kwargs": {"bos_token": "x"}},
            "chat_template_kwargs.bos_token",
            None,
        ),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", None),
    ],
)
async def test_what_a_template_does_not_take_is_refused(
    router: Running,
    worker: FakeWorker,
    model: str,
    fields: dict[str, object],
    param: str,
    code: str | None,
) -> None:
    async def load(_: object) -> object:
        return make_manifest("org/own", chat_template="{{ messages[0].content }}")

    worker.loader = load  # type: ignore[assignment]
    body = chat("o", **fields) | {"model": model}
    answer = await router.client.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)


@pytest.mark.parametrize(
    ("fields", "prompt"), [({}, b"d"), ({"chat_template": "rag", "documents": [{"a": 1}]}, b"r1")]
)
async def test_a_template_of_an_adapter_by_its_name(
    router: Running, worker: FakeWorker, fields: dict[str, object], prompt: bytes
) -> None:
    async def load(_: object) -> object:
        named = {"rag": "r{{ documents | length }}"}
        return make_manifest("org/own", chat_template="d", named_templates=named)

    worker.loader = load  # type: ignore[assignment]
    body = chat("o", **fields) | {"model": "org/own"}
    answer = await router.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert bytes(worker.requests[0].prompt_ids) == prompt


async def test_an_adapters_own_special_tokens(router: Running, worker: FakeWorker) -> None:
    """The base has `<bos>` and `<eos>`."""

    async def load(_: object) -> object:
        template = "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ call }}"
        tokens = {"unk_token": None, "eos_token": "!", "call": "?"}
        return make_manifest("org/own", chat_template=template, special_tokens=tokens)

    worker.loader = load  # type: ignore[assignment]
    body = {"model": "org/own", "messages": [{"role": "user", "content": "hi"}]}
    answer = await router.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert worker.requests[0].prompt_ids == [BOS, *b"!?"]


async def test_stop_string_ends_the_worker_too(router: Running, worker: FakeWorker) -> None:
    body = {"model": BASE_NAME, "prompt": "a", "stop": "says"}
    answer = await router.client.post("/v1/completions", json=body)
    choice = answer.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("base ", "stop")
    await worker.until(lambda: len(worker.aborts) == 1)
    assert worker.aborts[0].request_id == worker.requests[0].request_id


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_a_pattern_ends_the_worker_too(
    router: Running, worker: FakeWorker, path: str
) -> None:
    prompt = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    key = "prompt" if path == "completions" else "messages"
    body = {"model": BASE_NAME, key: prompt[key], "stop_regex": "[st]ays|says"}
    choice = (await router.client.post(f"/v1/{path}", json=body)).json()["choices"][0]
    text = choice["text"] if path == "completions" else choice["message"]["content"]
    assert (text, choice["finish_reason"]) == ("base ", "stop")
    await worker.until(lambda: len(worker.aborts) == 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_slow_pattern_fails_its_request_alone(
    router: Running, worker: FakeWorker, stream: bool
) -> None:
    worker.script = lambda request: [*ids_of("x" * 400), EOS]
    body = {"model": BASE_NAME, "prompt": "a", "max_tokens": 500, "stream": stream}
    slow = await router.client.post("/v1/completions", json={**body, "stop_regex": "(x+x+)+y"})
    # A stream may have begun.
    assert slow.status_code == 400 or stream
    assert "takes too long to look for" in slow.text
    await worker.until(lambda: len(worker.aborts) == 1)
    plain = await router.client.post("/v1/completions", json=body)
    assert "x" * 100 in plain.text or stream


async def test_every_request_gets_a_seed(router: Running, worker: FakeWorker) -> None:
    for parameters in ({}, {}, {"seed": 7}):
        await router.client.post("/generate", json={"inputs": "x", "parameters": parameters})
    seeds = [request.seed for request in worker.requests]
    assert seeds[2] == 7
    assert len(set(seeds)) == 3


async def test_prompts_of_one_request_are_drawn_apart(router: Running, worker: FakeWorker) -> None:
    """Else equal prompts would get equal answers, however high the temperature."""
    body = {"model": BASE_NAME, "prompt": ["a", "a", "a"], "n": 2}
    await router.client.post("/v1/completions", json=body)
    drawn = {(request.seed, request.choice) for request in worker.requests}
    assert len(drawn) == len(worker.requests) == 6
    await router.client.post("/v1/completions", json={**body, "seed": 7})
    assert {request.seed for request in worker.requests[6:]} == {7}


async def test_max_tokens_defaults_to_what_fits(router: Running, worker: FakeWorker) -> None:
    await router.client.post("/generate", json={"inputs": "12345"})
    assert worker.requests[0].sampling.max_tokens == worker.card.max_context - 5


async def test_truncate_keeps_the_last_tokens(router: Running, worker: FakeWorker) -> None:
    body = {"inputs": "x" * 5000 + "end", "parameters": {"truncate": 4}}
    assert (await router.client.post("/generate", json=body)).status_code == 200
    assert bytes(worker.requests[0].prompt_ids) == b"xend"


async def test_best_of_takes_the_likeliest(router: Running, worker: FakeWorker) -> None:
    # The fake worker's log-probabilities fall with the choice's number.
    worker.script = lambda request: [*ids_of(f"choice {request.choice}"), EOS]
    body = {"model": BASE_NAME, "prompt": "a", "best_of": 3, "n": 1, "temperature": 1}
    answer = await router.client.post("/v1/completions", json=body)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["choice 0"]
    assert len({request.choice for request in worker.requests}) == 3
    assert len({request.request_id for request in worker.requests}) == 1


async def test_adapters(router: Running) -> None:
    before = (await router.client.get("/v1/adapters")).json()["data"]
    assert [(item["id"], item["digest"]) for item in before] == [("pirate", None)]
    await router.client.post(
        "/generate", json={"inputs": "x", "parameters": {"adapter_id": "pirate"}}
    )
    after = (await router.client.get("/v1/adapters")).json()["data"]
    assert after[0]["digest"] == PIRATE


async def test_health_info_and_description(router: Running) -> None:
    for path in ("/health", "/health/live", "/health/ready"):
        assert (await router.client.get(path)).status_code == 200
    info = (await router.client.get("/info")).json()
    assert info["model_id"] == BASE_NAME
    assert info["max_total_tokens"] == 512
    described = set((await router.client.get("/openapi.json")).json()["paths"])
    assert {"/generate", "/v1/chat/completions"} <= described


async def test_metrics(router: Running) -> None:
    await router.client.post("/generate", json={"inputs": "hi"})
    await router.client.get("/nowhere/1")
    await router.client.get("/nowhere/2")
    text = (await router.client.get("/metrics")).text
    assert 'loraplex_requests_total{route="/generate",status="200"} 1.0' in text
    assert 'loraplex_requests_total{route="other",status="404"} 2.0' in text
    assert "nowhere" not in text
    assert await router.metric("loraplex_generated_tokens_total") == 18
    assert await router.metric("loraplex_prompt_tokens_total") == 2
    assert await router.metric("loraplex_time_to_first_token_seconds_count") == 1
    assert await router.metric("loraplex_workers_ready") == 1


async def test_requests_are_counted_by_route(router: Running) -> None:
    """Whatever name stands in the path."""
    for method, path in (
        ("GET", "/v1/adapters/pirate"),
        ("GET", "/v1/adapters/nobody"),
        ("DELETE", "/v1/adapters/pirate/load"),
        ("GET", "/v1/models/pirate"),
        ("GET", "/console/console.css"),
        ("GET", "/"),
    ):
        await router.client.request(method, path)
    text = (await router.client.get("/metrics")).text
    for route, status in (
        ("/v1/adapters/{name}", 200),
        ("/v1/adapters/{name}", 404),
        ("/v1/adapters/{name}/load", 405),
        ("/v1/models/{name:path}", 200),
        ("/console/{file}", 200),
        ("/health", 200),
    ):
        assert f'loraplex_requests_total{{route="{route}",status="{status}"}} 1.0' in text
    assert 'route="other"' not in text


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("abc-1.2_3:4", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("has space", False),
        ("-dash-first", False),
        ("", False),
    ],
)
async def test_request_ids(router: Running, sent: str, kept: bool) -> None:
    for path in ("/health", "/nowhere", "/v1/nowhere"):
        answer = await router.client.get(path, headers={"x-request-id": sent})
        got = answer.headers["x-request-id"]
        assert (got == sent) == kept
        assert got


async def test_equal_request_ids_do_not_meet_on_the_wire(
    router: Running, worker: FakeWorker
) -> None:
    for _ in range(2):
        headers = {"x-request-id": "same"}
        await router.client.post("/generate", json={"inputs": "x"}, headers=headers)
    assert len({request.request_id for request in worker.requests}) == 2


async def test_openai_answers_carry_the_request_id(router: Running) -> None:
    answer = await router.client.post(
        "/v1/completions", json={"model": BASE_NAME, "prompt": "x"}, headers={"x-request-id": "q1"}
    )
    assert "q1" in answer.json()["id"]


async def test_streams_are_the_same_as_whole_answers(router: Running, worker: FakeWorker) -> None:
    text = "naïve 🏴‍☠️ 漢字\u2028 end"
    worker.script = lambda request: [*ids_of(text), EOS]
    body = {"model": BASE_NAME, "prompt": "x", "max_tokens": 99}
    whole = await router.client.post("/v1/completions", json=body)
    streamed = await router.client.post("/v1/completions", json={**body, "stream": True})
    assert whole.json()["choices"][0]["text"] == text
    pieces = [event["choices"][0]["text"] for event in events_of_bytes(streamed.content)]
    assert "".join(pieces) == text


def events_of_bytes(content: bytes) -> list[dict[str, list[dict[str, str]]]]:
    """Split at newlines only: `str.splitlines` would split at the text's own line ends."""
    lines = [line[6:] for line in content.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


async def test_wire_requests_are_as_asked(router: Running, worker: FakeWorker) -> None:
    body = {
        "model": BASE_NAME,
        "prompt": "x",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 3,
        "seed": 11,
        "logit_bias": {"65": 2},
        "stop_token_ids": [33],
    }
    answer = await router.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    sent = worker.requests[0]
    assert (sent.seed, sent.attempt, sent.accepted_ids) == (11, 0, [])
    assert sent.deadline_s is not None
    assert 0 < sent.deadline_s < 601
    sampling = msgspec.structs.asdict(sent.sampling)
    expected = {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 3,
        "logit_bias": {65: 2.0},
        "stop_token_ids": (33,),
    }
    assert {name: sampling[name] for name in expected} == expected


async def test_idle_streams_are_kept_alive(
    router: Running, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)
    gate = asyncio.Event()

    async def before_token(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        if index == 2:
            await gate.wait()
        return None

    worker.before_token = before_token
    body = {"inputs": "x", "parameters": {"max_new_tokens": 4}}
    comments = 0
    lines = []
    async with router.client.stream("POST", "/generate_stream", json=body) as answer:
        async for line in answer.aiter_lines():
            lines.append(line)
            comments += line.startswith(":")
            if comments == 2:
                gate.set()
    events = events_of("\n".join(lines))
    assert [event["token"]["text"] for event in events] == list("base")


async def test_an_unforeseen_error_shows_nothing(
    router: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("/secret/path.py")

    monkeypatch.setattr(router.service.dispatcher, "start", fail)
    headers = {"x-request-id": "find-me"}
    for path, body in (
        ("/generate", {"inputs": "x"}),
        ("/v1/completions", {"model": BASE_NAME, "prompt": "x"}),
    ):
        answer = await router.client.post(path, json=body, headers=headers)
        assert answer.status_code == 500
        assert answer.headers["x-request-id"] == "find-me"
        assert "secret" not in answer.text
        assert "find-me" in str(answer.json()["error"])
    assert "find-me" in caplog.text


async def test_an_unforeseen_error_in_a_stream_is_an_event(
    router: Running, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = ChoiceStream.feed

    def fail_late(stream: ChoiceStream, event: TokenEvent) -> TextEvent | None:
        if event.index == 3:
            raise RuntimeError("/secret/path.py")
        return feed(stream, event)

    monkeypatch.setattr(ChoiceStream, "feed", fail_late)
    body = {"model": BASE_NAME, "prompt": "x", "stream": True}
    answer = await router.client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert events_of(answer.text)[-1]["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    await worker.until(lambda: len(worker.aborts) == 1)
    await router.until_idle()
