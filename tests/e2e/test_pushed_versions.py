"""Hundreds of versions pushed one after another, beside streams of others, while processes die."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from loraplex.launcher.demo import EXAMPLES
from loraplex.router.call import DIGEST_HEADER
from tests.e2e.serving import Serving, start_serving
from tests.e2e.test_several_workers import processes
from tests.pushed_versions import version
from tests.router.shared.redis_server import RedisServer

pytestmark = pytest.mark.exhaustive

VERSIONS, CALLERS, TIMEOUT_S = 500, 64, 240.0
# Pushes before which a process is killed.
KILLS = {120: "worker-0", 240: "worker-1", 360: "router"}
OTHERS = ("pirate", "json", "summary", "polite")


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    redis = RedisServer(tmp_path)
    with asyncio.Runner() as runner:
        runner.run(redis.start())
        server = start_serving(
            *("--workers", "2", "--cache-dir", str(tmp_path / "cache"), "--redis", redis.url),
            *("--redis-timeout-s", "30"),
            log=tmp_path / "log",
        )
        try:
            yield server
        finally:
            server.process.terminate()
            server.process.wait(timeout=TIMEOUT_S)
            runner.run(redis.kill())


def part(serving: Serving, name: str) -> psutil.Process:
    """The router, or a worker by its name."""
    found = processes(serving)
    children = psutil.Process(serving.process.pid).children()
    return found.get(name) or next(c for c in children if c not in found.values())


def again(ask: Any) -> httpx.Response:
    """Asks until there is an answer: a client of a router that was killed calls again."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            answer: httpx.Response = ask()
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.05)  # polls for the next router, bounded
            continue
        return answer


def ask(http: httpx.Client, model: str) -> httpx.Response:
    body = {"model": model, "prompt": EXAMPLES[0], "max_tokens": 8, "temperature": 0}
    return again(lambda: http.post("/v1/completions", json=body))


def memory(serving: Serving) -> int:
    """Bytes that router and workers hold, without what they share."""
    family = psutil.Process(serving.process.pid).children(recursive=True)
    return sum(process.memory_full_info().uss for process in family)


def test_each_answer_is_of_the_version_that_it_asked_for(serving: Serving) -> None:
    with httpx.Client(base_url=serving.url, timeout=TIMEOUT_S) as http:
        expected = {name: ask(http, name).json()["choices"][0]["text"] for name in OTHERS}
    over, wrong, count = threading.Event(), [], [0]

    def stream(index: int) -> None:
        name = OTHERS[index % len(OTHERS)]
        with httpx.Client(base_url=serving.url, timeout=TIMEOUT_S) as http:
            while not over.is_set():
                answer = ask(http, name)
                is_right = answer.status_code == 200
                if not is_right or answer.json()["choices"][0]["text"] != expected[name]:
                    wrong.append((name, answer.status_code, answer.text[:300]))
                count[0] += 1

    held: list[int] = []
    with ThreadPoolExecutor(CALLERS) as callers:
        futures = [callers.submit(stream, index) for index in range(CALLERS)]
        try:
            _push_all(serving, held)
        finally:
            over.set()
        for future in futures:
            future.result()
    assert not wrong, wrong[:3]
    assert count[0] > CALLERS
    print(f"{count[0]} answers beside; MiB held: {[nbytes >> 20 for nbytes in held]}")
    assert held[-1] < 1.25 * held[0], held


def _push_all(serving: Serving, held: list[int]) -> None:
    with httpx.Client(base_url=serving.url, timeout=TIMEOUT_S) as http:
        digests: list[str] = []
        for number in range(1, VERSIONS + 1):
            if number in KILLS:
                part(serving, KILLS[number]).kill()
            files = version(number)
            put = again(lambda files=files: http.put("/v1/adapters/policy?keep=2", files=files))
            assert put.status_code == 200, put.text
            pushed = put.json()
            assert pushed["version"] == number
            digests.append(pushed["adapter"]["digest"])
            expected = {"policy": digests[-1]}
            if number % 10 == 0:
                expected |= {f"policy@{number}": digests[-1], f"policy@{number - 1}": digests[-2]}
            for name, digest in expected.items():
                answer = ask(http, name)
                assert answer.status_code == 200, answer.text
                assert answer.headers[DIGEST_HEADER] == digest
            if number % 100 == 0:
                held.append(memory(serving))
        assert len(set(digests)) == VERSIONS
