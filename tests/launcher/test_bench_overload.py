"""What an overload does to a fleet: how it is judged, and that the command measures it."""

import json

import pytest

from loraplex.launcher.__main__ import main
from loraplex.launcher.bench.load.overload import goodput, late_s, recovered_s
from loraplex.launcher.bench.report import Outcome


def answered(sent_s: float, first_s: float, end_s: float) -> Outcome:
    """Times of the first token and of the end are seconds from the sending."""
    return Outcome(None, False, sent_s, [sent_s + first_s], sent_s + end_s)


def refused(sent_s: float) -> Outcome:
    return Outcome(None, False, sent_s, end_s=sent_s, error="429", retry_after_s=1.0)


def test_only_answers_in_time_are_good() -> None:
    outcomes = [
        answered(0.0, 0.5, 0.9),  # before
        answered(1.0, 0.5, 1.0),
        answered(1.0, 3.0, 3.5),  # its first token was late
        refused(2.0),
        answered(2.0, 0.5, 3.0),  # after
    ]
    assert goodput(outcomes, 1.0, since_s=1.0, until_s=5.0) == 0.25


def test_a_second_is_bad_if_its_first_tokens_were_late_or_one_was_refused() -> None:
    calm = [answered(10.0 + 0.25 * i, 0.1, 0.2) for i in range(40)]
    assert recovered_s(calm, 10.0, 0.1) == 0.0
    assert recovered_s([*calm, refused(12.5)], 10.0, 0.1) == 3.0
    late = [answered(14.0 + 0.01 * i, 0.2, 0.3) for i in range(9)]
    assert recovered_s([*calm, refused(12.5), *late], 10.0, 0.1) == 5.0
    assert recovered_s([*calm, *late[:3]], 10.0, 0.1) == 0.0, "fewer than those in time"


def test_a_generator_is_late_by_what_it_lost_since_its_most_punctual_call() -> None:
    outcomes = [answered(sent_s, 0.1, 0.2) for sent_s in (5.0, 6.5, 7.0)]
    assert late_s(outcomes, [0.0, 1.0, 2.0]) == [0.0, 0.5, 0.0]


def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    fleet = ["--workers", "1", "--rows", "4", "--tokens", "4", "--step-ms", "50"]
    load = ["--times", "4", "--seconds", "2", "--recovery-s", "1"]
    main(["bench", "overload", *fleet, *load, "--json"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    (load_of_4,) = result["loads"]
    assert result["capacity"] == 20.0
    assert load_of_4["refused"] > 0
    assert load_of_4["no_retry_after"] == load_of_4["failed"] == 0
    assert 0.0 < load_of_4["refusal_p50_ms"] <= load_of_4["refusal_p99_ms"]
