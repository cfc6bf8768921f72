"""Whose costly work begins, whatever comes and goes in whatever order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.common.turns import LineFull, Room, Turns, WorkTurn

ROOM = Room(size=3, of_one=2, line=100)


class Desk:
    """Turns by short names: `a1` is tenant a's, `A1` is one of its batch's."""

    def __init__(self, room: Room = ROOM) -> None:
        self.turns: Turns[str] = Turns({"g": room, "t": room})
        self.known: dict[str, WorkTurn[str]] = {}

    def join(self, *names: str, size: int = 1, kind: str = "g") -> None:
        for name in names:
            turn = WorkTurn(kind, name[0].lower(), name[0].isupper(), size, name)
            self.known[name] = turn
            self.turns.join(turn)

    def begin(self) -> list[str]:
        return [turn.work for turn in self.turns.begin()]

    def leave(self, name: str) -> list[str]:
        self.turns.leave(self.known[name])
        return self.begin()


def test_one_tenant_leaves_room_for_who_comes_next() -> None:
    desk = Desk()
    desk.join("a1", "a2", "a3", "a4")
    assert desk.begin() == ["a1", "a2"]
    desk.join("b1", "b2")
    assert desk.begin() == ["b1"]
    assert desk.leave("a1") == []  # a and b run one each while both wait: the rest is for another
    desk.join("c1")
    assert desk.begin() == ["c1"]
    assert desk.leave("b1") == ["b2"]
    assert desk.leave("c1") == ["a3"]  # b does not wait any more


def test_lines_take_turns() -> None:
    desk = Desk(Room(1, 1, 100))
    desk.join("a1", "a2", "a3", "b1", "b2")
    order = desk.begin()
    for _ in range(4):
        order += desk.leave(order[-1])
    assert order == ["a1", "b1", "a2", "b2", "a3"]


def test_batches_begin_when_no_live_request_waits() -> None:
    desk = Desk()
    desk.join("A1", "B1", "B2", "C1")
    assert desk.begin() == ["A1", "B1"]  # of all batches together two
    desk.join("a1", "a2")
    assert desk.begin() == ["a1"]  # the room that batches left
    assert desk.leave("B1") == []  # a's own line runs beside its live request
    assert desk.leave("A1") == ["a2", "C1"]
    assert desk.leave("a1") == ["B2"]


def test_who_leaves_a_line_costs_it_nothing() -> None:
    desk = Desk(Room(1, 1, 100))
    desk.join("a1", "b1", "b2", "b3", "c1")
    assert desk.begin() == ["a1"]
    assert desk.leave("b2") == []
    assert desk.leave("b1") == []
    assert desk.leave("a1") == ["b3"]
    assert desk.leave("b3") == ["c1"]
    assert desk.leave("c1") == desk.leave("c1") == []


def test_large_work_is_not_overtaken() -> None:
    desk = Desk(Room(10, 6, 100))
    desk.join("a1", size=4)
    desk.join("b1", size=50)
    desk.join("c1", size=1)
    assert desk.begin() == ["a1"]
    assert desk.leave("a1") == ["b1"]
    assert desk.leave("b1") == ["c1"]


def test_kinds_do_not_wait_for_each_other() -> None:
    desk = Desk(Room(1, 1, 100))
    desk.join("a1", "a2")
    desk.join("a3", kind="t")
    assert desk.begin() == ["a1", "a3"]


def test_a_line_is_bounded() -> None:
    desk = Desk(Room(1, 1, 2))
    desk.join("a1", "a2")
    with pytest.raises(LineFull):
        desk.join("a3")
    desk.join("A1", "b1")
    assert desk.begin() == ["a1"]
    desk.join("a4")


rooms = st.builds(Room, st.integers(1, 6), st.integers(1, 6), st.just(100))
# Who comes, and with how much; or the number of the one that leaves.
events = st.lists(
    st.one_of(st.tuples(st.sampled_from("abcABC"), st.integers(1, 8)), st.integers(0, 50)),
    max_size=40,
)


@given(rooms, events)
def test_whatever_comes_and_goes(room: Room, events: list[tuple[str, int] | int]) -> None:
    turns: Turns[int] = Turns({"g": room})
    waiting: list[WorkTurn[int]] = []
    running: list[WorkTurn[int]] = []

    def begin() -> None:
        for turn in turns.begin():
            others = [other for other in waiting if other.tenant != turn.tenant]
            assert not any(o.work < turn.work and alike(o, turn) for o in waiting), "first come"
            assert not turn.is_batch or all(other.is_batch for other in waiting)
            mine = [other for other in running if other.tenant == turn.tenant]
            assert not mine or all(other.is_batch and not turn.is_batch for other in others)
            beside = [o for o in running if o in mine or (turn.is_batch and o.is_batch)]
            assert not beside or sum(o.size for o in (*beside, turn)) <= room.of_one
            waiting.remove(turn)
            running.append(turn)
        assert sum(min(turn.size, room.size) for turn in running) <= room.size
        assert bool(running) or not waiting, "somebody goes on"

    for number, event in enumerate(events):
        if isinstance(event, int):
            for place in (waiting, running):
                if event < len(place):
                    turns.leave(place.pop(event))
                    break
        else:
            name, size = event
            turn = WorkTurn("g", name.lower(), name.isupper(), size, number)
            turns.join(turn)
            waiting.append(turn)
        begin()
    while running:
        turns.leave(running.pop(0))
        begin()
    assert not waiting


def alike(one: WorkTurn[int], other: WorkTurn[int]) -> bool:
    return (one.tenant, one.is_batch) == (other.tenant, other.is_batch)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40))
def test_a_newcomer_waits_for_one_turn_of_each_other(names: list[str]) -> None:
    desk = Desk(Room(1, 1, 100))
    desk.join(*(f"{name}{i}" for i, name in enumerate(names)))
    order = desk.begin()
    desk.join("z")
    while order[-1] != "z":
        order += desk.leave(order[-1])
    assert len(order) <= 2 + len(set(names))
