"""Two workers of one `loraplex serve` answer as one does, also when they are killed."""

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from loraplex.launcher.bench.engine.offline import SHIPPED
from loraplex.launcher.bench.load.serve import run_load
from loraplex.launcher.bench.load.target import Target, model_of
from loraplex.launcher.bench.load.workload import Lengths, Workload
from tests.e2e.random_model import SIZES
from tests.e2e.serving import Serving, start_serving
from tests.e2e.test_mixed_batch import bodies
from tests.e2e.under_load import TIMEOUT_S, assert_same_answers, under_load
from tests.ports import free_port
from tools.bench.make_model import Maker

# `tests/chaos` has two workers in a short run.
pytestmark = pytest.mark.exhaustive

KILLS = 2  # each worker once
NAMES = ("worker-0", "worker-1")


def workers(serving: Serving) -> list[dict[str, Any]]:
    answer = httpx.get(f"{serving.url}/v1/fleet", timeout=TIMEOUT_S)
    found: list[dict[str, Any]] = answer.json()["workers"]
    return sorted(found, key=lambda worker: worker["url"])


def are_ready(serving: Serving) -> bool:
    return [worker["state"] for worker in workers(serving)] == ["ready", "ready"]


def until(serving: Serving, condition: Callable[[], bool]) -> None:
    """Polls a condition, bounded in time."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, serving.log.read_text()[-4000:]
        time.sleep(0.05)


def processes(serving: Serving) -> dict[str, psutil.Process]:
    """The workers' processes, by their names."""
    found = {}
    for child in psutil.Process(serving.process.pid).children():
        named = [word for word in child.cmdline() if word.startswith("--started-as=worker-")]
        if named:
            found[named[0].removeprefix("--started-as=")] = child
    return found


def start(folder: Path, *arguments: str) -> Serving:
    options = ("--workers", "2", "--cache-dir", str(folder / "cache"))
    serving = start_serving(*arguments, *options, log=folder / "log")
    until(serving, partial(are_ready, serving))
    return serving


def stop(serving: Serving) -> None:
    """No process outlives it."""
    family = psutil.Process(serving.process.pid).children(recursive=True)
    assert len(family) >= 5, "two workers with an engine each, and a router"
    serving.process.terminate()
    assert serving.process.wait(TIMEOUT_S) == 0
    _, alive = psutil.wait_procs(family, TIMEOUT_S)
    assert not alive


@pytest.fixture(scope="module")
def watched_port() -> int:
    """The router's, for metrics; those of its workers are the next."""
    return free_port(3)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory, watched_port: int) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("several")
    serving = start(folder, "--metrics-port", str(watched_port))
    try:
        yield serving
        stop(serving)
    finally:
        serving.process.kill()


async def test_answers_as_one_worker_does(serving: Serving, several: Serving) -> None:
    await assert_same_answers(serving, several, bodies())
    assert all(worker["output_tokens"] for worker in workers(several))
    said = several.log.read_text()
    assert "--workers 2 --tp 1: 2 workers on the CPU" in said
    assert all(f"{name} | " in said for name in NAMES)


def test_each_workers_metrics_have_a_port(several: Serving, watched_port: int) -> None:
    """The port has nothing else of a worker's."""
    first = watched_port + 1
    pages = [httpx.get(f"http://127.0.0.1:{port}/metrics") for port in (first, first + 1)]
    assert all("loraplex_worker_ready 1" in page.text for page in pages)
    live = httpx.get(f"http://127.0.0.1:{first}/health/live")
    assert (live.status_code, live.json()) == (200, {"status": "live"})
    refused = [httpx.get(f"http://127.0.0.1:{first}{path}") for path in ("/card", "/connect", "/")]
    assert [answer.status_code for answer in refused] == [404, 404, 404]


async def test_killed_workers_cost_no_token(several: Serving) -> None:
    """Each in turn."""
    before = {process.pid for process in processes(several).values()}
    async with under_load(several) as answers:
        for number in range(KILLS):
            await asyncio.to_thread(until, several, partial(are_ready, several))
            await answers.more(3 + 2 * number)
            victim = processes(several)[NAMES[number % 2]]
            victim.send_signal(signal.SIGKILL)
            await asyncio.to_thread(victim.wait, TIMEOUT_S)
            await answers.more(8)
        await asyncio.to_thread(until, several, partial(are_ready, several))
    assert several.log.read_text().count("died (killed by SIGKILL)") == KILLS
    assert not before & {process.pid for process in processes(several).values()}, "both are new"


async def test_many_adapters_are_placed_on_both(tmp_path: Path) -> None:
    shape = tmp_path / "shape"
    shape.mkdir()
    llama = json.loads((SHIPPED / "llama-3.1-8b" / "config.json").read_text())
    (shape / "config.json").write_text(json.dumps(llama | SIZES))
    maker, names = Maker(shape, "float32", "cpu", 1), [f"a{number}" for number in range(24)]
    maker.model(tmp_path / "model")
    maker.adapters(tmp_path / "adapters", names, "base", 4)
    options = ("--device", "cpu", "--model-name", "base")
    roots = ("--adapter-root", str(tmp_path / "adapters"))
    serving = start(tmp_path, str(tmp_path / "model"), *options, *roots)
    try:
        adapters = tuple(model_of(name, registered=False) for name in names)
        lengths = Lengths.parse("uniform(8,24)")
        workload = Workload(160, adapters, zipf=0.0, prompt=lengths, output=lengths, seed=1)
        outcomes = await run_load(Target(serving.url, "base"), workload, concurrency=32)
        assert len(outcomes) == 160
        assert not [(each.error, each.message) for each in outcomes if each.error or each.short]
        held = [{place["digest"] for place in worker["places"]} for worker in workers(serving)]
        assert all(len(digests) >= 4 for digests in held)
        assert len(held[0] | held[1]) == len(names)
        stop(serving)
    finally:
        serving.process.kill()
