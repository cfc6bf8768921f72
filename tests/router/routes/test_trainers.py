"""Bodies as TRL 1.16, SkyRL 0.3 and ART 0.5 send them, and vLLM's routes between steps."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.router.fake_worker import (
    BASE_NAME,
    EOS,
    MAX_CONTEXT,
    FakeWorker,
    ids_of,
    make_manifest,
    running_worker,
)
from tests.router.routes.test_keys import ADMIN, bearer, create, keyed
from tests.router.serving import Running, events_of, of_kept_router, poll, running_router

PIRATE = make_manifest("org/pirate").digest
TEXT = "base says hello 0"
SEED = 0x7EDC_BA98_7654_3210


async def post(router: Running, path: str, body: Any = None, **more: Any) -> httpx.Response:
    return await router.client.post(path, json=body, **more)


# TRL


async def test_what_trl_asks_before_training(router: Running, worker: FakeWorker) -> None:
    assert (await router.client.get("/health")).status_code == 200
    models = (await router.client.get("/v1/models")).json()
    assert models["data"][0]["max_model_len"] == MAX_CONTEXT
    asked = {"config_format": "json"}
    info = (await router.client.get("/server_info", params=asked)).json()
    config = info["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.float32"
    assert config["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert config["lora_config"] == {"max_lora_rank": 64, "max_loras": 16}
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["weight_transfer_config"] is None
    assert (info["context_length"], info["enable_lora"]) == (MAX_CONTEXT, True)  # SGLang's


async def test_the_processed_mode_is_told(tmp_path: Path, worker: FakeWorker) -> None:
    worker.shards = 2
    async with running_router(tmp_path, worker, logprobs_mode="processed_logprobs") as router:
        config = (await router.client.get("/server_info")).json()["vllm_config"]
        assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
        assert config["parallel_config"]["tensor_parallel_size"] == 2
        size = await router.client.get("/get_world_size")
        assert size.json() == {"world_size": 2}
        await post(router, "/v1/completions", {"prompt": "x", "logprobs": 0})
        assert worker.requests[-1].sampling.processed_logprobs


async def test_trls_samples(router: Running, worker: FakeWorker) -> None:
    """`AsyncGRPO`'s payload."""
    body = {
        "model": "pirate",
        "prompt": ids_of("hi"),
        "max_tokens": 40,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "n": 1,
        "return_token_ids": True,
        "logprobs": 0,
        "seed": SEED,
        "min_p": 0.1,
    }
    answer = await post(router, "/v1/completions", body)
    assert answer.headers["x-loraplex-adapter-digest"] == PIRATE
    choice = answer.json()["choices"][0]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])
    assert choice["token_ids"][-1] == EOS
    assert worker.requests[-1].seed == SEED


async def test_trls_vllm_client(router: Running, worker: FakeWorker) -> None:
    """`VLLMClient.generate`, with features of pictures and without; here there are none."""
    sampling = {
        "n": 2,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 30,
        "logprobs": 1,
    }
    texts = {
        "model": BASE_NAME,
        "prompt": [ids_of("a"), ids_of("bc")],
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **sampling,
    }
    choices = (await post(router, "/v1/completions", texts)).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices[::2]] == [ids_of("a"), ids_of("bc")]
    asked = {
        "request_id": "trl-1",
        "model": BASE_NAME,
        "token_ids": ids_of("a"),
        "features": None,
        "sampling_params": {**sampling, "output_kind": 2},
    }
    answer = (await post(router, "/inference/v1/generate", asked)).json()
    assert answer["request_id"] == "generate-tokens-trl-1"
    assert [choice["token_ids"] for choice in answer["choices"]] == [
        choice["token_ids"] for choice in choices[:2]
    ]
    for ours, theirs in zip(answer["choices"], choices[:2], strict=True):
        places = ours["logprobs"]["content"]
        assert [one["token"] for one in places] == theirs["logprobs"]["tokens"]
        assert [one["logprob"] for one in places] == theirs["logprobs"]["token_logprobs"]
        for one, top in zip(places, theirs["logprobs"]["top_logprobs"], strict=True):
            assert {near["token"] for near in one["top_logprobs"]} == top.keys()


# SkyRL


async def test_skyrls_external_client(router: Running, worker: FakeWorker) -> None:
    body = {
        "model": "pirate",
        "prompt": ids_of("hi"),
        "n": 2,
        "seed": 7,
        "max_tokens": 40,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "logprobs": True,
        "stream": False,
        "return_token_ids": True,
    }
    headers = {"X-Session-ID": "s-1", "authorization": "Bearer placeholder"}
    answer = await post(router, "/v1/completions", body, headers=headers)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])
        assert choice["finish_reason"] == "stop"
    assert worker.requests[-1].sampling.logprobs == 1
    nothing = await post(router, "/v1/completions", {"prompt": "x", "logprobs": False})
    assert nothing.json()["choices"][0]["logprobs"] is None


async def test_skyrls_remote_client(router: Running, worker: FakeWorker) -> None:
    body = {
        "sampling_params": {"n": 1, "logprobs": 0, "output_kind": 2, "prompt_logprobs": 1},
        "model": "pirate",
        "token_ids": ids_of("hi"),
        "cache_salt": "a",
    }
    answer = (await post(router, "/inference/v1/generate", body)).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    first, second = answer["prompt_logprobs"]
    assert first is None
    assert second[str(ord("i"))]["rank"] == 2
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    request = worker.requests[-1]
    assert request.salt
    assert request.sampling.temperature == 1


async def test_a_session_stays_where_it_was(tmp_path: Path) -> None:
    """Its prompts share no beginning that is long enough to be remembered."""
    async with (
        running_worker(FakeWorker(worker_id="a")) as a,
        running_worker(FakeWorker(worker_id="b")) as b,
        running_router(tmp_path, a, b) as router,
    ):

        async def both() -> bool:
            return sum(view.able for view in router.service.bases.first.fleet.views) == 2

        await poll(both)
        seen = dict.fromkeys("ab", 0)
        for number in range(6):
            headers = {"x-session-id": f"s{number}"}
            for prompt in "123":
                await post(router, "/v1/completions", {"prompt": prompt}, headers=headers)
            counts = {worker.worker_id: len(worker.requests) for worker in (a, b)}
            grown = [counts[name] - seen[name] for name in "ab"]
            assert sorted(grown) == [0, 3], "all of a session run on one worker"
            seen = counts


# Tokens in, tokens out


async def test_defaults_are_vllms(tmp_path: Path, worker: FakeWorker) -> None:
    """Not those that the model's files advise."""
    advised = {"temperature": 0.25, "top_k": 7.0, "repetition_penalty": 1.5}
    worker.card = msgspec.structs.replace(worker.card, sampling_defaults=advised)
    async with running_router(tmp_path, worker) as router:
        await post(router, "/inference/v1/generate", {"token_ids": [1], "sampling_params": {}})
        sampling = worker.requests[-1].sampling
        drawn = (sampling.temperature, sampling.top_k, sampling.repetition_penalty)
        assert drawn == (1.0, 0, 1.0)
        assert sampling.max_tokens == MAX_CONTEXT - 1


async def test_tokens_come_as_a_stream(router: Running) -> None:
    body = {
        "token_ids": ids_of("hi"),
        "sampling_params": {"logprobs": 0, "max_tokens": 40, "stop": ["hello"]},
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    answer = await post(router, "/inference/v1/generate", body)
    assert answer.text.endswith("data: [DONE]\n\n")
    *chunks, counts = events_of(answer.text)
    assert (counts["choices"], counts["usage"]["completion_tokens"]) == ([], 15)
    assert chunks[0]["prompt_token_ids"] == ids_of("hi")
    assert all(chunk["prompt_token_ids"] is None for chunk in chunks[1:])
    choices = [chunk["choices"][0] for chunk in chunks]
    ids = [token for choice in choices for token in choice["token_ids"]]
    assert bytes(ids) == b"base says hello"
    scored = [one["token_id"] for choice in choices for one in choice["logprobs"]["content"]]
    assert scored == ids
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "hello")


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_text_are_as_many_as_its_ids(router: Running, stream: bool) -> None:
    """A stop string takes tokens out of the text, and of `logprobs` unless ids are asked for."""
    for asks, count in ((True, len("base says hello")), (False, len("base says "))):
        body = {"prompt": "hi", "max_tokens": 40, "logprobs": 0, "stop": "hello", "stream": stream}
        answer = await post(router, "/v1/completions", body | {"return_token_ids": asks})
        parts = events_of(answer.text) if stream else [answer.json()]
        choices = [choice for part in parts for choice in part["choices"]]
        scored = [one for c in choices for one in (c["logprobs"] or {}).get("token_logprobs", ())]
        assert len(scored) == count
        assert "".join(choice["text"] for choice in choices) == "base says "
        if asks:
            assert sum(len(choice["token_ids"]) for choice in choices) == count


@of_kept_router
@of_kept_router
@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"token_ids": []}, "token_ids", "length"),
        ({"token_ids": [-1]}, "token_ids[0]", "0"),
        ({"token_ids": [999]}, "token_ids", "expected token ids from 0 to"),
        ({"features": {"mm_hashes": {}, "a": 1}}, "features", "text alone"),
        ({"output_mode": "text"}, "output_mode", "/v1/completions"),
        ({"sampling_params": {"top_p": 2}}, "sampling_params.top_p", "1"),
        ({"sampling_params": {"nonsense": 2}}, "sampling_params.nonsense", "Unrecognized"),
        ({"sampling_params": {"n": 99}}, "sampling_params.n", "at most 8"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs", "at most 20"),
        ({"sampling_params": {"logprobs": -1}}, "sampling_params.logprobs", "whole vocabulary"),
        (
            {"sampling_params": {"repetition_detection": {"min_count": 2}}},
            "sampling_params.repetition_detection",
            "repetition_penalty",
        ),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode", "logits are not sent"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params", "router's choice"),
        ({"prompt": "x"}, "prompt", "/v1/completions"),
    ],
)
async def test_what_tokens_refuse(
    kept_router: Running, body: dict[str, Any], param: str, said: str
) -> None:
    whole = {"token_ids": [1], "sampling_params": {}} | body
    answer = await post(kept_router, "/inference/v1/generate", whole)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]


async def test_what_asks_for_nothing_passes(router: Running) -> None:
    body = {
        "token_ids": [104],
        "output_mode": "tokens",
        "features": None,
        "content_parts": None,
        "token_offsets": [[0, 1]],
        "sampling_params": {
            "detokenize": False,
            "skip_special_tokens": False,
            "output_kind": 1,
            "watermarking": None,
            "max_tokens": 3,
        },
        "kv_transfer_params": None,
    }
    answer = await post(router, "/inference/v1/generate", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["logprobs"] is None
    assert answer.json()["choices"][0]["finish_reason"] == "length"


# Pauses


async def paused(router: Running) -> bool:
    told: bool = (await router.client.get("/is_paused")).json()["is_paused"]
    return told


async def until_waiting(router: Running, count: int) -> None:
    async def waiting() -> bool:
        return len(router.service.bases.first.fleet.queue) == count

    await poll(waiting)


class Hold:
    """Tokens from `index` on wait for `release`."""

    def __init__(self, index: int = 0) -> None:
        self.index, self.release = index, asyncio.Event()

    async def __call__(self, worker: FakeWorker, request: Any, index: int) -> None:
        if index >= self.index:
            await self.release.wait()


async def test_keep_holds_new_ones_and_lets_running_ones_go_on(
    router: Running, worker: FakeWorker
) -> None:
    worker.before_token = hold = Hold(2)
    running = asyncio.create_task(post(router, "/v1/completions", {"prompt": "x"}))
    await worker.until(lambda: len(worker.requests) == 1)
    answer = await router.client.post("/pause", params={"mode": "keep"})
    assert (answer.status_code, answer.json()) == (200, {"status": "paused"})
    assert await paused(router)
    waiting = asyncio.create_task(post(router, "/v1/completions", {"prompt": "y"}))
    await until_waiting(router, 1)
    hold.release.set()
    assert (await running).json()["choices"][0]["text"] == TEXT[:16]
    assert not waiting.done()
    assert len(worker.requests) == 1
    # A version may be loaded meanwhile; that is what the pause is for.
    loaded = {"lora_name": "v2", "lora_path": "hub:org/v2", "load_inplace": False}
    assert (await post(router, "/v1/load_lora_adapter", loaded)).status_code == 200
    answer = await router.client.post("/resume")
    assert (answer.status_code, answer.json()) == (200, {"status": "resumed"})
    assert (await waiting).status_code == 200
    assert not await paused(router)
    records = (await router.client.get("/v1/audit")).json()["data"]
    assert {"POST /pause", "POST /resume"} <= {record["action"] for record in records}


async def test_wait_answers_when_nothing_runs(router: Running, worker: FakeWorker) -> None:
    worker.before_token = hold = Hold()
    running = asyncio.create_task(post(router, "/v1/completions", {"prompt": "x"}))
    await worker.until(lambda: len(worker.requests) == 1)
    asked = {"mode": "wait", "clear_cache": "false"}
    pausing = asyncio.create_task(router.client.post("/pause", params=asked))
    await poll(lambda: paused(router))
    assert not pausing.done()
    hold.release.set()
    assert (await running).status_code == 200
    assert (await pausing).json() == {"status": "paused"}
    assert not router.service.bases.first.fleet.views[0].in_flight
    await router.client.post("/resume")


async def test_abort_ends_all_with_what_there_was(router: Running, worker: FakeWorker) -> None:
    """It is vLLM's default. Those that wait are ended, too; later ones wait."""
    worker.before_token = hold = Hold(15)
    body = {"token_ids": [104], "sampling_params": {}}
    running = asyncio.create_task(post(router, "/inference/v1/generate", {**body, "stream": True}))
    await worker.until(lambda: len(worker.requests) == 1)
    answer = await router.client.post("/pause")
    assert answer.json() == {"status": "paused"}
    choices = [event["choices"][0] for event in events_of((await running).text)]
    assert choices[-1]["finish_reason"] == "abort"
    waiting = asyncio.create_task(post(router, "/inference/v1/generate", body))
    await until_waiting(router, 1)
    assert (await router.client.post("/pause")).json() == {"status": "paused"}
    ended = (await waiting).json()["choices"][0]
    assert (ended["finish_reason"], ended["token_ids"]) == ("abort", [])
    hold.release.set()
    later = asyncio.create_task(post(router, "/inference/v1/generate", body))
    await until_waiting(router, 1)
    await router.client.post("/resume")
    assert (await later).json()["choices"][0]["finish_reason"] == "stop"


async def test_a_resume_ends_what_waits_for_the_end(router: Running, worker: FakeWorker) -> None:
    worker.before_token = hold = Hold()
    running = asyncio.create_task(post(router, "/v1/completions", {"prompt": "x"}))
    await worker.until(lambda: len(worker.requests) == 1)
    pausing = asyncio.create_task(router.client.post("/pause", params={"mode": "wait"}))
    await poll(lambda: paused(router))
    await router.client.post("/resume")
    assert (await pausing).json() == {"status": "resumed"}
    hold.release.set()
    assert (await running).status_code == 200


async def test_a_pause_is_the_operators(tmp_path: Path, worker: FakeWorker) -> None:
    async with keyed(tmp_path, worker) as router:
        own = bearer(await create(router))
        for path in ("/pause", "/resume"):
            assert (await router.client.post(path, headers=own)).status_code == 401
            answer = await router.client.post(path, headers=ADMIN)
            assert answer.status_code == 200, answer.text
        assert (await router.client.get("/get_world_size")).status_code == 200


@pytest.mark.parametrize(
    ("query", "said"), [("mode=freeze", "abort, wait, keep"), ("level=1", "unknown parameter")]
)
async def test_bad_pauses(router: Running, query: str, said: str) -> None:
    answer = await router.client.post(f"/pause?{query}")
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert not await paused(router)


async def test_one_process_of_several_cannot_pause_them_all(
    tmp_path: Path, worker: FakeWorker
) -> None:
    async with running_router(tmp_path, worker) as router:
        config = router.service.config
        object.__setattr__(config, "router_processes", 2)
        answer = await router.client.post("/pause?mode=keep")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
        assert not await paused(router)


# Unloading


async def test_an_unload_does_not_wait_for_what_runs(router: Running, worker: FakeWorker) -> None:
    """ART's and TRL's: the running request ends on its version, which then leaves the device."""
    worker.before_token = hold = Hold(1)
    loaded = {"lora_name": "v1", "lora_path": "hub:org/v1", "load_inplace": False}
    assert (await post(router, "/v1/load_lora_adapter", loaded)).status_code == 200
    digest = make_manifest("org/v1").digest
    asked = {"model": "v1", "prompt": "x"}
    running = asyncio.create_task(post(router, "/v1/completions", asked))
    await worker.until(lambda: len(worker.requests) == 1)
    answer = await post(router, "/v1/unload_lora_adapter", {"lora_name": "v1"})
    assert (answer.status_code, running.done()) == (200, False)
    assert (await post(router, "/v1/completions", asked)).status_code == 410

    def evicts() -> list[tuple[str, tuple[str, ...]]]:
        return [order for order in worker.orders if order[0] == "evict"]

    assert not evicts()
    hold.release.set()
    ended = await running
    assert (ended.status_code, ended.headers["x-loraplex-adapter-digest"]) == (200, digest)
    await worker.until(lambda: bool(evicts()))
    assert all(digests == (digest,) for _, digests in evicts())


async def test_a_name_is_a_folder_below_the_root_at_its_first_use(
    tmp_path: Path, worker: FakeWorker
) -> None:
    """SkyRL's: nobody has loaded it, and its name has two parts."""
    async with running_router(tmp_path, worker, default_source="local") as router:
        body = {"model": "model_1f3c_000010", "prompt": [104], "logprobs": True}
        assert (await post(router, "/v1/completions", body)).status_code == 200
        ref = worker.loads[-1].ref
        assert (ref.source, ref.name) == ("local", "model_1f3c_000010")
