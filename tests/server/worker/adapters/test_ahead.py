"""What is brought ahead is bounded, and kept for a while."""

from loraplex.server.worker.adapters.ahead import KEPT_S, Ahead


def test_half_of_the_memory_is_for_what_nobody_has_taken_yet() -> None:
    ahead = Ahead(9)
    ahead.add("a", 3, 0.0)
    assert ahead.has_room(1, 0.0)
    assert not ahead.has_room(2, 0.0)
    ahead.discard("a")
    ahead.discard("never here")
    assert ahead.has_room(4, 0.0)
    assert not ahead.kept(0.0)


def test_what_nobody_takes_is_kept_for_a_while_only() -> None:
    ahead = Ahead(4)
    ahead.add("a", 1, 0.0)
    ahead.add("b", 1, 1.0)
    assert list(ahead.kept(KEPT_S)) == ["a", "b"]
    assert list(ahead.kept(KEPT_S + 0.5)) == ["b"]
    ahead.add("a", 1, KEPT_S + 0.5)
    ahead.add("b", 1, KEPT_S + 0.5)  # it had to go, and was brought again
    assert list(ahead.kept(KEPT_S + 1.5)) == ["a", "b"]
    assert not ahead.has_room(1, 2 * KEPT_S)
    assert ahead.has_room(2, 3 * KEPT_S)
