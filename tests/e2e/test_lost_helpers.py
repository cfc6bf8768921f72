"""Helper processes of a real server that are killed while others ask."""

import asyncio
import itertools
import random

import httpx
import psutil
import pytest

from tests.e2e.serving import Serving
from tests.e2e.under_load import Answers
from tests.lost_helpers import helpers
from tests.router.serving import poll

CHECKER = "loraplex.adapters.grammar.trial_process"
RENDERER = "loraplex.router.text.template_worker"
CALLERS = 3


@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=pytest.mark.exhaustive)])
async def test_killed_helpers_cost_no_request(serving: Serving, kills: int) -> None:
    """Each answer is right: nobody is refused, and nobody sees an error."""
    answers, over, drawn = Answers(), asyncio.Event(), random.Random(kills)
    async with httpx.AsyncClient(base_url=serving.url, timeout=240) as http:

        async def ask(caller: int) -> None:
            for number in itertools.count():
                await ask_grammar(http, f"{kills}{caller}{number}")
                await ask_template(http, f"{kills} {caller} {number}")
                await answers.add()
                if over.is_set():
                    return

        async with asyncio.TaskGroup() as group:
            for caller in range(CALLERS):
                group.create_task(ask(caller))
            for number in range(kills):
                module = (CHECKER, CHECKER, RENDERER)[number % 3]
                await kill_one(serving, module, drawn)
                await answers.more(CALLERS)  # an idle one dies, not one that is about to start
            over.set()


async def kill_one(serving: Serving, module: str, drawn: random.Random) -> None:
    """One of those that run, of router and engine alike."""

    async def runs() -> bool:
        return any(helpers(module, serving.process.pid))

    await poll(runs, 240)
    found = [*helpers(module, serving.process.pid)]
    if found:
        victim = drawn.choice(found)
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            return  # another death was noticed at this moment
        await asyncio.to_thread(victim.wait, 240)  # until its parent has noticed


async def ask_grammar(http: httpx.AsyncClient, number: str) -> None:
    body = {"model": "json", "prompt": "x", "max_tokens": 3, "guided_regex": f"[ab]{{3}}{number}"}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


async def ask_template(http: httpx.AsyncClient, text: str) -> None:
    body = {"model": "tools", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
