"""Random requests to a server with drafts, few pages and a dying engine answer as others."""

import asyncio
import itertools
import signal
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from loraplex.launcher.demo import EXAMPLES, adapter_paths
from tests.e2e.serving import Serving, start_serving
from tests.e2e.test_drafts import SHAPES, chat, drafted, engine, worker_metrics
from tests.e2e.under_load import TIMEOUT_S, client

_CALLERS = 24
_LEAST_BETWEEN_KILLS = 40  # answers: an engine that dies often is started again later and later
_NAMES = ("Ada Lund", "Ben Okri", "Cleo Marsh", "Dai Ito", "Eva Roth")
_STOPS = (None, None, None, "order", ["e ", "}"])


def random_requests(count: int, base: str) -> list[dict[str, Any]]:
    """Greedy ones; many are alike, as answers that repeat each other are."""
    random = Random(count)
    models = [base, *sorted(adapter_paths())]
    shapes = [None, None, *SHAPES]
    return [_request(random, models, shapes) for _ in range(count)]


def _request(random: Random, models: list[str], shapes: list[str | None]) -> dict[str, Any]:
    shape = random.choice(shapes)
    with_tools = shape is not None and "tools" in SHAPES[shape]
    text = f"{random.choice(EXAMPLES)} {random.choice(_NAMES)}, {random.randrange(40)}"
    body: dict[str, Any] = {
        "model": "tools" if with_tools else random.choice(models),
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": random.choice((1, 8, 30, 60, 120)),
        **(SHAPES[shape] if shape else {}),
    }
    if (stop := random.choice(_STOPS)) is not None:
        body["stop"] = stop
    if shape is None and random.random() < 0.3:
        body |= {"ignore_eos": True, "max_tokens": 150}
    elif random.random() < 0.1:
        body["min_tokens"] = min(10, body["max_tokens"])
    return body


class Answering:
    """Requests that are answered one after the other by several callers; some kill the engine."""

    def __init__(self, serving: Serving, requests: list[dict[str, Any]], kills: int) -> None:
        self._serving, self._requests = serving, requests
        every = max(_LEAST_BETWEEN_KILLS, len(requests) // (kills + 1)) if kills else 0
        self._kill_at = {every * (number + 1) for number in range(kills)}
        self._done = itertools.count(1)
        self.answers: list[Any] = [None] * len(requests)

    async def run(self) -> list[Any]:
        places = iter(range(len(self._requests)))
        async with client(self._serving) as http, asyncio.TaskGroup() as group:
            for _ in range(_CALLERS):
                group.create_task(self._ask(http, places))
        return self.answers

    async def _ask(self, http: httpx.AsyncClient, places: Any) -> None:
        for place in places:
            self.answers[place] = await chat(http, self._requests[place])
            if next(self._done) in self._kill_at and (victim := engine(self._serving)):
                victim.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    ("count", "kills"),
    [(160, 2), pytest.param(2000, 4, marks=pytest.mark.exhaustive)],
)
async def test_random_requests(tmp_path: Path, count: int, kills: int) -> None:
    cache = ("--cache-dir", str(tmp_path / "cache"))
    options = ("--max-draft", "8", "--kv-memory", "3MiB", *cache)
    small = start_serving(*options, log=tmp_path / "log")
    plain = start_serving("--max-draft", "0", *cache, log=tmp_path / "log of plain")
    try:
        async with client(plain) as http:
            base = (await http.get("/v1/models")).json()["data"][0]["id"]
        requests = random_requests(count, base)
        expected = await Answering(plain, requests, 0).run()
        found = await Answering(small, requests, kills).run()
        wrong = [(r, a, b) for r, a, b in zip(requests, found, expected, strict=True) if a != b]
        assert not wrong, wrong[0]
        async with client(small) as http:
            checked, right = await drafted(http)
            metrics = await worker_metrics(http, "preemptions", "engine_restarts")
    finally:
        for serving in (small, plain):
            serving.process.terminate()
            assert serving.process.wait(TIMEOUT_S) == 0
    assert 0 < right <= checked
    assert min(metrics) > 0, "nothing was computed twice"
