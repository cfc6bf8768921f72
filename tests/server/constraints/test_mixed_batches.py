"""Constrained sequences beside others, on the demo model in float32."""

import ctypes
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from loraplex.server.constraints.constraint import Constraint
from loraplex.server.constraints.constraints import Constraints
from loraplex.server.engine.drafts.gain import TokenPrice
from loraplex.server.engine.messages import StepOutput
from loraplex.server.model.executor import TorchExecutor
from loraplex.server.protocol import GenerateRequest
from tests.grids import sparse
from tests.server.constraints.serving import (
    DEMO,
    EOS,
    OBJECT,
    VOCAB,
    constraints,
    last,
    serving,
    text,
    tokens,
)
from tests.server.engine.harness import make_request
from tests.server.model.driver import engine_config

DIGITS = "[0-9]{3}-[0-9]{4}"


@pytest.fixture(scope="module")
def executor() -> Iterator[TorchExecutor]:
    config = engine_config(DEMO, page_size=16, max_running=16, max_step_tokens=64)
    executor = TorchExecutor(config, memoryview(bytearray(config.host_arena_bytes)))
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def made() -> Iterator[Constraints]:
    made = constraints()
    yield made
    made.close()


def free(key: int) -> GenerateRequest:
    """Greedy, drawn, with penalties, with logprobs."""
    how: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 0.0, "logprobs": 3},
    ]
    prompt = tokens(f"Tell me about number {key}: ")
    return make_request(prompt, 24, seed=key, ignore_eos=True, **how[key % 4])


def bound(key: int) -> GenerateRequest:
    how: list[dict[str, Any]] = [
        {"grammar": f"start: %json {OBJECT}"},
        {"grammar": f"start: /{DIGITS}/", "top_k": 50, "min_p": 0.001},
        {"grammar": f"start: /{DIGITS}/", "presence_penalty": 1.0, "logprobs": 2},
        {"allowed_token_ids": tuple(tokens("abc")), "bad_words": (tuple(tokens("a")),)},
    ]
    changes = how[key % 4]
    prompt = tokens(f"Give me a value, {key}: ")
    return make_request(prompt, 48, seed=key, temperature=[0.0, 2.0][key // 4 % 2], **changes)


@pytest.mark.parametrize("depth", [1, 2])
def test_neighbours_have_the_tokens_that_they_have_without_constrained_rows(
    executor: TorchExecutor, made: Constraints, depth: int
) -> None:
    with serving(executor, depth, made) as worker:
        for key in range(6):
            worker.submit(key, free(key))
        alone = [worker.answer(key) for key in range(6)]
        logprobs = [[e.logprobs for e in worker.events[key]] for key in range(6)]
        for key in range(10, 18):
            worker.submit(key, bound(key - 10))
        for key in range(20, 26):
            worker.submit(key, free(key - 20))
        assert [worker.answer(key) for key in range(20, 26)] == alone
        for key, expected in zip(range(20, 26), logprobs, strict=True):
            found = [e.logprobs for e in worker.events[key]]
            assert [p and p[0].token_id for p in found] == [p and p[0].token_id for p in expected]
        for key in range(10, 18):
            kind, answer = (key - 10) % 4, worker.answer(key)
            if kind == 0:
                assert json.loads(text(answer))["b"] == 1
            elif kind < 3:
                assert re.fullmatch(DIGITS, text(answer))
                scored = [p.token_id for e in worker.events[key] for p in e.logprobs or ()]
                assert scored == (answer if kind == 2 else [])
            else:
                assert set(answer) <= {*tokens("abc"), *EOS}
        shared = [
            o for o in worker.outputs if 0 < _constrained(o) < (o.work and o.work.sequences or 0)
        ]
        assert shared, "no step had rows of both kinds"


def _constrained(output: StepOutput) -> int:
    return 0 if output.work is None else output.work.constrained


def test_preempted_and_resumed_answers_are_those_of_an_undisturbed_run(made: Constraints) -> None:
    """Few pages: sequences give way, and are computed again from their own tokens."""
    schema = {"type": "string", "minLength": 60, "maxLength": 90}
    requests = [
        make_request(tokens(f"{key} "), 120, grammar=f"start: %json {json.dumps(schema)}", seed=key)
        for key in range(4)
    ]
    answers, preempted = [], []
    for kv_memory in (4 << 20, 11 * 16 * 6144):
        config = engine_config(DEMO, page_size=16, max_step_tokens=64, kv_memory=kv_memory)
        small = TorchExecutor(config, memoryview(bytearray(config.host_arena_bytes)))
        with serving(small, 1, made) as worker:
            for key, request in enumerate(requests):
                worker.submit(key, request)
            answers.append([worker.answer(key) for key in range(len(requests))])
            preempted.append(worker.outputs[-1].stats.preemptions)
            assert {last(worker, key).finish for key in range(len(requests))} <= {"stop", "length"}
        small.close()
    assert preempted[0] == 0 < preempted[1]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("kv_memory", "depth"), sparse([4 << 20, 14 * 16 * 6144], [1, 2]))
def test_answers_with_drafts_are_those_without(
    made: Constraints, depth: int, kv_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request twice: the second finds the first's answer. Few pages: sequences give way."""
    # Else the times of a busy machine say that no draft pays.
    monkeypatch.setattr(TokenPrice, "of", lambda price, tokens: 0.0)
    found: list[list[Any]] = []
    for max_draft in (0, 6):
        sizes = {"page_size": 16, "max_running": 16, "max_step_tokens": 64}
        config = engine_config(DEMO, **sizes, max_draft=max_draft, kv_memory=kv_memory)
        executor = TorchExecutor(config, memoryview(bytearray(config.host_arena_bytes)))
        with serving(executor, depth, made, max_draft) as worker:
            for keys in (range(8), range(8, 16)):
                for key in keys:
                    worker.submit(key, bound(key % 8))
                    worker.submit(100 + key, free(key % 8))
                for key in keys:
                    worker.answer(key)
                    worker.answer(100 + key)
            all_keys = [*range(16), *range(100, 116)]
            answers: list[Any] = [worker.answer(key) for key in all_keys]
            answers += [(last(worker, key).finish, last(worker, key).message) for key in all_keys]
            answers += [
                [p.token_id for e in worker.events[key] for p in e.logprobs or ()]
                for key in all_keys
            ]
        found.append(answers)
        stats = worker.outputs[-1].stats
        assert (stats.accepted_draft_tokens > 0) == (max_draft > 0)
        drawn = sum(_constrained(output) for output in worker.outputs)
        # One that is drawn while a grammar turns out to be over is dropped.
        assert 0 <= drawn - sum(len(answer) for answer in answers[:16]) <= 16
        executor.close()
    assert found[0] == found[1]


class Broken:
    """A matcher that fails at its third token."""

    def __init__(self) -> None:
        self.taken = 0

    def consume_token(self, sampled_token: int) -> bool:
        self.taken += 1
        return not self.is_error()

    def is_error(self) -> bool:
        return self.taken >= 3

    def get_error(self) -> str:
        return "it is broken"

    def is_accepting(self) -> bool:
        return True

    def is_stopped(self) -> bool:
        return self.is_error()

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None:
        ctypes.memset(trg_pointer, 0xFF, trg_byte_size)
        if self.taken == 2:
            raise RuntimeError("no mask")


def test_a_matcher_that_fails_ends_its_own_sequence(
    executor: TorchExecutor, made: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Constraint.__init__

    def init(self: Constraint, matcher: object, *rest: object) -> None:
        real(self, matcher and Broken(), *rest)  # type: ignore[arg-type]

    with serving(executor, 2, made) as worker:
        worker.submit(1, free(1))
        expected = worker.answer(1)
        monkeypatch.setattr(Constraint, "__init__", init)
        worker.submit(2, bound(0))
        worker.submit(3, free(1))
        assert last(worker, 2).error == "bad_grammar"
        assert "no mask" in (last(worker, 2).message or "")
        assert worker.answer(3) == expected
    assert executor.limits.vocab_size == VOCAB
