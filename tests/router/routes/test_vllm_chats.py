"""Several conversations of one request, and the load in a header, as vLLM has both."""

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from tests.router.fake_worker import BASE_NAME, FakeWorker, ids_of
from tests.router.serving import Running, of_kept_router

BATCH = "/v1/chat/completions/batch"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def said(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


@pytest.mark.parametrize(
    ("conversations", "rendered"),
    [
        ([[said("ab")]], ["<user>ab<assistant>"]),
        (
            [[said("ab")], [said("be brief", "system"), said("c")]],
            ["<user>ab<assistant>", "<system>be brief<user>c<assistant>"],
        ),
        (
            [[said("a"), said("b", "assistant"), said("c", "assistant")], [said("a")], [said("a")]],
            ["<user>a<assistant>b<assistant>c<assistant>", *["<user>a<assistant>"] * 2],
        ),
    ],
)
async def test_each_conversation_has_its_choice(
    router: Running,
    worker: FakeWorker,
    conversations: list[list[dict[str, Any]]],
    rendered: list[str],
) -> None:
    """Of two messages of one role that follow each other the template makes what it likes."""
    before = len(worker.requests)
    asked = {"messages": conversations, "max_completion_tokens": 6, "return_token_ids": True}
    answer = await router.client.post(BATCH, json=asked)
    assert answer.status_code == 200, answer.text
    found = ChatCompletion.model_validate(answer.json())
    assert [choice.index for choice in found.choices] == [*range(len(conversations))]
    prompts = [request.prompt_ids for request in worker.requests[before:]]
    assert prompts == [ids_of(text) for text in rendered]
    assert found.usage is not None
    assert found.usage.prompt_tokens == sum(map(len, prompts))
    alone = await router.client.post(CHAT, json={**asked, "messages": conversations[-1]})
    assert alone.json()["choices"][0]["message"] == answer.json()["choices"][-1]["message"]


@of_kept_router
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [[said("a")], []]}, "messages[1]"),
        ({"messages": [[said("a")], [{"role": "user"}]]}, "messages[1][0].content"),
        ({"messages": [said("a")]}, "messages[0]"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"echo": True}, "echo"),
    ],
)
async def test_what_several_conversations_have_not(
    kept_router: Running, fields: dict[str, Any], param: str
) -> None:
    body = {"model": BASE_NAME, "messages": [[said("a")]], "n": 1, "stream": False, **fields}
    answer = await kept_router.client.post(BATCH, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "body", [{"prompt": "ab"}, {"prompt": "ab", "stream": True}, {"messages": [said("ab")]}]
)
async def test_the_load_is_told_to_who_asks(router: Running, body: dict[str, Any]) -> None:
    path = COMPLETIONS if "prompt" in body else CHAT

    async def told(form: str) -> str | None:
        headers = {"endpoint-load-metrics-format": form}
        answer = await router.client.post(path, json=body, headers=headers)
        assert answer.status_code == 200
        found: str | None = answer.headers.get("endpoint-load-metrics")
        return found

    text, plain = await told("TEXT"), await told("json")
    assert text is not None
    assert plain is not None
    names = ["kv_cache_usage_perc", "num_requests_waiting"]
    assert [one.partition("=")[0] for one in text.removeprefix("TEXT ").split(", ")] == [
        f"named_metrics.{name}" for name in names
    ]
    numbers = json.loads(plain.removeprefix("JSON "))["named_metrics"]
    assert list(numbers) == names
    assert all(isinstance(value, float) for value in numbers.values())
    assert await told("") is await told("BIN") is None
