"""The scheduler, one behaviour at a time."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.server.engine.messages import SlabStaged
from loraplex.server.engine.plan import SliceResult
from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from loraplex.server.engine.scheduling.sequence import Precedence, Sequence, State
from loraplex.server.protocol import BACKGROUND_PRIORITY, GenerateRequest, TokenLogprob
from tests.certifying.certificates import certified_output
from tests.server.engine.harness import Harness, layout, limits, make_request


def expected(harness: Harness, prompt: list[int], count: int, adapter: str | None) -> list[int]:
    return certified_output(adapter, prompt, count, harness.executor.options)


# ---- batching


def test_decodes_go_on_beside_a_long_prompt_in_chunks() -> None:
    harness = Harness(limits(max_step_tokens=8))
    stream = harness.submit(make_request([5, 6], 30))
    harness.cycle()
    long = harness.submit(make_request(list(range(5, 35)), 2))
    while not harness.events.get(long):
        before = len(harness.tokens(stream))
        harness.cycle()
        assert len(harness.tokens(stream)) == before + 1, "the stream stalls"
        assert harness.plans[-1].num_tokens <= 8
    chunks = [s.num_new for p in harness.plans for s in p.slices if s.seq_row != 0]
    assert chunks == [7, 7, 7, 7, 2]


def test_lower_priority_value_then_arrival_goes_first() -> None:
    harness = Harness(limits(max_rows=1))
    keys = [
        harness.submit(make_request([5, i + 6], 1, priority=p)) for i, p in enumerate([1, 1, 0])
    ]
    order = []
    for _ in range(3):
        harness.cycle()
        order += [k for k in keys if harness.events.get(k) and k not in order]
    assert order == [keys[2], keys[0], keys[1]]


def test_who_goes_before_a_long_prompt_goes_between_its_chunks() -> None:
    harness = Harness(limits(max_step_tokens=8))
    long = harness.submit(make_request(list(range(5, 35)), 1, priority=1))
    harness.cycle()
    like, urgent = (harness.submit(make_request([p, 6, 7], 1, priority=p)) for p in (1, 0))
    harness.cycle()
    assert harness.events.get(urgent)
    assert [s.num_new for s in harness.plans[-1].slices] == [3, 5]
    while not harness.events.get(long):
        assert not harness.events.get(like)
        harness.cycle()
    harness.run()
    harness.assert_at_rest()


def batch_request(prompt: list[int], count: int) -> GenerateRequest:
    return make_request(prompt, count, priority=BACKGROUND_PRIORITY)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_batch_gives_its_row_to_who_is_waited_for(depth: int) -> None:
    harness = Harness(limits(max_rows=2), depth=depth)
    batches = [harness.submit(batch_request([5, 6 + i], 12)) for i in range(3)]
    for _ in range(4):
        harness.cycle()
    live = [harness.submit(make_request([5, 20 + i], 3)) for i in range(3)]
    while not all(harness.tokens(key)[2:] for key in live):
        harness.cycle()
        assert not any(harness.tokens(key)[11:] for key in batches)
    harness.run()
    for i, key in enumerate(batches):
        assert harness.tokens(key) == expected(harness, [5, 6 + i], 12, None)
    harness.assert_at_rest()


def test_rows_never_outnumber_the_token_budget() -> None:
    harness = Harness(limits(max_rows=4, max_step_tokens=2))
    for i in range(4):
        harness.submit(make_request([5 + i], 6))
    harness.run()
    assert all(len(plan.slices) <= 2 for plan in harness.plans)
    harness.assert_at_rest()


def test_length_is_known_ahead_and_a_late_eos_costs_one_discarded_sample() -> None:
    harness = Harness(depth=2)
    key = harness.submit(make_request([5, 6], 5))
    harness.run()
    assert sum(s.sample for p in harness.plans for s in p.slices) == 5
    output = harness.tokens(key)
    harness = Harness(depth=2)
    key = harness.submit(make_request([5, 6], 5, stop_token_ids=(output[1],)))
    harness.run()
    assert harness.tokens(key) == output[:2]
    assert harness.last(key).finish == "stop"
    assert sum(s.sample for p in harness.plans for s in p.slices) == 3
    harness.assert_at_rest()


def test_an_input_sampled_on_the_row_is_not_sent() -> None:
    harness = Harness(depth=2)
    harness.submit(make_request([5, 6], 4))
    harness.run()
    assert [s.token_ids for p in harness.plans for s in p.slices] == [[5, 6], [], [], []]


# ---- ends


ENDS = st.lists(st.integers(4, 99), max_size=40).map(tuple)
ASKED = st.tuples(ENDS, ENDS, st.integers(0, 9), st.booleans(), st.sampled_from([None, "a", "b"]))


@given(asked=st.lists(ASKED, min_size=1, max_size=5), resumed=st.integers(0, 11))
@settings(max_examples=60, deadline=None)
def test_each_sequence_of_a_step_ends_by_its_own_ends(asked: list[Any], resumed: int) -> None:
    """They are the model's own ends in every respect; accepted tokens are looked at alike."""
    harness = Harness(limits(num_pages=200, max_rows=8))
    keys = []
    for number, (ends, stops, least, ignore, adapter) in enumerate(asked):
        prompt = [5, 6 + number]
        output = expected(harness, prompt, 12, adapter)
        last = [
            i
            for i, token in enumerate(output)
            if i >= least and ((token in ends and not ignore) or token in stops)
        ]
        right = output[: last[0] + 1] if last else output
        accepted = right[: min(resumed, len(right) - 1)]
        request = make_request(
            *(prompt, 12, adapter),
            end_token_ids=ends,
            stop_token_ids=stops,
            min_tokens=least,
            ignore_eos=ignore,
            accepted_ids=accepted,
        )
        finish = "stop" if last else "length"
        keys.append((harness.submit(request), right[len(accepted) :], finish))
    harness.run()
    for key, right, finish in keys:
        assert (harness.tokens(key), harness.events[key][-1].finish) == (right, finish)


def test_min_tokens_masks_stop_tokens_and_ignore_eos_only_the_models() -> None:
    harness = Harness()
    output = expected(harness, [5], 6, None)
    stop = (output[0], output[4])
    key = harness.submit(make_request([5], 6, stop_token_ids=stop, min_tokens=3))
    other = harness.submit(make_request([5], 6, stop_token_ids=stop, ignore_eos=True))
    harness.run()
    last = next(i for i in range(3, 6) if output[i] in stop)
    assert harness.tokens(key) == output[: last + 1]
    assert harness.tokens(other) == output[:1]
    assert harness.plans[0].new_rows[0].eos_suppressed_until == 3


def test_context_end_is_a_length_stop() -> None:
    harness = Harness()
    key = harness.submit(make_request([5] * 60, 100))
    harness.run()
    assert len(harness.tokens(key)) == 4
    assert harness.last(key).finish == "length"


def test_resume_goes_on_at_the_next_index() -> None:
    harness = Harness()
    output = expected(harness, [5, 6], 8, "a")
    key = harness.submit(make_request([5, 6], 8, "a", accepted_ids=output[:3]))
    harness.run()
    assert harness.events[key][0].index == 3
    assert harness.tokens(key) == output[3:]
    assert harness.plans[0].new_rows[0].prompt_len == 2


@pytest.mark.parametrize(
    ("accepted", "changes", "finish"),
    [([5, 6, 7], {}, "length"), ([5, 2], {}, "stop"), ([9], {"stop_token_ids": (9,)}, "stop")],
)
def test_resume_that_lacks_only_the_end(
    accepted: list[int], changes: dict[str, Any], finish: str
) -> None:
    harness = Harness()
    key = harness.submit(make_request([5], 3, accepted_ids=accepted, **changes))
    (event,) = harness.events[key]
    assert (event.finish, event.index, event.token_ids) == (finish, len(accepted), ())
    harness.assert_at_rest()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cycles", [0, 1, 2, 3])
def test_abort_at_any_time_is_the_last_event(depth: int, cycles: int) -> None:
    harness = Harness(limits(max_step_tokens=4), depth=depth)
    key = harness.submit(make_request([5] * 6, 20, "a"))
    for _ in range(cycles):
        harness.cycle()
    harness.abort(key)
    harness.abort(key)
    assert harness.last(key).finish == "abort"
    assert harness.last(key).index == len(harness.tokens(key))
    harness.run()
    assert harness.last(key).finish == "abort"
    harness.assert_at_rest()


def test_deadlines_end_waiting_and_running_work() -> None:
    harness = Harness(limits(max_rows=1))
    running = harness.submit(make_request([5], 40, deadline_s=1.0))
    waiting = harness.submit(make_request([6], 4, deadline_s=0.5))
    late = harness.submit(make_request([6], 4, deadline_s=0.0))
    unhurried = harness.submit(make_request([7], 4, deadline_s=100.0))
    assert harness.last(late).error == "deadline"
    assert harness.scheduler.next_deadline() == 0.5
    harness.cycle()
    harness.now = 0.6
    harness.cycle()
    assert harness.last(waiting).error == "deadline"
    assert len(harness.plans[-1].slices) == 1
    harness.now = 1.5
    harness.run()
    assert harness.last(running).error == "deadline"
    assert harness.tokens(running) == expected(harness, [5], 2, None)
    assert harness.last(unhurried).finish == "length"
    assert harness.scheduler.next_deadline() is None


def test_full_and_duplicate_submissions_are_refused() -> None:
    harness = Harness(config=SchedulerConfig(max_waiting=2))
    keys = [harness.submit(make_request([5], 2)) for _ in range(3)]
    assert harness.last(keys[2]).error == "overloaded"
    harness.scheduler.submit(keys[0], make_request([6], 2), 0.0)
    (event,) = harness.scheduler.take_events()
    assert event.event.error == "invalid_request"
    harness.run()
    assert harness.last(keys[0]).finish == "length"


@pytest.mark.parametrize(
    ("result", "word"),
    [
        (SliceResult(failed=True), "finite"),
        (SliceResult((100,)), "token id 100"),
        (SliceResult((-1,)), "token id -1"),
        (SliceResult(), "gave 0 tokens"),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_bad_result_ends_its_sequence_only(result: SliceResult, word: str, depth: int) -> None:
    harness = Harness(depth=depth)
    bad = harness.submit(make_request([5] * 9, 20))
    good = harness.submit(make_request([6], 20))
    harness.cycle()
    harness.executor.results[0] = result
    harness.run()
    assert harness.last(bad).error == "internal"
    assert word in str(harness.last(bad).message)
    assert harness.last(good).finish == "length"
    harness.assert_at_rest()


def test_values_that_are_not_finite_name_the_adapter() -> None:
    harness = Harness()
    key = harness.submit(make_request([5], 3, "a"))
    harness.executor.results[0] = SliceResult(failed=True)
    harness.run()
    assert "digest a:" in str(harness.last(key).message)


def test_pages_of_non_finite_values_are_not_read_again() -> None:
    harness = Harness()
    harness.submit(make_request([5] * 9, 20))
    harness.cycle()
    harness.executor.results[0] = SliceResult(failed=True)
    harness.cycle()
    key = harness.submit(make_request([5] * 9, 2))
    harness.run()
    assert harness.events[key][0].cached_tokens == 0


def test_the_first_event_tells_how_long_the_adapter_was_waited_for() -> None:
    harness = Harness()
    base = harness.submit(make_request([5], 3))
    cold = harness.submit(make_request([5], 3, "a"))
    harness.run()
    warm = harness.submit(make_request([6], 3, "a"))
    harness.run()
    waited = [event.load_s for event in harness.events[cold]]
    assert waited[0] is not None
    assert waited[0] > 0
    assert waited[1:] == [None, None]
    assert harness.events[base][0].load_s is harness.events[warm][0].load_s is None


# ---- logprobs


def test_logprobs_and_prompt_logprobs_over_chunks() -> None:
    harness = Harness(limits(max_step_tokens=4))
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    harness.submit(make_request(prompt, 1))
    harness.run()
    key = harness.submit(make_request(prompt, 2, logprobs=1, prompt_logprobs=2))
    plain = harness.submit(make_request(prompt, 2))
    harness.run()
    first, last = harness.events[key]
    assert first.cached_tokens == 0, "all logits of the prompt are needed"
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] == TokenLogprob(5, None)
    assert [p.token_id for p in first.prompt_logprobs] == prompt
    assert all(len(p.top) == 2 for p in first.prompt_logprobs[1:])
    assert last.prompt_logprobs is None
    assert last.cached_tokens is None
    assert [len(e.logprobs[0].top) for e in (first, last) if e.logprobs] == [1, 1]
    assert all(e.logprobs is None for e in harness.events[plain])
    assert harness.events[plain][0].cached_tokens == 8


@pytest.mark.parametrize("length", [1, 4, 9])
def test_a_prompt_can_be_scored_without_output(length: int) -> None:
    harness = Harness(limits(max_step_tokens=4), depth=2)
    key = harness.submit(make_request([5] * length, 0, prompt_logprobs=0))
    nothing = harness.submit(make_request([5], 0))
    harness.run()
    (event,) = harness.events[key]
    assert (event.finish, event.token_ids) == ("length", ())
    assert event.prompt_logprobs is not None
    assert len(event.prompt_logprobs) == length
    assert harness.last(nothing).finish == "length"
    harness.assert_at_rest()


# ---- prefix reuse


@pytest.mark.parametrize(
    ("changes", "cached"),
    [
        ({}, 8),
        ({"salt": "other"}, 0),
        ({"adapter": "a"}, 0),
        ({"prompt": [5] * 8}, 4),
        ({"prompt": [5] * 4 + [6] * 5}, 4),
        ({"accepted_ids": [5, 5]}, 8),
    ],
)
def test_full_pages_of_the_same_identity_are_shared(changes: dict[str, Any], cached: int) -> None:
    harness = Harness()
    harness.submit(make_request([5] * 9, 1))
    harness.run()
    key = harness.submit(make_request(**{"prompt": [5] * 9, "max_tokens": 4, **changes}))
    harness.run()
    assert harness.events[key][0].cached_tokens == cached


def test_generated_tokens_are_reused_by_the_next_turn() -> None:
    harness = Harness()
    key = harness.submit(make_request([5] * 4, 9))
    harness.run()
    turn = [5] * 4 + harness.tokens(key) + [6]
    again = harness.submit(make_request(turn, 1))
    harness.run()
    assert harness.events[again][0].cached_tokens == 12
    assert harness.scheduler.stats().prefix_hit_tokens == 12


@pytest.mark.parametrize("depth", [1, 2])
def test_choices_of_one_long_prompt_compute_it_once(depth: int) -> None:
    harness = Harness(limits(num_pages=200, max_context=400, max_step_tokens=40), depth)
    prompt = list(range(5, 95)) * 2
    keys = [harness.submit(make_request(prompt, 3, choice=i)) for i in range(3)]
    harness.run()
    assert sum(plan.num_tokens for plan in harness.plans) < 180 + 3 * 40
    assert all(harness.tokens(k) == expected(harness, prompt, 3, None) for k in keys)
    harness.assert_at_rest()


def test_who_waited_for_a_shared_prompt_computes_it_when_its_owner_goes() -> None:
    harness = Harness(limits(num_pages=200, max_context=400, max_step_tokens=40))
    prompt = list(range(5, 95)) * 2
    first, second = (harness.submit(make_request(prompt, 3)) for _ in range(2))
    harness.cycle()
    harness.abort(first)
    harness.run()
    assert harness.tokens(second) == expected(harness, prompt, 3, None)
    harness.assert_at_rest()


# ---- preemption


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_youngest_gives_way_and_loses_nothing(depth: int) -> None:
    harness = Harness(limits(num_pages=16, max_rows=4), depth)
    prompts = [[10 + i] * 6 for i in range(4)]
    keys = [
        harness.submit(make_request(p, 40, "a" if i % 2 else None)) for i, p in enumerate(prompts)
    ]
    harness.run()
    assert harness.scheduler.stats().preemptions > 0
    for i, key in enumerate(keys):
        assert harness.tokens(key) == expected(harness, prompts[i], 40, "a" if i % 2 else None)
    ends = [next(n for n, p in enumerate(harness.plans) if p.step) for _ in keys]
    assert ends
    harness.assert_at_rest()


def test_a_preempted_prompt_is_scored_anew() -> None:
    harness = Harness(limits(num_pages=12, max_step_tokens=3, max_rows=2))
    old = harness.submit(make_request([5] * 4, 28))
    for _ in range(12):
        harness.cycle()
    prompt = list(range(10, 30))
    young = harness.submit(make_request(prompt, 2, prompt_logprobs=0))
    harness.run()
    scored = harness.events[young][0].prompt_logprobs
    assert [p.token_id for p in scored or ()] == prompt
    assert len(harness.tokens(old)) == 28
    harness.assert_at_rest()


# ---- adapters


def test_a_cold_adapter_does_not_hold_up_others() -> None:
    harness = Harness(auto_stage=False)
    cold = [harness.submit(make_request([5, i + 5], 4, "a")) for i in range(3)]
    warm = harness.submit(make_request([6], 4))
    harness.run()
    assert harness.last(warm).finish == "length"
    assert harness.needed == ["a"], "asked for once"
    assert harness.scheduler.stats().waiting == 3
    assert harness.scheduler.stats().loading == ("a",)
    harness.stage("a")
    harness.run()
    assert all(harness.last(k).finish == "length" for k in cold)
    assert harness.scheduler.arena.ready == ("a",)
    assert len(harness.copies) == 1
    harness.assert_at_rest()


def test_at_most_max_loading_are_on_their_way_oldest_first() -> None:
    harness = Harness(config=SchedulerConfig(max_loading=2), auto_stage=False)
    for digest in "abc":
        harness.submit(make_request([5], 4, digest))
    harness.cycle()
    assert harness.needed == ["a", "b"]
    harness.miss("a")
    harness.cycle()
    assert harness.needed == ["b", "c"]


def test_an_unwanted_slab_is_given_back_at_once() -> None:
    harness = Harness(auto_stage=False)
    key = harness.submit(make_request([5], 4, "a"))
    harness.cycle()
    harness.abort(key)
    harness.stage("a")
    assert not harness.held
    # Nobody asked for this one, or waits for it; a second one of one in use changes nothing.
    harness.held.add("x")
    harness.scheduler.slab_staged(SlabStaged(layout("x"), (0, 1)), 0.0)
    harness.scheduler.slab_missing("x", "gone")
    harness.exchange()
    assert not harness.held
    harness.submit(make_request([5], 4, "b"))
    harness.cycle()
    harness.stage("b")
    harness.scheduler.slab_staged(SlabStaged(layout("b"), (0, 1)), 0.0)
    harness.exchange()
    assert harness.held == {"b"}
    harness.run()
    harness.assert_at_rest()


def test_waiters_that_leave_while_it_waits_for_room_give_the_slab_back() -> None:
    harness = Harness(limits(adapter_slots=1))
    harness.submit(make_request([5], 30, "a"))
    harness.cycle()
    harness.cycle()
    key = harness.submit(make_request([5], 4, "b"))
    harness.cycle()
    harness.cycle()
    assert harness.held == {"b"}
    harness.abort(key)
    harness.cycle()
    assert not harness.held


@pytest.mark.parametrize(
    ("staged", "word"),
    [
        (SlabStaged(layout("a", (7,)), (0,)), "adapter memory"),
        (SlabStaged(layout("a", (1, 1)), (0,)), "host extent"),
        (SlabStaged(layout("a", (1, 1), 512), (0, 1)), "extents of 512"),
        (SlabStaged(layout("a", (-1, 1)), (0, 1)), "malformed"),
    ],
)
def test_a_slab_that_cannot_be_placed_ends_its_waiters(staged: SlabStaged, word: str) -> None:
    harness = Harness(auto_stage=False)
    key = harness.submit(make_request([5], 4, "a"))
    harness.cycle()
    harness.held.add("a")
    harness.scheduler.slab_staged(staged, 0.0)
    harness.exchange()
    assert harness.last(key).error == "adapter_unavailable"
    assert word in str(harness.last(key).message)
    assert not harness.held


def test_a_failed_copy_ends_its_waiters_and_frees_its_place() -> None:
    harness = Harness()
    harness.executor.bad_copies.add("a")
    key = harness.submit(make_request([5], 4, "a"))
    harness.run()
    assert harness.last(key).error == "adapter_unavailable"
    assert harness.last(key).message == "copy failed"
    assert harness.scheduler.arena.free_extents == 6
    harness.assert_at_rest()


def test_a_popular_adapter_cannot_starve_another() -> None:
    harness = Harness(limits(adapter_slots=1), config=SchedulerConfig(drain_after_s=0.05), depth=2)
    for _ in range(2):
        harness.submit(make_request([5], 8, "hot"))
    harness.cycle()
    harness.cycle()
    cold = harness.submit(make_request([5], 4, "cold"))
    for _ in range(200):
        harness.now += 0.01
        harness.submit(make_request([5], 8, "hot"))
        harness.cycle()
        if harness.events.get(cold):
            break
    assert harness.tokens(cold), "the hot adapter never gave way"


def test_small_adapters_cannot_starve_a_large_one() -> None:
    harness = Harness(
        limits(adapter_slots=8), config=SchedulerConfig(drain_after_s=0.05, max_loading=4)
    )
    harness.runs = {"large": (6,)}
    small = "abcdef"
    for i in range(400):
        harness.now += 0.01
        harness.submit(make_request([5], 6, small[i % 6]))
        if i == 10:
            large = harness.submit(make_request([5], 4, "large"))
        harness.cycle()
        if i > 10 and harness.events.get(large):
            break
    assert harness.tokens(large), "the large adapter never got room"


def test_an_older_waiter_keeps_its_ready_adapter() -> None:
    """A row is busy; what was loaded for the next in line is not thrown out for a later one."""
    harness = Harness(limits(adapter_slots=1, max_rows=1))
    harness.submit(make_request([5], 30))
    first = harness.submit(make_request([5], 4, "a"))
    second = harness.submit(make_request([5], 4, "b"))
    harness.run()
    assert [c.layout.digest for c in harness.copies] == ["a", "b"]
    assert harness.last(first).finish == harness.last(second).finish == "length"


def test_an_evicted_adapter_is_loaded_again_for_those_who_wait() -> None:
    harness = Harness(limits(adapter_slots=1, num_pages=16, max_rows=3), depth=2)
    keys = [harness.submit(make_request([5 + i] * 6, 30, "ab"[i % 2])) for i in range(4)]
    harness.run()
    for i, key in enumerate(keys):
        assert harness.tokens(key) == expected(harness, [5 + i] * 6, 30, "ab"[i % 2])
    assert harness.scheduler.stats().evictions["slots"] > 0
    harness.assert_at_rest()


# ---- faults of the device


@pytest.mark.parametrize("depth", [1, 2])
def test_lost_steps_end_what_ran_and_spare_what_waited(depth: int) -> None:
    harness = Harness(limits(max_rows=2), depth=depth)
    keys = [harness.submit(make_request([5 + i] * 5, 20, "a")) for i in range(3)]
    for _ in range(4):
        harness.cycle()
    gone = harness.submit(make_request([9], 20))
    harness.abort(gone)
    harness.abort(keys[1])
    harness.scheduler.fail_running("out_of_memory", "full")
    harness.tickets.clear()
    harness.executor._in_flight.clear()
    harness.exchange()
    assert harness.last(keys[0]).error == "out_of_memory"
    assert harness.last(keys[1]).finish == "abort"
    harness.run()
    assert harness.tokens(keys[2]) == expected(harness, [7] * 5, 20, "a")
    harness.assert_at_rest()


def test_commit_refuses_other_steps_results() -> None:
    harness = Harness()
    harness.submit(make_request([5], 20))
    harness.plan()
    with pytest.raises(ValueError, match="expected 1 results of step 1, got 0"):
        harness.scheduler.commit(1, [])


def test_states_move_only_along_the_table() -> None:
    sequence = Sequence(1, make_request([5]), Precedence(0, 1), 5, None)
    sequence.move(State.NEEDS_ADAPTER)
    with pytest.raises(ValueError, match="NEEDS_ADAPTER -> RUNNING"):
        sequence.move(State.RUNNING)
    assert sequence.remaining == 4
