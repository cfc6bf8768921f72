"""Grammars through the step loop, with the certifying executor."""

import json
import re
import threading
from collections.abc import Iterator

import pytest

from loraplex.adapters.grammar.vocabulary import Vocabulary
from loraplex.server.constraints.constraints import Constraints
from loraplex.server.engine.messages import AbortSequence
from tests.certifying.certificates import certified_output
from tests.lost_helpers import kill_helpers
from tests.server.constraints.serving import (
    EOS,
    OBJECT,
    OPTIONS,
    certifying,
    constraints,
    last,
    no_vocabulary,
    serving,
    text,
    tokens,
    vocabulary,
)
from tests.server.engine.harness import make_request
from tests.server.engine.worker_end import TIMEOUT_S

JSON = f"start: %json {OBJECT}"
# Ends only where the model says so.
LETTERS = "start: /[a-z]+/"


@pytest.fixture(scope="module")
def made() -> Iterator[Constraints]:
    made = constraints()
    yield made
    made.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_every_answer_keeps_to_its_grammar_and_others_are_as_alone(
    made: Constraints, depth: int
) -> None:
    with serving(certifying(), depth, made) as worker:
        for key in range(24):
            prompt = [5 + key % 5, 6, 7]
            grammar = [JSON, "", 'start: "yes" | "no"'][key % 3]
            adapter = [None, "a"][key % 2]
            worker.submit(key, make_request(prompt, 60, adapter, grammar=grammar))
        for key in range(24):
            answer, end = worker.answer(key), last(worker, key)
            if key % 3 == 0:
                assert json.loads(text(answer))["b"] == 1
                assert end.finish == "stop"
            elif key % 3 == 1:
                expected = certified_output([None, "a"][key % 2], [5 + key % 5, 6, 7], 60, OPTIONS)
                assert answer == expected
            else:
                assert text(answer) in ("yes", "no")
                # No token ends the answer: nothing is to be cut off it.
                assert (end.finish, end.token_ids) == ("stop", ())


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_sequences_go_on_in_their_grammar(made: Constraints, depth: int) -> None:
    schema = {"type": "string", "minLength": 150, "maxLength": 200}
    grammar = f"start: %json {json.dumps(schema)}"
    with serving(certifying(num_pages=20), depth, made) as worker:
        for key in range(6):
            worker.submit(key, make_request([5, 6, 7 + key], 250, grammar=grammar))
        for key in range(6):
            assert 150 <= len(json.loads(text(worker.answer(key)))) <= 200
        assert worker.outputs[-1].stats.preemptions > 0


def test_a_resumed_answer_goes_on_where_it_was(made: Constraints) -> None:
    with serving(certifying(), 2, made) as worker:
        worker.submit(1, make_request([5, 6], 60, grammar=JSON))
        whole = worker.answer(1)
        for key, kept in enumerate(range(len(whole) + 1), 2):
            accepted = whole[:kept]
            worker.submit(key, make_request([5, 6], 60, grammar=JSON, accepted_ids=accepted))
            assert accepted + worker.answer(key) == whole
            assert last(worker, key).finish == "stop"
        worker.submit(99, make_request([5, 6], 60, grammar=JSON, accepted_ids=tokens("[1")))
        assert last(worker, 99).error == "bad_grammar"


def test_choices_of_a_request_compile_its_grammar_once(made: Constraints) -> None:
    grammar = 'start: "one" | "two" | "three"'
    with serving(certifying(), 2, made) as worker:
        for key in range(5):
            worker.submit(key, make_request([5, 6], 60, grammar=grammar, choice=key))
        for key in range(5):
            assert text(worker.answer(key)) in ("one", "two", "three")
        compiled = [c for output in worker.outputs for c in output.compiled]
        assert [c.fault for c in compiled] == [None]


def test_ends_come_when_the_grammar_and_min_tokens_allow_them(made: Constraints) -> None:
    with serving(certifying(), 2, made) as worker:
        allowed = (tokens("x")[-1], *EOS)
        request = make_request([5, 6], 60, grammar=LETTERS, min_tokens=7, allowed_token_ids=allowed)
        worker.submit(1, request)
        answer = worker.answer(1)
        assert len(answer) > 7 or last(worker, 1).finish == "length"
        assert re.fullmatch("[a-z]+", text(answer))
        worker.submit(2, make_request([5, 6], 60, grammar='start: "yes"', min_tokens=30))
        assert text(worker.answer(2)) == "yes"
        assert last(worker, 2).finish == "stop"


def test_allowed_tokens_and_bad_words(made: Constraints) -> None:
    with serving(certifying(), 2, made) as worker:
        worker.submit(1, make_request([5, 6], 40, allowed_token_ids=(10, 11), ignore_eos=True))
        worker.submit(
            2,
            make_request(
                [5, 6],
                40,
                allowed_token_ids=(10, 11, 12),
                bad_words=((10, 10), (12,), (11, 10, 11)),
                ignore_eos=True,
            ),
        )
        assert set(worker.answer(1)) <= {10, 11}
        answer = worker.answer(2)
        assert set(answer) <= {10, 11}
        pairs = list(zip(answer, answer[1:], strict=False))
        assert (10, 10) not in pairs
        assert (11, 10, 11) not in list(zip(answer, answer[1:], answer[2:], strict=False))


def test_a_request_that_leaves_no_token_ends_alone(made: Constraints) -> None:
    with serving(certifying(), 2, made) as worker:
        worker.submit(1, make_request([5, 6], 30))
        worker.submit(2, make_request([5, 6], 30, grammar=JSON, allowed_token_ids=(10,)))
        worker.submit(
            3, make_request([5, 6], 30, grammar=LETTERS, bad_words=tuple((i,) for i in EOS))
        )
        assert last(worker, 2).error == "bad_grammar"
        assert "no token is left" in (last(worker, 2).message or "")
        assert last(worker, 3).finish in ("length", "stop")
        assert worker.answer(1) == certified_output(None, [5, 6], 30, OPTIONS)


@pytest.mark.parametrize(
    ("grammar", "fault"),
    [
        ("start: nowhere", "wrong"),
        ("start: " + "(" * 200 + '"a"' + ")" * 200, "costly"),
        ('start: %json {"type": "nothing"}', "wrong"),
    ],
)
def test_bad_grammars_are_refused(made: Constraints, grammar: str, fault: str) -> None:
    with serving(certifying(), 2, made) as worker:
        worker.submit(1, make_request([5, 6], 30, grammar=grammar))
        worker.submit(2, make_request([5, 6], 30))
        assert last(worker, 1).error == "bad_grammar"
        assert worker.answer(2) == certified_output(None, [5, 6], 30, OPTIONS)
        assert [c.fault for output in worker.outputs for c in output.compiled] == [fault]


def test_a_grammar_whose_masks_take_too_long_ends_and_is_refused_from_then_on() -> None:
    made = constraints(mask_s=0.0)
    with serving(certifying(), 2, made) as worker:
        worker.submit(1, make_request([5, 6], 30))
        for key in (2, 3):
            worker.submit(key, make_request([5, 6], 30, grammar=JSON))
            assert last(worker, key).error == "bad_grammar"
            assert "processor time" in (last(worker, key).message or "")
        assert worker.answer(1) == certified_output(None, [5, 6], 30, OPTIONS)
        assert len([c for output in worker.outputs for c in output.compiled]) == 1
    made.close()


def test_a_checker_that_is_lost_or_cannot_start_is_no_verdict_that_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = constraints()
    with serving(certifying(), 2, made) as worker:
        for key, grammar in enumerate(('start: "a"', 'start: "b"', 'start: "b"')):
            worker.submit(key, make_request([5, 6], 30, grammar=grammar))
            assert last(worker, key).error is None
            kill_helpers("loraplex.adapters.grammar.trial_process")
        with monkeypatch.context() as patched:
            patched.setattr("loraplex.adapters.helpers.helper._PROGRAM", "import nowhere")
            worker.submit(4, make_request([5, 6], 30, grammar='start: "c"'))
            assert last(worker, 4).error == "bad_grammar"
            assert "No module named 'nowhere'" in (last(worker, 4).message or "")
        [cause] = [c.fault for output in worker.outputs for c in output.compiled if c.fault]
        assert cause == "unavailable"
    made.close()


def test_without_a_vocabulary_grammars_alone_are_refused() -> None:
    made = constraints(no_vocabulary)
    with serving(certifying(), 2, made) as worker:
        worker.submit(1, make_request([5, 6], 30, grammar=JSON))
        worker.submit(2, make_request([5, 6], 30, allowed_token_ids=(10,), ignore_eos=True))
        assert last(worker, 1).error == "bad_grammar"
        assert "it has no tokenizer" in (last(worker, 1).message or "")
        assert set(worker.answer(2)) == {10}
    made.close()


def test_a_sequence_whose_grammar_compiles_can_be_aborted_and_has_its_deadline() -> None:
    go_on = threading.Event()

    def late() -> Vocabulary:
        go_on.wait(TIMEOUT_S)
        return vocabulary()

    made = constraints(late)
    with serving(certifying(), 2, made) as worker:
        worker.submit(1, make_request([5, 6], 30, grammar=JSON))
        worker.submit(2, make_request([5, 6], 30, grammar=JSON, deadline_s=0.01))
        worker.submit(3, make_request([5, 6], 30))
        assert last(worker, 2).error == "deadline"
        worker.send(AbortSequence(1))
        assert last(worker, 1).finish == "abort"
        assert len(worker.answer(3)) == 30
        go_on.set()
        worker.submit(4, make_request([5, 6], 60, grammar=JSON))
        assert json.loads(text(worker.answer(4)))["b"] == 1
    made.close()
