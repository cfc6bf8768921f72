"""Fields of a request that reach the worker and come back, over HTTP."""

from pathlib import Path
from typing import Any

import pytest

from tests.router.fake_worker import BASE_NAME, MAX_CONTEXT, FakeWorker, ids_of
from tests.router.serving import Running, running_router

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LONG = "".join(chr(ord("a") + i % 26) for i in range(MAX_CONTEXT + 88))


async def post(router: Running, path: str, **fields: Any) -> Any:
    asked = {"prompt": "ab"} if path == COMPLETIONS else {"messages": [USER]}
    answer = await router.client.post(path, json={"model": BASE_NAME, **asked, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


USER = {"role": "user", "content": "ab"}


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 5}, LONG[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, LONG[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, LONG[:5]),
        ({"truncate_prompt_tokens": -1}, LONG[8 - MAX_CONTEXT :]),
        ({"truncate_prompt_tokens": -1, "truncation_side": "right"}, LONG[: MAX_CONTEXT - 8]),
        ({"truncate_prompt_tokens": 1000, "prompt": "ab"}, "ab"),
    ],
)
async def test_prompts_are_cut(
    router: Running, worker: FakeWorker, fields: dict[str, Any], kept: str
) -> None:
    asked: dict[str, Any] = {"prompt": LONG, "max_tokens": 8, "echo": True} | fields
    for prompt in (asked["prompt"], ids_of(asked["prompt"])):
        answer = await post(router, COMPLETIONS, **asked | {"prompt": prompt})
        assert worker.requests[-1].prompt_ids == ids_of(kept)
        assert answer["choices"][0]["text"].startswith(kept)
        assert answer["usage"]["prompt_tokens"] == len(kept)


async def test_chats_are_cut(router: Running, worker: FakeWorker) -> None:
    long = {"role": "user", "content": LONG}
    await post(router, CHAT, messages=[long], truncate_prompt_tokens=-1, max_tokens=8)
    rendered = f"<user>{LONG}<assistant>"
    assert worker.requests[-1].prompt_ids == ids_of(rendered)[8 - MAX_CONTEXT :]
    await post(router, CHAT, messages=[long], truncate_prompt_tokens=-1)
    assert len(worker.requests[-1].prompt_ids) == MAX_CONTEXT - 1


async def test_a_cut_prompt_must_still_fit(router: Running) -> None:
    asked = {"model": BASE_NAME, "prompt": LONG, "truncate_prompt_tokens": 510}
    answer = await router.client.post(COMPLETIONS, json=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_prompt_logprobs_are_reported(router: Running, worker: FakeWorker) -> None:
    choice = (await post(router, COMPLETIONS, prompt_logprobs=0))["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second == {"98": {"logprob": -0.25, "rank": 2, "decoded_token": "b"}}
    assert choice["logprobs"] is None
    chat = await post(router, CHAT, prompt_logprobs=2)
    assert len(chat["prompt_logprobs"]) == len("<user>ab<assistant>")
    assert worker.requests[-1].sampling.prompt_logprobs == 2


async def test_minus_one_is_the_whole_vocabulary(tmp_path: Path, worker: FakeWorker) -> None:
    asked = {"prompt": "ab", "logprobs": -1, "prompt_logprobs": -1}
    for most, status in ((worker.card.vocab_size - 1, 400), (worker.card.vocab_size + 5, 200)):
        async with running_router(tmp_path, worker, max_logprobs=most) as router:
            answer = await router.client.post(COMPLETIONS, json={"model": BASE_NAME, **asked})
            assert answer.status_code == status
    sampling = worker.requests[-1].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (worker.card.vocab_size,) * 2


@pytest.mark.parametrize(("path", "prefix"), [(CHAT, "chatcmpl"), (COMPLETIONS, "cmpl")])
async def test_the_callers_id_is_the_answers(router: Running, path: str, prefix: str) -> None:
    """The request keeps its own: a gateway's header is no field of the caller's."""
    asked = {"prompt": "ab"} if path == COMPLETIONS else {"messages": [USER]}
    answer = await router.client.post(
        path,
        json={"model": BASE_NAME, "request_id": "mine", **asked},
        headers={"x-request-id": "edge-1"},
    )
    assert answer.json()["id"] == f"{prefix}-mine"
    assert answer.headers["x-request-id"] == "edge-1"


async def test_callers_may_choose_the_same_id(router: Running, worker: FakeWorker) -> None:
    """Ids on the wire stay apart."""
    for _ in range(2):
        await post(router, CHAT, request_id="mine")
    assert len({request.request_id for request in worker.requests}) == 2
