"""SGLang's routes: the benchmark's own requests, adapters, the server's description."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.fake_worker import BASE_NAME, EOS, FakeWorker, ids_of, make_manifest
from tests.router.routes.test_keys import ADMIN, bearer, create, keyed
from tests.router.serving import Running, events_of, running_router

PIRATE = make_manifest("org/pirate").digest
TEXT = "base says hello 0"


async def generate(router: Running, **body: Any) -> httpx.Response:
    return await router.client.post("/generate", json=body)


async def test_a_text(router: Running) -> None:
    answer = await generate(router, text="hi")
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["text"] == TEXT
    assert body["output_ids"] == [*ids_of(TEXT), EOS]
    meta = body["meta_info"]
    assert meta["id"] == answer.headers["x-request-id"]
    assert meta["finish_reason"] == {"type": "stop", "matched": EOS}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (2, len(TEXT) + 1)
    assert meta["e2e_latency"] > 0
    assert "x-model-id" not in answer.headers


async def test_what_ended_it(router: Running) -> None:
    async def reason(**sampling: Any) -> Any:
        answer = await generate(router, text="hi", sampling_params=sampling)
        return answer.json()["text"], answer.json()["meta_info"]["finish_reason"]

    assert await reason(stop=["says", "x"]) == ("base ", {"type": "stop", "matched": "says"})
    pattern = {"type": "stop", "matched": r"sa.*\b"}
    assert await reason(stop_regex=["z", r"sa.*\b"]) == ("base ", pattern)
    assert await reason(stop_regex=r"sa.*\b", no_stop_trim=True) == ("base sa", pattern)
    assert await reason(max_new_tokens=4) == ("base", {"type": "length", "length": 4})
    stopped = {"type": "stop", "matched": ord("y")}
    assert await reason(stop_token_ids=[ord("y")]) == ("base sa", stopped)
    assert await reason(stop="says", no_stop_trim=True) == (
        "base says",
        {"type": "stop", "matched": "says"},
    )


async def test_an_adapter(router: Running, worker: FakeWorker) -> None:
    for prompt in ({"text": "hi"}, {"input_ids": ids_of("hi")}):
        answer = await generate(router, **prompt, lora_path="pirate")
        assert answer.json()["text"].startswith(PIRATE[:6])
        assert answer.headers["x-loraplex-adapter-digest"] == PIRATE
        assert worker.requests[-1].prompt_ids == ids_of("hi")


async def test_several(router: Running) -> None:
    answer = await generate(router, text=["a", "b"], sampling_params={"n": 2})
    assert [one["text"][-1] for one in answer.json()] == ["0", "1", "0", "1"]
    ids = [one["meta_info"]["id"] for one in answer.json()]
    assert ids == [f"{answer.headers['x-request-id']}_{i}" for i in range(4)]


async def test_a_stream(router: Running) -> None:
    answer = await generate(router, text="hi", lora_path="pirate", stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    events = events_of(answer.text)
    texts = [event["text"] for event in events]
    assert all(later.startswith(text) for text, later in zip(texts, texts[1:], strict=False))
    last = events[-1]
    assert last["text"].startswith(PIRATE[:6])
    assert last["meta_info"]["finish_reason"]["type"] == "stop"
    assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])


async def test_the_prompt_alone(router: Running, worker: FakeWorker) -> None:
    scored = {"return_logprob": True, "logprob_start_len": 0}
    await generate(router, text="hi", sampling_params={"max_new_tokens": 0}, **scored)
    sampling = worker.requests[-1].sampling
    assert (sampling.max_tokens, sampling.prompt_logprobs) == (0, 0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": "hi", "sampling_params": {"nonsense": 1}}, "sampling_params.nonsense"),
        ({"text": ""}, "text"),
        ({"text": "hi", "sampling_params": {"max_new_tokens": 5000}}, "text"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 5000}}, "input_ids"),
        ({"input_ids": [1, 10**6]}, "input_ids"),
        ({"input_ids": [[1], [1, 10**6]]}, "input_ids"),
        ({"input_ids": [1, 10**6], "max_tokens": 4}, "input_ids"),  # LMDeploy's shape
        ({"input_ids": [1], "max_tokens": 5000}, "input_ids"),
        ({"prompt": "hi", "max_tokens": 5000}, "prompt"),
    ],
)
async def test_errors(router: Running, body: dict[str, Any], param: str) -> None:
    answer = await generate(router, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_an_adapter_that_is_not_there(router: Running) -> None:
    answer = await generate(router, text="hi", lora_path="org/missing", stream=True)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "lora_path")


async def test_a_mixture(router: Running) -> None:
    answer = await generate(router, text="hi", inputs="hi")
    assert answer.status_code == 422
    assert "`text`: give it or `inputs`, not both" in answer.json()["error"]


async def test_a_retry_of_a_stream(router: Running, worker: FakeWorker) -> None:
    headers = {"Idempotency-Key": "a"}
    body = {"text": "hi", "stream": True}
    first = await router.client.post("/generate", json=body, headers=headers)
    again = await router.client.post("/generate", json=body, headers=headers)
    assert (first.status_code, again.status_code, len(worker.requests)) == (200, 409, 1)


async def test_keys_and_tenants(tmp_path: Path, worker: FakeWorker) -> None:
    async with keyed(tmp_path, worker) as router:
        body = {"text": "hi", "lora_path": "org/other"}
        assert (await generate(router, **body)).status_code == 401
        mine = bearer(await create(router, tenant="acme", models=[BASE_NAME]))
        answer = await router.client.post("/generate", json=body, headers=mine)
        assert (answer.status_code, answer.json()["error"]["param"]) == (403, "lora_path")
        answer = await router.client.post("/generate", json={"text": "hi"}, headers=mine)
        assert (answer.status_code, worker.requests[-1].salt) == (200, "acme")
        named = {"lora_name": "a", "lora_path": "hub:org/a"}
        for path in ("/load_lora_adapter", "/unload_lora_adapter"):
            refused = await router.client.post(path, json=named, headers=mine)
            assert refused.status_code == 401
        assert (await router.client.post("/flush_cache")).status_code == 401
        for path in ("/model_info", "/server_info", "/health_generate"):
            assert (await router.client.get(path)).status_code == 200
        loaded = await router.client.post("/load_lora_adapter", json=named, headers=ADMIN)
        assert loaded.json()["loaded_adapters"].keys() == {"a", "pirate"}


async def test_adapters_come_and_go(router: Running) -> None:
    post = router.client.post
    body = {"lora_name": "mine", "lora_path": "hub:org/one", "pinned": True, "lora_id": "x"}
    loaded = await post("/load_lora_adapter", json=body)
    names = {"pirate": "hub:org/pirate", "mine": "hub:org/one"}
    assert loaded.json() == {"success": True, "error_message": None, "loaded_adapters": names}
    shown = (await router.client.get("/v1/adapters/mine")).json()
    assert (shown["pinned"], len(shown["resident_on"])) == (True, 1)
    again = await post("/load_lora_adapter", json=body)
    assert (again.status_code, again.json()["error"]["code"]) == (400, "conflict")
    gone = await post("/unload_lora_adapter", json={"lora_name": "mine"})
    assert gone.json()["loaded_adapters"] == {"pirate": "hub:org/pirate"}
    assert (await post("/unload_lora_adapter", json={"lora_name": "mine"})).status_code == 404


@pytest.mark.parametrize("older", ["", "get_"])
async def test_descriptions(router: Running, older: str) -> None:
    model = (await router.client.get(f"/{older}model_info")).json()
    assert (model["model_path"], model["tokenizer_path"]) == (BASE_NAME, BASE_NAME)
    server = (await router.client.get(f"/{older}server_info")).json()
    assert server["internal_states"][0].get("avg_spec_accept_length") is None
    assert server["internal_states"][0]["workers_ready"] == 1


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_nothing_is_flushed(router: Running, method: str) -> None:
    answer = await router.client.request(method, "/flush_cache")
    assert answer.status_code == 400
    assert "nothing was flushed" in answer.json()["error"]["message"]


async def test_health_generate(tmp_path: Path, router: Running) -> None:
    assert (await router.client.get("/health_generate")).status_code == 200
    async with running_router(tmp_path / "alone") as alone:
        assert (await alone.client.get("/health_generate")).status_code == 503


async def test_lmdeploys_shape(router: Running) -> None:
    answer = await generate(router, prompt="hi", lora_path="pirate", max_tokens=6)
    body = answer.json()
    assert (body["text"], body["meta_info"]["finish_reason"]["type"]) == (PIRATE[:6], "length")
    assert answer.headers["x-loraplex-adapter-digest"] == PIRATE
    streamed = await generate(router, input_ids=ids_of("hi"), max_tokens=6, stream=True)
    assert "".join(event["text"] for event in events_of(streamed.text)) == TEXT[:6]
    refused = await generate(router, prompt="x" * 100_000, max_tokens=1)
    assert refused.json()["error"]["param"] == "prompt"
