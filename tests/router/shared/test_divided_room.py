"""Room that owners share."""

from loraplex.router.shared.divided_room import DividedRoom


def test_the_oldest_of_the_owner_of_most_goes() -> None:
    room = DividedRoom()
    for owner, key in (("a", "1"), ("b", "2"), ("b", "3"), ("b", "2")):
        room.put(owner, key, 9.0)
    assert (len(room), room.pop()) == (3, "3")
    room.drop("2")
    room.drop("none")
    assert (len(room), room.pop(), len(room)) == (1, "1", 0)


def test_what_is_over_is_taken_out_from_the_oldest_on() -> None:
    room = DividedRoom()
    for key, until in (("1", 5.0), ("2", 9.0), ("3", 5.0)):
        room.put("a", key, until)
    assert room.expired(4.9, 3) == []
    assert room.expired(5.0, 2) == ["1"]
    assert room.expired(5.0, 2) == ["3"]
    assert len(room) == 1
