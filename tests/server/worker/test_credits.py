"""Routers of one worker share its capacity."""

from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.worker.sequences import share_credits

IN_FLIGHT = st.dictionaries(st.integers(0, 50), st.integers(0, 300), min_size=1, max_size=8)


def test_a_router_alone_has_all() -> None:
    assert share_credits(320, {7: 0}) == {7: 320}
    assert share_credits(320, {}) == {}


def test_equals_have_equal_shares() -> None:
    assert share_credits(320, {1: 0, 2: 0}) == {1: 160, 2: 160}
    assert share_credits(320, {1: 160, 2: 160}) == {1: 160, 2: 160}


def test_who_has_work_gets_what_the_idle_do_not_want() -> None:
    shares = share_credits(320, {1: 160, 2: 0})
    assert shares[1] >= 240
    assert shares[2] >= 40


@given(st.integers(1, 500), IN_FLIGHT)
def test_never_more_than_there_is(capacity: int, in_flight: dict[int, int]) -> None:
    shares = share_credits(capacity, in_flight)
    assert shares.keys() == in_flight.keys()
    assert sum(shares.values()) == capacity
    assert min(shares.values()) >= min(1, capacity // len(shares))


@given(st.integers(8, 500), IN_FLIGHT)
def test_more_work_means_no_smaller_share(capacity: int, in_flight: dict[int, int]) -> None:
    shares = share_credits(capacity, in_flight)
    by_work = sorted(in_flight, key=lambda router: in_flight[router])
    for less, more in zip(by_work, by_work[1:], strict=False):
        assert shares[less] <= shares[more] + 1
