"""A server with drafts answers as one that may use none, also with few pages and when its engine is
killed. Answers without drafts are those of the session's server, whose requests refuse them."""

import asyncio
import itertools
import json
import re
import signal
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import psutil
import pytest

from loraplex.launcher.demo import EXAMPLES, adapter_paths
from tests.e2e.serving import Serving, start_serving
from tests.e2e.test_mixed_batch import bodies
from tests.e2e.under_load import TIMEOUT_S, client, under_load
from tests.engines import engines_below

KILLS = 3
CALLERS = 24
LEAST_BETWEEN_KILLS = 40  # answers: an engine that dies often is started again later and later
NAMES = ("Ada Lund", "Ben Okri", "Cleo Marsh", "Dai Ito", "Eva Roth")
STOPS = (None, None, None, "order", ["e ", "}"])


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Its few pages make sequences give way."""
    folder = tmp_path_factory.mktemp("drafting")
    options = ("--max-draft", "8", "--kv-memory", "3MiB", "--cache-dir", str(folder / "cache"))
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


async def test_answers_as_without_drafts(serving: Serving, drafting: Serving) -> None:
    async with client(serving) as one, client(drafting) as two:
        base = await base_of(one)
        requests = [completion(body, base) for body in bodies()[:8]]  # all models
        before = await drafted(one), await drafted(two)
        expected = await asyncio.gather(*(complete(one, body, drafts=False) for body in requests))
        for _ in range(2):  # each finds its own answer
            assert await asyncio.gather(*(complete(two, body) for body in requests)) == expected
        after = await drafted(one), await drafted(two)
    assert after[0] == before[0]
    assert 0 < after[1][1] - before[1][1] <= after[1][0] - before[1][0]


async def base_of(http: httpx.AsyncClient) -> str:
    name: str = (await http.get("/v1/models")).json()["data"][0]["id"]
    return name


def completion(body: dict[str, Any], base: str) -> dict[str, Any]:
    """The same request of LoRAX's route as one of OpenAI's."""
    asked = body["parameters"]
    model, tokens = asked["adapter_id"] or base, asked["max_new_tokens"]
    return {"model": model, "prompt": body["inputs"], "max_tokens": tokens, "temperature": 0}


async def complete(http: httpx.AsyncClient, body: dict[str, Any], **more: Any) -> str:
    answer = await http.post("/v1/completions", json=body | more)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


async def test_a_request_has_no_drafts_where_it_wants_none(drafting: Serving) -> None:
    prompt = "Please cancel order #77 for two oak chairs, it is urgent. Thanks, Ada Lund"
    body = {"prompt": prompt, "model": "json", "max_tokens": 60, "temperature": 0}
    async with client(drafting) as http:
        texts, counts = [], [await drafted(http)]
        for drafts in (False, False, True, True):
            texts.append(await complete(http, body, drafts=drafts))
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
        for text, model in itertools.product(EXAMPLES[:1], models)
        for how in hows
    ]


async def chat(http: httpx.AsyncClient, body: dict[str, Any], **more: Any) -> list[Any]:
    answer = await http.post("/v1/chat/completions", json=body | more)
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
    serving: Serving, drafting: Serving, shape: str
) -> None:
    requests = shaped(shape)
    async with client(serving) as one, client(drafting) as two:
        before = await drafted(two)
        expected = await asyncio.gather(*(chat(one, body, drafts=False) for body in requests))
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


@pytest.mark.exhaustive
async def test_a_killed_engine_costs_no_token(drafting: Serving) -> None:
    async with under_load(drafting) as answers:
        for _ in range(KILLS):
            await answers.more(5)
            while (victim := engine(drafting)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)  # polls a condition, bounded by the test's time
            victim.send_signal(signal.SIGKILL)
            await answers.more(8)


def random_requests(count: int, base: str) -> list[dict[str, Any]]:
    """Greedy ones; many are alike, as answers that repeat each other are."""
    random = Random(count)
    models = [base, *sorted(adapter_paths())]
    shapes = [None, None, *SHAPES]
    return [_request(random, models, shapes) for _ in range(count)]


def _request(random: Random, models: list[str], shapes: list[str | None]) -> dict[str, Any]:
    shape = random.choice(shapes)
    with_tools = shape is not None and "tools" in SHAPES[shape]
    text = f"{random.choice(EXAMPLES)} {random.choice(NAMES)}, {random.randrange(40)}"
    body: dict[str, Any] = {
        "model": "tools" if with_tools else random.choice(models),
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": random.choice((1, 8, 30, 60, 120)),
        **(SHAPES[shape] if shape else {}),
    }
    if (stop := random.choice(STOPS)) is not None:
        body["stop"] = stop
    if shape is None and random.random() < 0.3:
        body |= {"ignore_eos": True, "max_tokens": 150}
    elif random.random() < 0.1:
        body["min_tokens"] = min(10, body["max_tokens"])
    return body


class Answering:
    """Requests that are answered one after the other by several callers; some kill the engine."""

    def __init__(
        self, serving: Serving, requests: list[dict[str, Any]], kills: int, **more: Any
    ) -> None:
        self._serving, self._requests, self._more = serving, requests, more
        every = max(LEAST_BETWEEN_KILLS, len(requests) // (kills + 1)) if kills else 0
        self._kill_at = {every * (number + 1) for number in range(kills)}
        self._done = itertools.count(1)
        self.answers: list[Any] = [None] * len(requests)

    async def run(self) -> list[Any]:
        places = iter(range(len(self._requests)))
        async with client(self._serving) as http, asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(self._ask(http, places))
        return self.answers

    async def _ask(self, http: httpx.AsyncClient, places: Any) -> None:
        for place in places:
            self.answers[place] = await chat(http, self._requests[place], **self._more)
            if next(self._done) in self._kill_at and (victim := engine(self._serving)):
                victim.send_signal(signal.SIGKILL)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("count", "kills"), [(80, 1), (2000, 4)])
async def test_random_requests(serving: Serving, drafting: Serving, count: int, kills: int) -> None:
    names = ("draft_tokens", "accepted_draft_tokens", "preemptions", "engine_restarts")
    async with client(serving) as one, client(drafting) as two:
        requests = random_requests(count, await base_of(one))
        before = await worker_metrics(two, *names)
        expected = await Answering(serving, requests, 0, drafts=False).run()
        found = await Answering(drafting, requests, kills).run()
        after = await worker_metrics(two, *names)
    wrong = [(r, a, b) for r, a, b in zip(requests, found, expected, strict=True) if a != b]
    assert not wrong, wrong[0]
    checked, right, preemptions, restarts = (b - a for a, b in zip(before, after, strict=True))
    assert 0 < right <= checked
    assert min(preemptions, restarts) > 0, "nothing was computed twice"
