"""How many lines are in flight."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.lines.pace import SendPace, pause_s


@pytest.mark.parametrize(
    ("attempt", "asked", "pause"),
    [(1, None, 0.5), (2, None, 1), (4, None, 4), (9, None, 60), (999, None, 60)]
    + [(1, 7.0, 7.0), (9, 0.0, 0.0), (1, 3600.0, 60.0), (1, -1.0, 0.0)],
)
def test_pauses(attempt: int, asked: float | None, pause: float) -> None:
    assert pause_s(attempt, asked) == pause


def test_those_refused_together_halve_the_limit_once() -> None:
    pace = SendPace(8)
    for _ in range(8):
        pace.sent()
    assert not pace.has_room(0.0)
    for _ in range(8):
        pace.busy(0.0, 2.0)
    assert (pace.limit, pace.wait_s(0.5), pace.has_room(0.5), pace.has_room(2.0)) == (
        *(4, 1.5, False, True),
    )
    for _ in range(8):
        pace.sent()
        pace.answered()
    assert pace.limit == 6


def test_the_limit_grows_slowly_where_the_server_was_busy() -> None:
    pace, answers = SendPace(400), list[int]()
    pace.sent()
    pace.busy(0.0, 0.0)
    for limit in (350, 380):
        answers.append(0)
        while pace.limit < limit:
            pace.sent()
            pace.answered()
            answers[-1] += 1
    assert answers == [600, 1320]


MOVES = st.lists(st.sampled_from(("send", "answer", "busy", "lose", "wait")))


@given(st.integers(1, 9), MOVES)
def test_the_limit_stays_within_bounds(most: int, moves: list[str]) -> None:
    pace, active, now = SendPace(most), 0, 0.0
    for move in moves:
        if move == "wait":
            now += 1.0
        elif move == "send":
            if pace.has_room(now):
                assert active < most
                pace.sent()
                active += 1
        elif active:
            active -= 1
            if move == "busy":
                pace.busy(now, 2.0)
            else:
                (pace.answered if move == "answer" else pace.lost)()
        assert 1 <= pace.limit <= most
    assert active or pace.has_room(now + 2.0), "a batch comes to a halt"
