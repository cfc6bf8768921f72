"""A model that two processes share answers as one does, also when one of them is killed."""

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.serving import Serving, start_serving
from tests.e2e.test_mixed_batch import bodies, generate
from tests.e2e.under_load import TIMEOUT_S, assert_same_answers, client, under_load
from tests.engines import engines_below

# `tests/server/model/sharding` has processes that share a model in a short run.
pytestmark = pytest.mark.exhaustive

KILLS = 2  # each process once


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("shared")
    options = ("--tp", "2", "--cache-dir", str(folder / "cache"))
    serving = start_serving(*options, log=folder / "log")
    yield serving
    serving.process.terminate()
    assert serving.process.wait(TIMEOUT_S) == 0


def engines(serving: Serving) -> list[psutil.Process]:
    """The engine's processes, the first one of the model first."""
    found = {}
    for process in engines_below(serving.process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            arguments = process.cmdline()
            found[int(arguments[arguments.index("--shard") + 1])] = process
    return [found[number] for number in sorted(found)]


async def test_answers_as_one_process_does(serving: Serving, shared: Serving) -> None:
    assert len(engines(shared)) == 2
    await assert_same_answers(serving, shared, bodies())


async def kill_under_load(shared: Serving, kills: int) -> list[float]:
    """Kills each process in turn; seconds until eight answers came after it."""
    rng, away = random.Random(1), []
    async with under_load(shared) as answers:
        for number in range(kills):
            await answers.more(rng.randrange(1, 9))
            while len(found := engines(shared)) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)  # polls a condition, bounded by the test's time
            found[number % 2].send_signal(signal.SIGKILL)
            killed = time.monotonic()
            await answers.more(8)
            away.append(time.monotonic() - killed)
    return away


async def test_a_killed_process_costs_no_token(shared: Serving) -> None:
    pids = {process.pid for process in engines(shared)}
    away = await kill_under_load(shared, KILLS)
    assert len(away) == KILLS
    assert not pids & {process.pid for process in engines(shared)}, "both are new"


async def test_many_killed_processes_cost_no_token(tmp_path: Path) -> None:
    """Twenty, four to a server: a worker waits longer from one restart to the next."""
    away = []
    for number in range(5):
        options = ("--tp", "2", "--cache-dir", str(tmp_path / "cache"))
        serving = start_serving(*options, log=tmp_path / f"log{number}")
        try:
            away += await kill_under_load(serving, 4)
        finally:
            serving.process.terminate()
            serving.process.wait(TIMEOUT_S)
    print("seconds until eight answers after a kill:", *(f"{each:.1f}" for each in sorted(away)))
    assert len(away) == 20


async def test_a_stopped_process_is_noticed(tmp_path: Path) -> None:
    """One that stands still holds up the others: all are started again."""
    options = ("--tp", "2", "--cache-dir", str(tmp_path / "cache"), "--step-timeout-s", "2")
    serving = start_serving(*options, log=tmp_path / "log")
    try:
        async with client(serving) as http:
            body = bodies()[1]
            expected = await generate(http, body, stream=False)
            stopped = engines(serving)
            stopped[1].send_signal(signal.SIGSTOP)
            assert await generate(http, body, stream=True) == expected
            pids = {process.pid for process in engines(serving)}
            assert not pids & {process.pid for process in stopped}
    finally:
        serving.process.terminate()
        serving.process.wait(TIMEOUT_S)
    assert "makes no step" in serving.log.read_text()
