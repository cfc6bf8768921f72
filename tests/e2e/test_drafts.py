"""A server with drafts answers as one without, also when its engine is killed."""

import asyncio
import itertools
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from loraplex.launcher.demo import EXAMPLES
from tests.e2e.serving import Serving, start_serving
from tests.e2e.test_mixed_batch import bodies
from tests.e2e.under_load import TIMEOUT_S, assert_same_answers, client, under_load
from tests.engines import engines_below

KILLS = 3


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("drafting")
    yield from served(folder, "8")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    yield from served(tmp_path_factory.mktemp("plain"), "0")


def served(folder: Path, max_draft: str) -> Iterator[Serving]:
    options = ("--max-draft", max_draft, "--cache-dir", str(folder / "cache"))
    serving = start_serving(*options, log=folder / "log")
    yield serving
    serving.process.terminate()
    assert serving.process.wait(TIMEOUT_S) == 0


async def worker_metrics(http: httpx.AsyncClient, *names: str) -> list[float]:
    """Counters of the one worker."""
    (worker,) = (await http.get("/v1/fleet")).json()["workers"]
    text = (await http.get(f"{worker['url'].replace('ws:', 'http:')}/metrics")).text
    found = [re.search(rf"^loraplex_worker_{name}_total (\S+)$", text, re.M) for name in names]
    assert all(found), text
    return [float(one[1]) for one in found if one]


async def drafted(http: httpx.AsyncClient) -> tuple[float, float]:
    """Tokens of drafts that were checked, and right ones."""
    checked, right = await worker_metrics(http, "draft_tokens", "accepted_draft_tokens")
    return checked, right


async def test_answers_as_without_drafts(plain: Serving, drafting: Serving) -> None:
    await assert_same_answers(plain, drafting, bodies() * 2)  # each finds its own answer
    async with client(plain) as one, client(drafting) as two:
        checked, right = await drafted(two)
        assert 0 < right <= checked
        assert await drafted(one) == (0, 0)


async def test_a_request_has_no_drafts_where_it_wants_none(drafting: Serving) -> None:
    prompt = "Please cancel order #77 for two oak chairs, it is urgent. Thanks, Ada Lund"
    body = {"prompt": prompt, "model": "json", "max_tokens": 60, "temperature": 0}
    async with client(drafting) as http:
        texts, counts = [], [await drafted(http)]
        for drafts in (False, False, True, True):
            answer = await http.post("/v1/completions", json={**body, "drafts": drafts})
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["choices"][0]["text"])
            counts.append(await drafted(http))
    assert len(set(texts)) == 1
    assert counts[0] == counts[1] == counts[2]
    assert counts[4] > counts[2]


TICKET = {
    "type": "object",
    "properties": {
        "department": {"enum": ["billing", "front desk", "shipping"]},
        "customer": {"type": "string", "maxLength": 24},
        "urgency": {"enum": ["low", "normal", "high"]},
    },
    "required": ["department", "customer", "urgency"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"order": {"type": "string"}, "customer": {"type": "string"}},
                "required": ["order"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("track_order", "cancel_order")
]
SHAPES: dict[str, dict[str, Any]] = {
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": TICKET}}
    },
    "tools": {"tools": TOOLS, "tool_choice": "required"},
    "offered tools": {"tools": TOOLS, "parallel_tool_calls": False},
    "pattern": {"guided_regex": "(order|ticket) [0-9]{5} (is open|was closed)\\."},
}


def shaped(shape: str) -> list[dict[str, Any]]:
    """Chats whose answers have the shape: greedy and sampled, one and several."""
    hows = ({"temperature": 0}, {"temperature": 1, "seed": 5, "n": 2, "logprobs": True})
    models = ["tools"] if "tools" in SHAPES[shape] else ["json", "tools", "router"]
    return [
        {
            "model": model,
            "max_tokens": 90,
            "messages": [{"role": "user", "content": text}],
            **SHAPES[shape],
            **how,
        }
        for text, model in itertools.product(EXAMPLES[:2], models)
        for how in hows
    ]


async def chat(http: httpx.AsyncClient, body: dict[str, Any]) -> list[Any]:
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = []
    for choice in answer.json()["choices"]:
        message, logprobs = choice["message"], choice.get("logprobs") or {}
        calls = [call["function"] for call in message.get("tool_calls") or []]
        tokens = [place["token"] for place in logprobs.get("content") or []]
        found.append((message["content"], calls, choice["finish_reason"], tokens))
    return found


@pytest.mark.parametrize("shape", SHAPES)
async def test_answers_with_a_shape_as_without_drafts(
    plain: Serving, drafting: Serving, shape: str
) -> None:
    requests = shaped(shape)
    async with client(plain) as one, client(drafting) as two:
        before = await drafted(two)
        expected = await asyncio.gather(*(chat(one, body) for body in requests))
        for _ in range(2):  # each finds its own answer
            assert await asyncio.gather(*(chat(two, body) for body in requests)) == expected
        after = await drafted(two)
    assert after[1] - before[1] > len(requests)


async def test_what_a_schema_forces_is_drafted_at_once(drafting: Serving) -> None:
    schema = {
        "type": "object",
        "properties": {"an_answer_of_this_name": {"type": "boolean"}},
        "required": ["an_answer_of_this_name"],
        "additionalProperties": False,
    }
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    body = {"model": "sentiment", "temperature": 0, "response_format": shape}
    body["messages"] = [{"role": "user", "content": "Is it so?"}]
    async with client(drafting) as http:
        before = await drafted(http)
        ((content, *_),) = await chat(http, body)
        after = await drafted(http)
    assert [*json.loads(content)] == ["an_answer_of_this_name"]
    assert after[1] > before[1]


def engine(serving: Serving) -> psutil.Process | None:
    return next(iter(engines_below(serving.process.pid)), None)


async def test_a_killed_engine_costs_no_token(drafting: Serving) -> None:
    async with under_load(drafting) as answers:
        for _ in range(KILLS):
            await answers.more(5)
            while (victim := engine(drafting)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)  # polls a condition, bounded by the test's time
            victim.send_signal(signal.SIGKILL)
            await answers.more(8)
