"""The order of a batch's lines: adapter by adapter, and few adapters at a time."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.lines.order import BAD, BLANK, TWICE, AdapterWindow, send_order

GROUPS = st.lists(st.sampled_from((0, 1, 2, 3, BAD, TWICE, BLANK)))


def test_an_example() -> None:
    groups = [0, 1, 0, BLANK, 2, BAD, 1, 0, TWICE]
    answered = [0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert send_order(groups, answered).tolist() == [8, 5, 0, 7, 1, 6, 4]


@given(GROUPS, st.data())
def test_each_open_line_once_and_adapters_change_as_seldom_as_can_be(
    groups: list[int], data: st.DataObject
) -> None:
    size = len(groups)
    answered = data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    order = send_order(groups, answered).tolist()
    still = [i for i in range(size) if not answered[i] and groups[i] != BLANK]
    assert sorted(order) == still
    sent = [groups[place] for place in order]
    assert sum(one != other for one, other in pairwise(sent)) == max(0, len({*sent}) - 1)
    for group in {*sent}:
        own = [place for place in order if groups[place] == group]
        assert own == sorted(own)


@given(st.integers(1, 3), st.lists(st.integers(0, 5)), st.data())
def test_the_window_has_so_many_adapters_at_most(
    most: int, lines: list[int], data: st.DataObject
) -> None:
    window, in_flight = AdapterWindow(most), list[int]()
    for group in lines:
        while not window.has_room(group):
            assert in_flight, "nothing in flight, and no room"
            number = data.draw(st.integers(0, len(in_flight) - 1))
            window.end(in_flight.pop(number))
        window.begin(group)
        in_flight.append(group)
        assert len({*in_flight}) <= most
