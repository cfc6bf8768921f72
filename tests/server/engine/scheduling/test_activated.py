"""Adapters that act from a token of the prompt on: what they share, and what they never share."""

import pytest

from loraplex.server.engine.plan import SeqSlice
from tests.certifying.certificates import certified_output
from tests.server.engine.harness import Harness, limits, make_request

PAGE = 4


def harness() -> Harness:
    return Harness(limits(num_pages=200, adapter_slots=8, arena_extents=16, max_step_tokens=64))


def slices(run: Harness) -> list[SeqSlice]:
    return [piece for plan in run.plans for piece in plan.slices if piece.kind == "prompt"]


def answer(run: Harness, prompt: list[int], adapter: str | None, begins: int = 0) -> int:
    """Prompt tokens that were computed for it."""
    before = len(run.plans)
    key = run.submit(make_request(prompt, 5, adapter, adapter_from=begins))
    run.run()
    expected = certified_output(adapter, prompt, 5, run.executor.options, adapter_from=begins)
    assert run.tokens(key) == expected
    pieces = [piece for plan in run.plans[before:] for piece in plan.slices]
    return sum(piece.num_new for piece in pieces if piece.kind == "prompt")


def test_a_slice_has_one_adapter() -> None:
    run = harness()
    assert answer(run, list(range(20, 32)), "a", 7) == 12
    first, second = slices(run)
    assert (first.start, first.num_new, first.adapter_slot, first.sample) == (0, 7, -1, False)
    assert (second.start, second.num_new, second.sample) == (7, 5, True)
    assert second.adapter_slot >= 0


def test_six_adapters_over_a_conversation_of_the_base() -> None:
    """No full page before the invocation is computed twice."""
    run = harness()
    conversation = [20 + i % 50 for i in range(41)]
    assert answer(run, conversation, None) == 41
    for name in ("a", "b", "c", "d", "e", "f"):
        prompt = [*conversation, 7, 8, 9]
        assert answer(run, prompt, name, len(conversation)) == len(prompt) - 40


def test_the_base_reads_what_was_computed_for_an_adapter() -> None:
    run = harness()
    prompt = [20 + i for i in range(30)]
    assert answer(run, prompt, "a", 22) == 30
    assert answer(run, prompt, None) == 10  # 20 tokens of five pages lie before the invocation
    assert answer(run, prompt, "b", 22) == 10
    assert answer(run, prompt, "a") == 30  # as an adapter that acts on all tokens


@pytest.mark.parametrize("begins", [8, 9, 11])
def test_pages_from_the_invocation_on_are_the_adapters_own(begins: int) -> None:
    run = harness()
    prompt = [20 + i for i in range(17)]
    answer(run, prompt, "a", begins)
    assert answer(run, prompt, "a", begins) == 1
    assert answer(run, prompt, "b", begins) == 9
    assert answer(run, prompt, "a", begins + (1 if begins < 11 else -1)) == 9


def test_tenants_share_nothing() -> None:
    run = harness()
    prompt = [20 + i for i in range(17)]
    answer(run, prompt, None)
    key = run.submit(make_request(prompt, 5, "a", adapter_from=16, salt="tenant"))
    run.run()
    assert run.events[key][0].cached_tokens == 0
