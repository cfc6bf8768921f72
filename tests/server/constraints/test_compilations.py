"""Compilations in a worker take turns by tenant; known grammars wait for none."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from loraplex.adapters.grammar.compile import GrammarError
from loraplex.adapters.grammar.limits import ServedGrammarLimits
from loraplex.server.constraints import compilations
from loraplex.server.constraints.compilations import Compilations
from loraplex.server.constraints.wishes import ConstraintWish
from loraplex.server.protocol import SamplingParams
from tests.server.constraints.serving import vocabulary

PATIENCE_S = 240


class Trials:
    """In place of a GrammarChecker: each lasts until it is let go. A grammar with `bad` is wrong.

    begun: grammars, in the order in which their trials began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._ended: set[str] = set()
        self._changed = threading.Condition()

    def check(self, grammar: str) -> None:
        with self._changed:
            self.begun.append(grammar)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: grammar in self._ended, PATIENCE_S)
        if "bad" in grammar:
            raise GrammarError("wrong")

    def end(self, *grammars: str) -> None:
        with self._changed:
            self._ended.update(grammars)
            self._changed.notify_all()

    def until(self, *grammars: str) -> None:
        """These have begun, and no others."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= len(grammars), PATIENCE_S)
            assert sorted(self.begun) == sorted(grammars)

    def close(self) -> None: ...


class Worker:
    def __init__(self, trials: Trials) -> None:
        self.trials = trials
        self.made = Compilations(vocabulary, ServedGrammarLimits(threads=3))
        self.made.open()
        self.made.tools.result(PATIENCE_S)

    def ask(self, key: int, tenant: str, grammar: str, is_batch: bool = False) -> "Future[Any]":
        sampling = SamplingParams(grammar=grammar)
        return self.made.start(ConstraintWish(key, sampling, (), None, tenant, is_batch))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    trials = Trials()
    monkeypatch.setattr(compilations, "GrammarChecker", lambda *_: trials)
    monkeypatch.setattr(compilations, "compile_grammar", lambda _, grammar, __: grammar)
    made = Worker(trials)
    yield made
    made.made.close()


def test_a_tenants_costly_grammars_hold_no_other_up(worker: Worker) -> None:
    trials = worker.trials
    trials.end("known", "bad", "new")
    assert worker.ask(1, "b", "known").result(PATIENCE_S) == "known"
    costly = [worker.ask(10 + i, "a", f"x{i}") for i in range(6)]
    trials.until("known", "x0", "x1")
    for key, tenant in ((2, "a"), (3, "b")):
        assert worker.ask(key, tenant, "known").done()
    assert worker.ask(4, "b", "new").result(PATIENCE_S) == "new"
    with pytest.raises(GrammarError):
        worker.ask(5, "b", "bad").result(PATIENCE_S)
    batch = worker.ask(6, "b", "batch", is_batch=True)
    trials.until("known", "x0", "x1", "new", "bad")  # a thread is free, yet live ones wait
    trials.end(*(f"x{i}" for i in range(6)), "batch")
    assert [one.result(PATIENCE_S) for one in costly] == [f"x{i}" for i in range(6)]
    assert batch.result(PATIENCE_S) == "batch"


def test_a_grammar_that_waits_in_anothers_line_comes_in_ones_own(worker: Worker) -> None:
    trials = worker.trials
    costly = [worker.ask(i, "a", f"x{i}") for i in range(6)]
    trials.until("x0", "x1")
    theirs = worker.ask(7, "b", "x5")
    trials.until("x0", "x1", "x5")
    trials.end(*(f"x{i}" for i in range(6)))
    assert theirs is costly[5]
    assert [one.result(PATIENCE_S) for one in costly] == [f"x{i}" for i in range(6)]
    assert trials.begun.count("x5") == 1


def test_what_all_have_left_is_not_compiled(worker: Worker) -> None:
    trials = worker.trials
    waiting = [worker.ask(i, "a", f"x{i}") for i in range(4)]
    again = worker.ask(9, "a", "x2")
    trials.until("x0", "x1")
    for key in (1, 2, 3, 77):
        worker.made.abandon(key)
    assert waiting[3].cancelled()
    assert not again.cancelled(), "another waits for it"
    trials.end("x0", "x1", "x2", "x3")
    assert again.result(PATIENCE_S) == "x2"
    assert trials.begun == ["x0", "x1", "x2"]
    assert worker.ask(10, "a", "x3").result(PATIENCE_S) == "x3"


def test_what_failed_through_no_fault_of_its_own_is_compiled_again(worker: Worker) -> None:
    worker.trials.end("x")
    worker.ask(1, "a", "x").result(PATIENCE_S)
    worker.made.refuse("x", "too slow")
    with pytest.raises(GrammarError, match="too slow"):
        worker.ask(2, "a", "x").result(PATIENCE_S)
    worker.made.forget("x")
    assert worker.ask(3, "a", "x").result(PATIENCE_S) == "x"
    assert worker.trials.begun == ["x", "x"]
