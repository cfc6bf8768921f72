"""Frames leave in order; the buffer never exceeds its bounds; the status is never stale."""

from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.worker.outbox import Outbox

MAX_FRAMES, MAX_BYTES = 5, 40


def test_one_frame_of_any_size_is_taken_when_nothing_waits() -> None:
    outbox = Outbox(MAX_FRAMES, MAX_BYTES)
    assert outbox.push(b"x" * 100)
    assert not outbox.push(b"y")


def test_only_the_newest_status_is_kept() -> None:
    outbox = Outbox(MAX_FRAMES, MAX_BYTES)
    outbox.push(b"frame")
    outbox.push_status(b"old")
    outbox.push_status(b"new")
    assert [outbox.pop() for _ in range(3)] == [b"new", b"frame", None]


@given(st.lists(st.one_of(st.none(), st.binary(min_size=1, max_size=20)), max_size=60))
def test_bounds_and_order(actions: list[bytes | None]) -> None:
    outbox = Outbox(MAX_FRAMES, MAX_BYTES)
    expected: list[bytes] = []
    for action in actions:
        if action is None:
            assert outbox.pop() == (expected.pop(0) if expected else None)
        elif outbox.push(action):
            expected.append(action)
        else:
            assert len(expected) == MAX_FRAMES or sum(map(len, [*expected, action])) > MAX_BYTES
        assert len(outbox) == len(expected) <= MAX_FRAMES
        assert outbox.nbytes == sum(map(len, expected)) <= MAX_BYTES
