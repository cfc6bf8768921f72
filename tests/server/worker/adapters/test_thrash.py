"""Thrash: what was pushed off the device and is wanted there again soon."""

from loraplex.server.worker.adapters.thrash import MAX_REMEMBERED, ThrashWatch


def test_soon_again_is_thrash_once() -> None:
    watch = ThrashWatch(300.0)
    watch.changed(("a", "b"), ("b", "c"), 10.0)
    assert not watch.loads("b", 11.0)
    assert watch.loads("a", 310.0)
    assert not watch.loads("a", 311.0)


def test_late_is_not() -> None:
    watch = ThrashWatch(300.0)
    watch.changed(("a",), (), 10.0)
    assert not watch.loads("a", 310.5)


def test_it_is_bounded_and_forgets_the_oldest() -> None:
    watch = ThrashWatch(300.0)
    watch.changed(("first",), (), 0.0)
    watch.changed(tuple(map(str, range(MAX_REMEMBERED))), (), 1.0)
    assert not watch.loads("first", 2.0)
    assert watch.loads("7", 2.0)
