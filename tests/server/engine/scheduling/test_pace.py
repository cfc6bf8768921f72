"""When the next step is planned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.scheduling.pace import SHORT_S, Pace

SECONDS = st.floats(0.0, 10.0)


@pytest.mark.parametrize(
    ("decodes", "prompts", "tokens", "spare_s"),
    [
        ([], [], 0, 0.0),  # nothing is known
        ([], [], 512, 0.0),
        ([0.005], [], 0, 0.0),  # short
        ([0.020], [], 0, 0.015),
        ([0.005], [(500, 0.025)], 500, 0.01875),
        ([0.005], [(500, 0.025)], 1000, 0.03375),
        ([0.020], [(100, 0.010)], 100, 0.015),  # the steps before were longer ones
        ([0.020] * 2 + [0.010] * 50, [], 0, 0.0075),
    ],
)
def test_spare_time(
    decodes: list[float], prompts: list[tuple[int, float]], tokens: int, spare_s: float
) -> None:
    pace = Pace()
    for step_s in decodes:
        pace.took(0, step_s)
    for count, step_s in prompts:
        pace.took(count, step_s)
    assert pace.spare_s(tokens) == pytest.approx(spare_s, abs=1e-6)


def test_the_host_gets_the_time_that_it_took_of_late() -> None:
    pace = Pace()
    pace.took(0, 0.1)
    pace.prepared(0.002, 0.001)
    assert pace.spare_s(0) == pytest.approx(0.072)
    pace.prepared(0.001, 0.200)  # the device began long before
    assert pace.spare_s(0) == pytest.approx(0.069)
    for _ in range(100):
        pace.prepared(0.001, 0.001)
    assert pace.spare_s(0) == pytest.approx(0.073)


def test_prompts_of_few_tokens_say_little_of_what_a_token_takes() -> None:
    """A step with a prompt takes longer than its tokens explain."""
    pace = Pace()
    for _ in range(20):
        pace.took(0, 0.0073)
        pace.took(1000, 0.0338)
    pace.took(10, 0.009)
    assert 0.02 < pace.spare_s(1000) < 0.0338


@given(st.lists(st.tuples(st.integers(0, 8192), SECONDS, SECONDS, SECONDS)), st.integers(0, 8192))
def test_no_step_is_waited_for_to_its_likely_end(
    steps: list[tuple[int, float, float, float]], tokens: int
) -> None:
    pace, longest, dearest = Pace(), 0.0, 0.0
    for prompt_tokens, step_s, plan_s, launch_s in steps:
        pace.took(prompt_tokens, step_s)
        pace.prepared(plan_s, launch_s)
        if prompt_tokens:
            dearest = max(dearest, step_s / prompt_tokens)
        else:
            longest = max(longest, step_s)
    likely_s = longest + tokens * dearest
    assert 0 <= pace.spare_s(tokens) <= 0.75 * likely_s + 1e-9
    assert likely_s >= SHORT_S or not pace.spare_s(tokens)
