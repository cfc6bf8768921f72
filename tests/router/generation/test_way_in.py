"""A request takes the steps that the documents name, each once."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loraplex.router.generation.dispatcher import Dispatcher
from tests.router.fake_worker import FakeWorker
from tests.router.serving import Running

PAGE = Path(__file__).parents[3] / "docs/architecture.md"
STEPS = ["parse", "authorise", "enter", "resolve", "tokenise", "admit", "run"]


def method_of(step: str) -> str | None:
    """The dispatcher's method of a step's name."""
    return next((name for name in (step, f"_{step}") if name in vars(Dispatcher)), None)


def documented_steps() -> list[str]:
    """Those rows of the page's table that the dispatcher has a method for, in order."""
    text = PAGE.read_text().partition("### The way in, step by step\n")[2].partition("\n###")[0]
    rows = re.findall(r"^\| ([a-z ]+) \|", text, re.M)
    return [step for row in rows if method_of(step := row.replace(" ", "_")) is not None]


def noting(taken: list[str], step: str, method: Callable[..., Any]) -> Callable[..., Any]:
    async def asynchronous(*arguments: Any) -> Any:
        taken.append(step)
        return await method(*arguments)

    def synchronous(*arguments: Any) -> Any:
        taken.append(step)
        return method(*arguments)

    return asynchronous if inspect.iscoroutinefunction(method) else synchronous


@pytest.mark.parametrize("stream", [False, True])
async def test_the_page_names_the_steps_that_a_request_takes(
    router: Running, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    taken: list[str] = []
    for step in STEPS:
        name = method_of(step)
        assert name is not None, step
        monkeypatch.setattr(Dispatcher, name, noting(taken, step, getattr(Dispatcher, name)))
    message = {"role": "user", "content": "x"}
    body = {"model": "org/one", "messages": [message], "max_tokens": 4, "stream": stream}
    answer = await router.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert taken == STEPS == documented_steps()
