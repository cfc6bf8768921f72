"""Sequences that outgrow the short context: all their tokens are computed again, of another kind.

The certifying executor refuses to read keys and values of the other kind.
"""

import pytest

from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from tests.certifying.certificates import certified_output
from tests.server.engine.harness import Harness, limits, make_request

SHORT = 10


def prompt(length: int) -> list[int]:
    return [5 + i % 9 for i in range(length)]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_draft", [0, 3])
@pytest.mark.parametrize("length", [1, SHORT - 1, SHORT, SHORT + 1])
def test_an_answer_goes_on_where_it_becomes_long(length: int, max_draft: int, depth: int) -> None:
    engine = limits(short_context=SHORT, max_decodes=12 if max_draft else 0)
    config = SchedulerConfig(max_draft=max_draft)
    harness = Harness(engine, depth, config, right_percent=80)
    key = harness.submit(make_request(prompt(length), 15, adapter="a"))
    other = harness.submit(make_request([6], 4))
    harness.run()
    expected = certified_output("a", prompt(length), 15, harness.executor.options)
    assert harness.tokens(key) == expected
    assert len(harness.tokens(other)) == 4
    starts = [r for plan in harness.plans for r in plan.new_rows if r.token_ids[0] == 5]
    lengths = [length] if length > SHORT else [length, SHORT + 1]
    assert [len(start.token_ids) for start in starts] == lengths
    assert harness.scheduler.stats().preemptions == len(lengths) - 1
    harness.assert_at_rest()


def test_an_answer_that_ends_at_the_short_context_is_never_long() -> None:
    """Its last token is no input."""
    harness = Harness(limits(short_context=SHORT))
    key = harness.submit(make_request(prompt(4), SHORT - 4 + 1))
    harness.run()
    assert len(harness.tokens(key)) == SHORT - 4 + 1
    assert harness.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("accepted", [0, 3, 6])
def test_a_resumed_answer_is_of_the_kind_of_all_its_tokens(accepted: int) -> None:
    harness = Harness(limits(short_context=SHORT))
    whole = certified_output(None, prompt(6), 9, harness.executor.options)
    key = harness.submit(make_request(prompt(6), 9, accepted_ids=whole[:accepted]))
    harness.run()
    assert harness.tokens(key) == whole[accepted:]


def test_prefixes_are_shared_within_a_kind_only() -> None:
    harness = Harness(limits(short_context=SHORT))
    hits = []
    for length in (9, 9, 17, 17, 9):  # pages of 4
        before = harness.scheduler.stats().prefix_hit_tokens
        harness.submit(make_request(prompt(length), 1))
        harness.run()
        hits.append(harness.scheduler.stats().prefix_hit_tokens - before)
    assert hits == [0, 8, 0, 16, 8]


def test_a_drained_adapter_of_one_that_becomes_long_gives_its_room_at_once() -> None:
    """Without a step in flight nothing else would wake the loop."""
    config = SchedulerConfig(drain_after_s=0.01)
    harness = Harness(limits(short_context=SHORT, adapter_slots=1), 1, config, auto_stage=False)
    first = harness.submit(make_request([5], 4, adapter="late"))
    long = harness.submit(make_request(prompt(4), 9, adapter="a"))
    harness.stage("a")
    while not harness.tokens(long):
        harness.cycle()
    harness.stage("late")
    harness.auto_stage = True
    harness.run()
    assert (len(harness.tokens(first)), len(harness.tokens(long))) == (4, 9)
    harness.assert_at_rest()
