"""Slabs that come unasked, and adapters that are used before their copy is over."""

from server.engine.fake import CertifyOptions, certified_output
from server.engine.messages import AdapterSettled
from server.engine.scheduler import SchedulerConfig
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
    harness.drain()
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
    assert harness.scheduler.stats().resident == ("a",)
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
