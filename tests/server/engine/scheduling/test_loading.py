"""Slabs that come unasked, and adapters that are used before their copy is over."""

from collections.abc import Callable

import pytest

from loraplex.server.engine.messages import AdapterSettled
from loraplex.server.engine.scheduling.loading import AdapterLoads
from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from tests.certifying.certificates import CertifyOptions, certified_output
from tests.server.engine.harness import LIMITS, Harness, limits, make_request


def test_a_slab_that_comes_with_its_sequence_is_not_asked_for() -> None:
    harness = Harness(auto_stage=False)
    key = harness.submit(make_request([5], 4, "a"))
    harness.stage("a")
    harness.cycle()
    assert not harness.needed
    assert [copy.layout.digest for copy in harness.copies] == ["a"]
    harness.run()
    assert harness.tokens(key) == certified_output("a", [5], 4, harness.executor.options)
    harness.assert_at_rest()


def test_a_slab_that_comes_while_it_is_asked_for_is_the_answer() -> None:
    harness = Harness(auto_stage=False)
    key = harness.submit(make_request([5], 4, "a"))
    harness.cycle()
    assert harness.needed == ["a"]
    harness.stage("a")
    harness.run()
    assert harness.last(key).finish == "length"
    assert not harness.needed
    harness.assert_at_rest()


def test_no_more_slabs_are_taken_unasked_than_may_be_asked_for() -> None:
    """What the disk holds up takes no place of theirs; what comes back is asked for in its turn."""
    harness = Harness(
        limits(adapter_slots=1), config=SchedulerConfig(max_loading=2), auto_stage=False
    )
    for digest in ("slow", "slower"):
        harness.submit(make_request([5], 4, digest))
    harness.cycle()
    assert harness.needed == ["slow", "slower"]
    for digest in "abc":
        harness.submit(make_request([5], 4, digest))
        harness.stage(digest)
    harness.exchange()
    assert harness.held == {"a", "b"}
    assert sorted(harness.scheduler.loads.loading) == ["a", "b", "slow", "slower"]
    harness.auto_stage = True
    harness.run()
    assert all(events[-1].finish == "length" for events in harness.events.values())
    harness.assert_at_rest()


def test_an_adapter_is_used_while_its_host_block_is_still_read() -> None:
    options = CertifyOptions(LIMITS.vocab_size, LIMITS.eos_token_ids, ending_polls=5)
    harness = Harness(options=options)
    key = harness.submit(make_request([5], 2, "a"))
    harness.scheduler.loads.preload(1, "a")
    while not harness.tokens(key):
        harness.cycle()
    assert harness.held == {"a"}
    assert harness.settled == [AdapterSettled(1)]
    assert harness.scheduler.arena.ready == ("a",)
    assert harness.scheduler.loads.loading == ()
    assert harness.scheduler.loads.copying, "there is something to look for"
    harness.run()
    harness.assert_at_rest()


def test_what_is_pushed_out_before_its_copy_is_over_is_asked_for_afterwards() -> None:
    options = CertifyOptions(LIMITS.vocab_size, LIMITS.eos_token_ids, ending_polls=30)
    harness = Harness(limits(adapter_slots=1), options=options)
    first = harness.submit(make_request([5], 1, "a"))
    while not harness.tokens(first):
        harness.cycle()
    harness.submit(make_request([5], 1, "b"))
    while harness.scheduler.arena.stage("a") == "ready":
        harness.cycle()
    again = harness.submit(make_request([5], 1, "a"))
    harness.cycle()
    assert "a" in harness.held
    assert "a" not in harness.scheduler.loads.loading
    harness.run()
    assert harness.last(again).finish == "length"
    harness.assert_at_rest()


def busy_device() -> Harness:
    """Two hot adapters, of which there is always a sequence, have the only two slots."""
    config = SchedulerConfig(max_loading=3, drain_after_s=0.05)
    harness = Harness(config=config)
    cycle_hot(harness, 6)
    assert sorted(harness.scheduler.arena.ready) == ["hot", "hot too"]
    return harness


def cycle_hot(harness: Harness, times: int) -> None:
    """Each hot adapter has streams that overlap; a round trip to the worker a cycle."""
    for number in range(times):
        harness.now += 0.01
        if number % 3 == 0:
            for adapter in ("hot", "hot too"):
                harness.submit(make_request([5], 8, adapter, ignore_eos=True))
        harness.cycle()


def preload(loads: AdapterLoads, digests: list[str]) -> None:
    for number, digest in enumerate(digests):
        loads.preload(number, digest)


@pytest.mark.parametrize("wish", [preload, AdapterLoads.pin_only], ids=["preloads", "pins"])
@pytest.mark.parametrize("pushed", [True, False])
def test_what_nobody_waits_for_starves_no_cold_adapter(
    wish: Callable[[AdapterLoads, list[str]], None], pushed: bool
) -> None:
    """As many of them as may load at once have no room on the device."""
    harness = busy_device()
    wish(harness.scheduler.loads, [f"wanted {number}" for number in range(8)])
    cycle_hot(harness, 12)
    cold = harness.submit(make_request([5], 4, "cold"))
    if pushed:
        harness.stage("cold")
    cycle_hot(harness, 60)
    assert harness.tokens(cold), "nobody asked for it"
    assert not any(events[-1].error for events in harness.events.values())


def test_what_stood_back_comes_when_nobody_waits_any_more() -> None:
    harness = busy_device()
    preload(harness.scheduler.loads, [f"wanted {number}" for number in range(8)])
    cycle_hot(harness, 12)
    harness.submit(make_request([5], 4, "cold"))
    cycle_hot(harness, 12)
    harness.run()
    assert sorted(settled.order for settled in harness.settled) == list(range(8))
    harness.assert_at_rest()


def test_what_stands_back_is_tried_again_though_somebody_always_waits_for_the_worker() -> None:
    """But not in every cycle: each time is a round trip to the worker."""
    harness = busy_device()
    harness.auto_stage = False
    for digest in ("slow", "slower"):
        harness.submit(make_request([5], 4, digest))
    preload(harness.scheduler.loads, ["wanted"])
    asked = 0
    for _ in range(400):
        cycle_hot(harness, 1)
        if "wanted" in harness.needed:
            asked += 1
            harness.stage("wanted")
    assert 3 <= asked <= 6
    while "wanted" not in harness.scheduler.arena.ready:  # the hot ones end
        harness.now += 0.01
        if "wanted" in harness.needed:
            harness.stage("wanted")
        harness.cycle()
    assert harness.settled == [AdapterSettled(0)]
