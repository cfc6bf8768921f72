"""A request's own scale: its row has a slot of its own, and shares nothing with other scales."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.engine.memory.scaled_slots import ScaledSlots
from loraplex.server.protocol import acting
from tests.certifying.certificates import certified_output
from tests.server.engine.harness import Harness, limits, make_request

PROMPT = [20 + i for i in range(17)]


def harness() -> Harness:
    return Harness(limits(num_pages=200, adapter_slots=8, arena_extents=16, max_step_tokens=64))


def submit(run: Harness, scale: float, **changes: Any) -> int:
    return run.submit(make_request(PROMPT, 5, "a", adapter_scale=scale, **changes))


def assert_right(run: Harness, key: int, scale: float) -> None:
    expected = certified_output(acting("a", scale), PROMPT, 5, run.executor.options)
    assert run.tokens(key) == expected


def test_scales_share_no_pages() -> None:
    run = harness()
    for scale, cached in ((1.0, 0), (0.5, 0), (0.5, 16), (1.0, 16), (-0.5, 0)):
        key = submit(run, scale)
        run.run()
        assert_right(run, key, scale)
        assert run.events[key][0].cached_tokens == cached


def test_rows_of_one_scale_share_a_slot() -> None:
    run = harness()
    keys = {submit(run, scale): scale for scale in (0.5, 1.0, 0.5, 0.25)}
    run.run()
    for key, scale in keys.items():
        assert_right(run, key, scale)
    filled = [(each.source_slot, each.scale) for plan in run.plans for each in plan.scaled_slots]
    assert sorted(filled) == [(0, 0.25), (0, 0.5)]
    run.assert_at_rest()


def test_adapters_of_more_than_lora_have_no_scale() -> None:
    run = harness()
    run.table_sizes["a"] = 101
    key = submit(run, 0.5, vocab_size=101)
    run.run()
    last = run.last(key)
    assert last.error == "invalid_request"
    assert "adapter_scale" in (last.message or "")


@pytest.mark.parametrize("scale", [0.0, float("nan"), float("inf")])
def test_what_is_no_scale(scale: float) -> None:
    run = harness()
    key = submit(run, scale)
    assert run.last(key).error == "invalid_request"


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.5, 2.0, 3.0])), max_size=40))
def test_a_slot_is_filled_once_while_it_is_used(asked: list[tuple[int, float]]) -> None:
    """Of at most four users at once, the one that came first leaves."""
    slots, users, content = ScaledSlots(8, 4), list[int](), dict[int, tuple[int, float]]()
    for key in asked:
        if len(users) == 4:
            slots.give_back(users.pop(0))
        slot, news = slots.take(*key)
        if news is not None:
            assert slot not in users
            content[slot] = (news.source_slot, news.scale)
        assert content[slot] == key
        assert 8 <= slot < 12
        users.append(slot)
    for slot in users:
        slots.give_back(slot)
    assert not slots._uses
