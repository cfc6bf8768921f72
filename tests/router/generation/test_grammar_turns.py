"""Trials of grammars take turns, and what is known of a grammar is found before any line."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
import pytest

from loraplex.adapters.grammar.compile import GrammarError
from loraplex.adapters.grammar.limits import GrammarLimits
from loraplex.router.api.openai import completions
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.call import RequestError
from loraplex.router.generation import tokenise
from loraplex.router.generation.division import PartsOfAnswers
from loraplex.router.generation.tokenise import AnswerShapes
from loraplex.router.text.model import TextModel
from loraplex.router.text.turn_taking import PROCESSES, TurnTaking
from tests.router.fake_worker import BASE_NAME, make_card
from tests.router.serving import poll


class Trials:
    """In place of a GrammarChecker: each lasts until it is let go. A grammar with `bad` is wrong.

    begun: names of grammars, in the order in which their trials began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._let_go: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def check(self, grammar: str) -> None:
        name = grammar.rsplit('"', 2)[1]
        self.begun.append(name)
        assert self._event(name).wait(240)
        if "bad" in name:
            raise GrammarError(f"{name} is wrong")

    def end(self, *names: str) -> None:
        for name in names:
            self._event(name).set()

    def close(self) -> None: ...

    def _event(self, name: str) -> threading.Event:
        with self._lock:
            return self._let_go.setdefault(name, threading.Event())

    async def until(self, *names: str) -> None:
        """So many have begun, and no more than these."""

        async def begun() -> bool:
            return len(self.begun) >= len(names)

        await poll(begun)
        for _ in range(8):
            await asyncio.sleep(0)
        assert sorted(self.begun) == sorted(names)


Ask = Callable[..., Coroutine[Any, Any, str]]


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    made = Trials()
    monkeypatch.setattr(tokenise, "GrammarChecker", lambda *_: made)
    return made


@pytest.fixture
def ask(trials: Trials) -> Iterator[Ask]:
    """The grammar that a caller's request is held to."""
    shapes, taking = AnswerShapes(GrammarLimits()), TurnTaking()
    model = TextModel(make_card())

    async def hold(tenant: str, name: str, is_batch: bool = False) -> str:
        body = {"model": BASE_NAME, "prompt": "x", "guided_grammar": f'start: "{name}"'}
        call = completions.parse(msgspec.json.encode(body), ApiLimits()).call
        asker = model.taking(taking.of(tenant, is_batch))
        return (await shapes.hold(call, asker, PartsOfAnswers(), "x")).sampling.grammar

    yield hold
    shapes.close()


async def test_a_known_grammar_waits_for_no_trial(trials: Trials, ask: Ask) -> None:
    trials.end("good", "bad")
    await ask("a", "good")
    with pytest.raises(RequestError, match="bad is wrong"):
        await ask("a", "bad")
    costly = [asyncio.create_task(ask("a", f"x{i}")) for i in range(9)]
    costly += [asyncio.create_task(ask("c", "y"))]
    await trials.until("good", "bad", "x0", "x1", "y")  # every process is in use
    for tenant in ("a", "b"):
        assert await ask(tenant, "good") == 'start: "good"'
        with pytest.raises(RequestError, match="bad is wrong"):
            await ask(tenant, "bad")
    trials.end("y", *(f"x{i}" for i in range(9)))
    await asyncio.gather(*costly)


async def test_a_new_grammar_of_another_tenant_waits_for_none(trials: Trials, ask: Ask) -> None:
    costly = [asyncio.create_task(ask("a", f"x{i}")) for i in range(9)]
    batch = asyncio.create_task(ask("b", "batch", is_batch=True))
    await trials.until("x0", "x1")
    trials.end("new")
    assert await ask("b", "new") == 'start: "new"'
    await trials.until("x0", "x1", "new")  # a process is free, yet live requests wait
    others = [asyncio.create_task(ask(tenant, tenant)) for tenant in "cd"]
    await trials.until("x0", "x1", "new", "c")
    trials.end("x0")
    await trials.until("x0", "x1", "new", "c", "d")
    trials.end(*(f"x{i}" for i in range(9)), "batch", *"cd")
    await asyncio.gather(*costly, *others, batch)


async def test_who_left_is_never_tried(trials: Trials, ask: Ask) -> None:
    asking = [asyncio.create_task(ask("a", f"x{i}")) for i in range(6)]
    await trials.until("x0", "x1")
    for gone in asking[1:5]:
        gone.cancel()
    await asyncio.gather(*asking[1:5], return_exceptions=True)
    await trials.until("x0", "x1")  # what was begun is in use until it ends
    trials.end("x0", "x1")
    await trials.until("x0", "x1", "x5")
    trials.end("x5")
    assert [await asking[i] for i in (0, 5)] == ['start: "x0"', 'start: "x5"']
    assert await ask("b", "x1") == 'start: "x1"'
    assert trials.begun == ["x0", "x1", "x5"]


async def test_one_trial_serves_all_who_wait_for_it(trials: Trials, ask: Ask) -> None:
    asking = [asyncio.create_task(ask(tenant, "same")) for tenant in "aaaaab"]
    await trials.until("same", "same", "same")
    trials.end("same")
    assert set(await asyncio.gather(*asking)) == {'start: "same"'}
    assert len(trials.begun) == PROCESSES
