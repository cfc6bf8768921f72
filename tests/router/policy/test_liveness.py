"""Finds workers that are not heard, or do not hear."""

import pytest

from loraplex.router.policy.placement.liveness import Hearing, Liveness

LIMIT_S = 1.0


@pytest.mark.parametrize(
    ("heard_at", "asked_at", "now", "hearing"),
    [
        (0.0, None, 1.0, "good"),
        (0.0, None, 1.1, "silent"),
        (5.0, 4.0, 5.0, "good"),
        (5.0, 4.0, 5.1, "deaf"),
        (5.0, 5.0, 6.1, "silent"),  # who says nothing need not have heard nothing
    ],
)
def test_judgements(heard_at: float, asked_at: float | None, now: float, hearing: Hearing) -> None:
    liveness = Liveness(0.0)
    liveness.heard(heard_at)
    if asked_at is not None:
        liveness.asked(asked_at)
    assert liveness.judge(now, LIMIT_S) == (hearing != "good")
    assert liveness.hearing == hearing
    liveness.heard(now)
    liveness.answered()
    assert liveness.judge(now, LIMIT_S) == (hearing != "good")
    assert liveness.hearing == "good"


def test_who_did_not_listen_blames_nobody() -> None:
    liveness = Liveness(0.0)
    liveness.asked(0.0)
    liveness.excuse(10.0)
    assert not liveness.judge(11.0, LIMIT_S)
    liveness.heard(11.0)
    assert liveness.judge(11.1, LIMIT_S)
    assert liveness.hearing == "deaf"


@pytest.mark.parametrize(("speaks", "hearing"), [(True, "deaf"), (False, "silent")])
def test_who_is_late_at_each_look_judges_late_but_judges(speaks: bool, hearing: Hearing) -> None:
    liveness = Liveness(0.0)
    liveness.asked(0.0)
    for look in range(1, 40):
        if speaks:
            liveness.heard(look)
        liveness.excuse(look)
        liveness.judge(look, LIMIT_S)
        assert liveness.hearing == ("good" if look < 22 else hearing), look
    liveness.heard(40)
    liveness.answered()
    liveness.asked(40)
    liveness.excuse(50)
    assert liveness.judge(50, LIMIT_S), "it is good again, and is forgiven anew"


def test_a_question_behind_a_large_frame_counts_once_it_is_sent() -> None:
    liveness = Liveness(0.0)
    liveness.unsent(1000, 0.0)
    liveness.asked(0.0)
    for now, left in ((0.5, 900), (1.0, 500), (1.5, 100)):
        liveness.heard(now)
        liveness.unsent(left, now)
        assert not liveness.judge(now, LIMIT_S)
    for now, left in ((2.0, 100), (2.5, 100), (2.6, 300)):  # it does not get less any more
        liveness.heard(now)
        liveness.unsent(left, now)
        liveness.judge(now, LIMIT_S)
    assert liveness.hearing == "deaf"


def test_who_has_not_read_all_judges_late_but_judges() -> None:
    liveness = Liveness(0.0)
    liveness.asked(0.0)
    for now in range(2, 13):
        liveness.heard(now)
        liveness.unread(100, now)
        assert not liveness.judge(now, LIMIT_S), now
    liveness.heard(12.5)
    liveness.unread(100, 12.5)
    assert liveness.judge(12.5, LIMIT_S)
    assert liveness.hearing == "deaf"
    liveness.answered()
    liveness.unread(0, 13.0)
    assert liveness.judge(13.0, LIMIT_S), "it is good again"
