"""A server with drafts answers as one without, also when its engine is killed."""

import asyncio
import re
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.e2e.serving import Serving, start_serving
from tests.e2e.test_mixed_batch import bodies
from tests.e2e.under_load import TIMEOUT_S, assert_same_answers, client, under_load

KILLS = 3


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("drafting")
    options = ("--max-draft", "8", "--cache-dir", str(folder / "cache"))
    serving = start_serving(*options, log=folder / "log")
    yield serving
    serving.process.terminate()
    assert serving.process.wait(TIMEOUT_S) == 0


async def drafted(http: httpx.AsyncClient) -> tuple[float, float]:
    """Tokens of drafts that were checked, and right ones."""
    (worker,) = (await http.get("/v1/fleet")).json()["workers"]
    text = (await http.get(f"{worker['url'].replace('ws:', 'http:')}/metrics")).text
    names = ("draft_tokens", "accepted_draft_tokens")
    checked, right = (re.search(rf"^loraplex_worker_{n}_total (\S+)$", text, re.M) for n in names)
    assert checked, text
    assert right, text
    return float(checked[1]), float(right[1])


async def test_answers_as_without_drafts(serving: Serving, drafting: Serving) -> None:
    await assert_same_answers(serving, drafting, bodies() * 2)  # each finds its own answer
    async with client(serving) as one, client(drafting) as two:
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


def engine(serving: Serving) -> psutil.Process | None:
    for process in psutil.Process(serving.process.pid).children(recursive=True):
        try:
            if "server.engine.main" in process.cmdline():
                return process
        except psutil.NoSuchProcess:
            continue
    return None


async def test_a_killed_engine_costs_no_token(drafting: Serving) -> None:
    async with under_load(drafting) as answers:
        for _ in range(KILLS):
            await answers.more(5)
            while (victim := engine(drafting)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)  # polls a condition, bounded by the test's time
            victim.send_signal(signal.SIGKILL)
            await answers.more(8)
