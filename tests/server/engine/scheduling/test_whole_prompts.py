"""A model whose tokens see those behind them: prompts are computed whole, and keep no pages."""

from typing import Any

import pytest

from loraplex.server.protocol import VectorParams
from tests.server.engine.harness import Harness, limits, make_request

WHOLE = limits(page_windows=(), num_pages=0, is_causal=False, max_context=12, writes=False)


def submit(harness: Harness, length: int, **changes: Any) -> int:
    prompt = [5 + i % 9 for i in range(length)]
    wish = VectorParams(pooling="last")
    return harness.submit(make_request(prompt, 0, vector=wish, **changes))


@pytest.mark.parametrize("depth", [1, 2])
def test_no_prompt_is_cut(depth: int) -> None:
    harness = Harness(WHOLE, depth)
    lengths = [10, 5, 6, 12, 1, 1, 7]
    keys = [submit(harness, length) for length in lengths]
    harness.run()
    slices = [piece for plan in harness.plans for piece in plan.slices]
    assert sorted((piece.start, piece.num_new) for piece in slices) == [
        (0, length) for length in sorted(lengths)
    ]
    assert not any(plan.grants for plan in harness.plans)
    assert all(harness.last(key).vector for key in keys)
    harness.assert_at_rest()


def test_a_large_prompt_is_not_overtaken_for_ever() -> None:
    harness = Harness(WHOLE)
    for _ in range(4):
        submit(harness, 7)
    large = submit(harness, 12)
    for _ in range(8):
        submit(harness, 1)
    while not harness.events.get(large):
        harness.cycle()
    assert harness.scheduler.num_unfinished <= 4
    harness.run()


def test_what_no_step_can_take_is_refused() -> None:
    harness = Harness(WHOLE)
    assert harness.last(submit(harness, 13)).error == "context_length"


def test_an_adapter_from_a_token_on_is_refused() -> None:
    harness = Harness(WHOLE)
    key = submit(harness, 6, adapter="a" * 64, adapter_from=2)
    assert harness.last(key).error == "invalid_request"
