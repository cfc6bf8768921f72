"""The test of scores: its errors over whole rollouts that are looked at all the time."""

import random
from collections.abc import Callable

import pytest

from loraplex.router.policy.guards import Measured, breach, judged
from loraplex.router.policy.rollout import NO_SCORES, Guards, ScorePair, Scores

ERROR = 0.05
_LOOK = 25


def yes_or_no(draws: random.Random, mean: float) -> float:
    return float(draws.random() < mean)


def spread(draws: random.Random, mean: float) -> float:
    return draws.betavariate(4 * mean, 4 * (1 - mean))


def taken_back_at(
    draws: random.Random,
    draw: Callable[[random.Random, float], float],
    means: tuple[float, float],
    requests: int,
    margin: float = 0.0,
) -> int | None:
    """After how many scores a rollout ends, as it is looked at after every few."""
    count, total, share = [0, 0], [0.0, 0.0], draws.choice((0.05, 0.5))
    for number in range(1, requests + 1):
        new = draws.random() < share
        count[new] += 1
        total[new] += draw(draws, means[new])
        pair = ScorePair(Scores(count[0], total[0]), Scores(count[1], total[1]))
        if number % _LOOK == 0 and pair.p_value(margin) <= ERROR:
            return number
    return None


@pytest.mark.parametrize("draw", [yes_or_no, spread])
@pytest.mark.parametrize("mean", [0.5, 0.95])
def test_an_equal_version_seldom_goes_back(
    draw: Callable[[random.Random, float], float], mean: float
) -> None:
    draws = random.Random(7)
    runs = [taken_back_at(draws, draw, (mean, mean), 1000) for _ in range(100)]
    assert sum(run is not None for run in runs) <= ERROR * len(runs)


@pytest.mark.parametrize(("means", "margin"), [((0.8, 0.6), 0.0), ((0.9, 0.65), 0.05)])
def test_a_worse_version_goes_back(means: tuple[float, float], margin: float) -> None:
    draws = random.Random(7)
    runs = [taken_back_at(draws, yes_or_no, means, 8000, margin) for _ in range(20)]
    assert None not in runs


def test_no_more_is_asked_than_the_margin() -> None:
    draws = random.Random(7)
    runs = [taken_back_at(draws, yes_or_no, (0.9, 0.85), 1000, 0.05) for _ in range(60)]
    assert sum(run is not None for run in runs) <= ERROR * len(runs)


def test_little_says_little() -> None:
    assert NO_SCORES.p_value(0.0) == 1.0
    assert ScorePair(Scores(0), Scores(9, 0.0)).p_value(0.0) == 1.0
    assert ScorePair(Scores(3, 3.0), Scores(3, 0.0)).p_value(0.0) > 0.05
    assert ScorePair(Scores(9, 9.0), Scores(9, 0.0)).p_value(0.0) < 0.001
    assert ScorePair(Scores(9, 9.0), Scores(9, 0.0)).p_value(0.5) > 0.001
    assert ScorePair(Scores(9, 5.0), Scores(900, 800.0)).p_value(0.0) == 1.0, "a better one"


def test_scores_decide_before_there_are_requests_enough() -> None:
    pair = ScorePair(Scores(40, 38.0), Scores(20, 4.0))
    few = Measured(20)
    assert "0.2 over 20 requests" in (breach(Guards(), Measured(40), few, pair) or "")
    assert judged(Guards(), Measured(40), few, pair) == "breaks"
    assert judged(Guards(max_score_drop=None), Measured(40), few, pair) == "early"
