"""Pins, preloads and evictions ordered from outside, beside sequences."""

import pytest

from loraplex.server.engine.messages import AdapterSettled
from tests.server.engine.harness import Harness, limits, make_request

EVICTED = "it was evicted meanwhile"
LOADED = "it was loaded again meanwhile"
PINNED = "the adapter is pinned"


def test_a_preload_comes_to_the_device_and_tells() -> None:
    harness = Harness()
    harness.scheduler.loads.preload(1, "a")
    harness.scheduler.loads.preload(2, "a")
    harness.run()
    assert harness.settled == [AdapterSettled(1), AdapterSettled(2)]
    harness.scheduler.loads.preload(3, "a")
    harness.exchange()
    assert harness.settled[2:] == [AdapterSettled(3)], "it is there already"
    harness.assert_at_rest()


def test_a_preload_that_fails_says_why_and_is_not_asked_for_again() -> None:
    harness = Harness(auto_stage=False)
    harness.scheduler.loads.preload(1, "a")
    harness.cycle()
    harness.miss("a", "not on disk")
    harness.run()
    assert harness.settled == [AdapterSettled(1, "not on disk")]
    assert not harness.needed


def test_preloads_come_after_those_that_somebody_waits_for() -> None:
    harness = Harness(auto_stage=False)
    harness.scheduler.loads.max_loading = 1
    harness.scheduler.loads.preload(1, "wanted")
    harness.submit(make_request([5, 6], 2, "waited for"))
    harness.cycle()
    assert harness.needed == ["waited for"]


def test_an_eviction_waits_for_the_last_sequence() -> None:
    harness = Harness()
    first = harness.submit(make_request([5, 6], 8, "a", ignore_eos=True))
    harness.cycle()
    harness.cycle()
    second = harness.submit(make_request([5, 7], 8, "a", ignore_eos=True))
    harness.scheduler.loads.condemn(1, "a")
    while not (harness.events.get(first) and harness.last(first).finish):
        harness.cycle()
        assert not harness.settled
    harness.run()
    assert harness.last(second).finish == "length"
    assert harness.settled == [AdapterSettled(1)]
    assert harness.scheduler.arena.stage("a") == "absent"
    harness.assert_at_rest()


def test_of_a_preload_and_an_eviction_the_later_is_carried_out() -> None:
    harness = Harness()
    loads = harness.scheduler.loads
    loads.preload(1, "a")
    harness.cycle()
    loads.condemn(2, "a")
    harness.run()
    assert harness.settled == [AdapterSettled(1, EVICTED), AdapterSettled(2)]
    assert harness.scheduler.arena.stage("a") == "absent"
    loads.condemn(3, "b")
    loads.preload(4, "b")
    harness.run()
    assert harness.settled[2:] == [AdapterSettled(3, LOADED), AdapterSettled(4)]
    assert harness.scheduler.arena.stage("b") == "ready"


@pytest.mark.parametrize("waits", [False, True])
def test_an_eviction_needs_no_round_after_the_last_that_does_something(waits: bool) -> None:
    """Of what is staged, and wanted by nobody any more: by a preload, or by a request that ends."""
    harness = Harness(auto_stage=False)
    loads = harness.scheduler.loads
    if waits:
        key = harness.submit(make_request([5], 2, "a"))
    else:
        loads.preload(1, "a")
    harness.stage("a")
    loads.condemn(2, "a")
    if waits:
        harness.abort(key)
    harness.cycle()
    assert harness.settled[-1] == AdapterSettled(2)
    harness.assert_at_rest()


def test_an_eviction_does_not_outlast_who_is_refused() -> None:
    harness = Harness(limits(arena_extents=3, adapter_slots=3))
    loads = harness.scheduler.loads
    loads.preload(0, "a")
    harness.run()
    harness.auto_stage = False
    key = harness.submit(make_request([5], 2, "large"))
    harness.stage("large")
    loads.pin_only(["a"])  # it leaves no room
    loads.condemn(1, "large")
    harness.cycle()
    assert harness.last(key).error == "adapter_unavailable"
    assert harness.settled[1:] == [AdapterSettled(1)]


def test_a_pin_ends_an_eviction_that_waits() -> None:
    harness = Harness()
    running = harness.submit(make_request([5, 6], 8, "a", ignore_eos=True))
    while not harness.events.get(running):
        harness.cycle()
    loads = harness.scheduler.loads
    loads.condemn(1, "a")
    loads.preload(2, "b")
    loads.condemn(3, "b")
    loads.pin_only(["a", "b"])
    loads.preload(4, "b")
    loads.condemn(5, "b")
    harness.run()
    assert harness.last(running).finish == "length"
    assert harness.settled == [
        AdapterSettled(2, EVICTED),
        AdapterSettled(1, PINNED),
        AdapterSettled(3, PINNED),
        AdapterSettled(5, PINNED),
        AdapterSettled(4),
    ]


def test_the_pinned_are_not_evicted_and_what_does_not_fit_beside_them_is_refused() -> None:
    harness = Harness(limits(arena_extents=3, adapter_slots=3))
    harness.scheduler.loads.pin_only(["a"])
    harness.run()
    harness.scheduler.loads.condemn(1, "a")
    harness.exchange()
    assert harness.settled == [AdapterSettled(1, PINNED)]
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


def test_what_is_unpinned_before_it_came_is_not_loaded() -> None:
    harness = Harness(auto_stage=False)
    loads = harness.scheduler.loads
    loads.pin_only(["asked for", "also ordered", "staged"])
    harness.cycle()
    harness.stage("staged")
    loads.preload(1, "also ordered")
    loads.pin_only(())
    harness.auto_stage = True
    harness.run()
    assert harness.scheduler.arena.ready == ("also ordered",)
    assert harness.settled == [AdapterSettled(1)]
    harness.assert_at_rest()


def test_a_preload_that_is_withdrawn_is_not_loaded_unless_another_wants_it() -> None:
    harness = Harness(limits(adapter_slots=4), auto_stage=False)
    loads = harness.scheduler.loads
    loads.pin_only(["pinned"])
    for order, digest in enumerate(["alone", "pinned", "shared", "shared"]):
        loads.preload(order, digest)
    harness.cycle()
    for order, digest in enumerate(["alone", "pinned", "shared"]):
        loads.withdraw(order, digest)
    loads.withdraw(9, "unheard of")
    harness.auto_stage = True
    harness.run()
    assert sorted(harness.scheduler.arena.ready) == ["pinned", "shared"]
    assert harness.settled == [AdapterSettled(3)]
    loads.withdraw(3, "shared")
    harness.run()
    harness.assert_at_rest()
