"""Scores of answers, their intervals and the sign test: tables, and what holds for all."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.launcher.evaluation import scores
from loraplex.launcher.evaluation.scores import EvalLine

SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


def case(answer: Any = None, **more: Any) -> EvalLine:
    return EvalLine(prompt="?", answer=answer, **more)


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [(" 4\n", "4", 1), ("4", 4, 1), ("b", ["a", "b"], 1), ("4.", "4", 0), ("", "4", 0)],
)
def test_exact(text: str, answer: Any, right: float) -> None:
    assert scores.exact(text, case(answer)) == right


@pytest.mark.parametrize(
    ("text", "pattern", "right"), [("is 42.", r"\b42\b", 1), ("is 421", r"\b42\b", 0)]
)
def test_regex(text: str, pattern: str, right: float) -> None:
    assert scores.regex(text, case(pattern)) == right


@pytest.mark.parametrize(
    ("text", "line", "right"),
    [
        ('{"b": [1.0], "a": 2}', case({"a": 2, "b": [1]}), 1),
        ('{"a": true}', case({"a": 1}), 0),
        ('{"a": 1} ', case(schema=SCHEMA), 1),
        ('{"a": "1"}', case(schema=SCHEMA), 0),
        ('{"a": 1}', case({"a": 2}, schema=SCHEMA), 0),
        ('{"a": 1', case(schema=SCHEMA), 0),
        ("NaN", case(schema={"minimum": 0}), 0),
        ("[" * 9999, case(schema={"type": "array"}), 0),
        ('"\ud800"', case("x"), 0),
        ("false", case(False), 1),
    ],
)
def test_json(text: str, line: EvalLine, right: float) -> None:
    assert scores.json_value(text, line) == right


def test_choices_by_number_and_by_text() -> None:
    for answer in (1, "b"):
        line = case(answer, choices=["a", "b"])
        assert scores.choice([-2.0, -1.0], line) == 1
        assert scores.choice([-1.0, -1.0], line) == 0


@pytest.mark.parametrize(
    ("text", "points"), [("10", 1.0), (" 7\n", 0.7), ("0", 0.0), ("11", None), ("good", None)]
)
def test_points_of_a_judge(text: str, points: float | None) -> None:
    assert scores.judged(text) == points


@pytest.mark.parametrize(
    ("line", "score", "words"),
    [
        (EvalLine(answer="x"), "exact", "`prompt` or `messages`"),
        (case(), "exact", "no `answer`"),
        (case("("), "regex", "unterminated"),
        (case(3), "regex", "must be a pattern, got 3"),
        (case(2, choices=["a", "b"]), "choice", "none of the 2"),
        (case(True, choices=["a", "b"]), "choice", "none of the 2"),
        (case("c", choices=["a", "b"]), "choice", "none of the 2"),
        (case(schema={"type": "thing"}), "json", "`schema`"),
        (case(schema={}), "json", "no `answer`"),
    ],
)
def test_lines_that_cannot_be_scored(line: EvalLine, score: str, words: str) -> None:
    assert words in (scores.fault_of(line, score) or "")


def test_lines_that_can() -> None:
    lines = [(case(), "judge"), (case("x"), "exact"), (case(schema=SCHEMA), "json")]
    assert [scores.fault_of(*line) for line in lines] == [None] * 3


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (1, 1, 0.2065, 1.0), (50, 100, 0.4038, 0.5962)],
)
def test_wilson(hits: int, n: int, low: float, high: float) -> None:
    assert scores.wilson(hits, n) == pytest.approx((low, high), abs=5e-5)


def test_interval_of_other_scores() -> None:
    low, high = scores.interval([0.2, 0.4, 0.6, 0.8])
    half = scores.Z95 * math.sqrt(0.2 / 3 / 4)
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half))
    assert scores.interval([]) == scores.interval([0.5]) == (0.0, 1.0)


@given(st.lists(st.floats(0, 1) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=40))
def test_an_interval_is_around_the_mean(found: list[float]) -> None:
    low, high = scores.interval(found)
    mean = sum(found) / len(found)
    assert 0 <= low <= mean + 1e-12
    assert mean - 1e-12 <= high <= 1


@given(st.integers(1, 200), st.data())
def test_wilson_is_symmetric_and_narrows(n: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, n))
    low, high = scores.wilson(hits, n)
    other = scores.wilson(n - hits, n)
    assert (1 - high, 1 - low) == pytest.approx(other)
    for share in (low, high):  # at a bound, the score lies just so far from it
        distance = (hits / n - share) ** 2
        assert distance == pytest.approx(scores.Z95**2 * share * (1 - share) / n, abs=1e-9)
    wider = scores.wilson(4 * hits, 4 * n)
    assert wider[1] - wider[0] < high - low


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [(0, 0, 1.0), (5, 0, 0.0625), (9, 1, 22 / 1024), (3, 3, 1.0), (1, 9, 22 / 1024)],
)
def test_sign_test(wins: int, losses: int, p: float) -> None:
    assert scores.sign_test(wins, losses) == pytest.approx(p)


@given(st.integers(0, 300), st.integers(0, 300))
def test_sign_test_is_a_chance(wins: int, losses: int) -> None:
    p = scores.sign_test(wins, losses)
    assert 0 <= p <= 1
    assert p == scores.sign_test(losses, wins)
    assert scores.sign_test(max(wins, losses) + 1, min(wins, losses)) <= p + 1e-9
    whole = sum(math.comb(wins + losses, k) for k in range(min(wins, losses) + 1))
    assert p == pytest.approx(min(1.0, 2 * whole / 2 ** (wins + losses)), rel=1e-9)


@given(st.lists(st.tuples(*[st.none() | st.sampled_from([0.0, 0.5, 1.0])] * 2)))
def test_comparisons_turn_around(pairs: list[tuple[float | None, float | None]]) -> None:
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    wins, losses, ties = scores.compare(ours, theirs)
    assert scores.compare(theirs, ours) == (losses, wins, ties)
    assert wins + losses + ties == sum(None not in pair for pair in pairs)
