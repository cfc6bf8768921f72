"""Pins, preloads and evictions ordered from outside, beside sequences."""

from server.engine.messages import AdapterSettled
from tests.server.engine.harness import Harness, limits, make_request


def test_a_preload_comes_to_the_device_and_tells() -> None:
    harness = Harness()
    harness.scheduler.loads.preload("a")
    harness.run()
    assert harness.settled == [AdapterSettled("a", True)]
    harness.scheduler.loads.preload("a")
    harness.drain()
    assert harness.settled[1:] == [AdapterSettled("a", True)], "it is there already"
    harness.assert_at_rest()


def test_a_preload_that_fails_says_why_and_is_not_asked_for_again() -> None:
    harness = Harness(auto_stage=False)
    harness.scheduler.loads.preload("a")
    harness.cycle()
    harness.miss("a", "not on disk")
    harness.run()
    assert harness.settled == [AdapterSettled("a", False, "not on disk")]
    assert not harness.needed


def test_preloads_come_after_those_that_somebody_waits_for() -> None:
    harness = Harness(auto_stage=False)
    harness.scheduler.loads.max_loading = 1
    harness.scheduler.loads.preload("wanted")
    harness.submit(make_request([5, 6], 2, "waited for"))
    harness.cycle()
    assert harness.needed == ["waited for"]


def test_an_eviction_waits_for_the_last_sequence() -> None:
    harness = Harness()
    first = harness.submit(make_request([5, 6], 8, "a", ignore_eos=True))
    harness.cycle()
    harness.cycle()
    second = harness.submit(make_request([5, 7], 8, "a", ignore_eos=True))
    harness.scheduler.loads.condemn("a")
    while not (harness.events.get(first) and harness.last(first).finish):
        harness.cycle()
        assert not harness.settled
    harness.run()
    assert harness.last(second).finish == "length"
    assert harness.settled == [AdapterSettled("a", False)]
    assert harness.scheduler.arena.stage("a") == "absent"
    harness.assert_at_rest()


def test_a_pin_ends_an_eviction_that_waits() -> None:
    harness = Harness()
    running = harness.submit(make_request([5, 6], 8, "a", ignore_eos=True))
    while not harness.events.get(running):
        harness.cycle()
    harness.scheduler.loads.condemn("a")
    harness.scheduler.loads.condemn("b")
    harness.scheduler.loads.pin_only(["a", "b"])
    harness.run()
    assert harness.last(running).finish == "length"
    assert harness.settled == [
        AdapterSettled("a", True, "the adapter is pinned"),
        AdapterSettled("b", False, "the adapter is pinned"),
        AdapterSettled("b", True),
    ]


def test_the_pinned_are_not_evicted_and_what_does_not_fit_beside_them_is_refused() -> None:
    harness = Harness(limits(arena_extents=3, adapter_slots=3))
    harness.scheduler.loads.pin_only(["a"])
    harness.run()
    harness.scheduler.loads.condemn("a")
    harness.drain()
    assert harness.settled == [
        AdapterSettled("a", True),
        AdapterSettled("a", True, "the adapter is pinned"),
    ]
    key = harness.submit(make_request([5], 2, "large"))  # two extents, one is left
    harness.run()
    assert harness.last(key).error == "adapter_unavailable"
    assert "pinned" in (harness.last(key).message or "")
    harness.scheduler.loads.pin_only(())
    key = harness.submit(make_request([5], 2, "large"))
    harness.run()
    assert harness.last(key).error is None
    harness.assert_at_rest()


def test_a_pin_that_comes_while_another_waits_for_room_refuses_that_one() -> None:
    harness = Harness(limits(arena_extents=3, adapter_slots=3))
    running = harness.submit(make_request([5, 6], 20, "a", ignore_eos=True))
    while not harness.events.get(running):
        harness.cycle()
    waiting = harness.submit(make_request([5], 2, "b"))
    harness.cycle()
    harness.cycle()
    assert waiting not in harness.events
    harness.scheduler.loads.pin_only(["a"])
    harness.cycle()
    assert harness.last(waiting).error == "adapter_unavailable"
    harness.run()
    assert harness.last(running).finish == "length"
