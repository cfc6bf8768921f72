"""What is learned of the time of steps."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.engine.scheduling.prompt_shares import StepCost

SECONDS = st.floats(0.0, 10.0)
# Prompt tokens of a step, the first one's place in its prompt, and the step's time.
STEPS = st.lists(st.tuples(st.integers(0, 8192), st.integers(0, 100_000), SECONDS))
TARGET_S = 0.06


def attended(tokens: int, start: int) -> float:
    return tokens * (start + tokens / 2)


def learned(steps: list[tuple[int, int, float]]) -> StepCost:
    cost = StepCost()
    for tokens, start, step_s in steps:
        cost.took(tokens, attended(tokens, start), step_s)
    return cost


@pytest.mark.parametrize(
    ("steps", "tokens", "likely_s"),
    [
        ([], 512, 0.0),  # nothing is known
        ([0.005], 0, 0.005),
        ([0.005, (500, 0.025)], 500, 0.025),
        ([0.005, (500, 0.025)], 1000, 0.045),
        ([0.020, (100, 0.010)], 100, 0.020),  # the steps before were longer ones
        ([*[0.020] * 2, *[0.010] * 50], 0, 0.010),
        ([0.005, 0.400], 0, 0.0065),  # something held the second up
        ([0.005, (500, 0.025), (500, 9.0)], 500, 0.0382),
        ([0.005, (500, 9.0), (500, 0.025)], 500, 0.025),  # and here the first one
    ],
)
def test_likely_time(steps: list[float | tuple[int, float]], tokens: int, likely_s: float) -> None:
    timed = [(0, 0, s) if isinstance(s, float) else (s[0], 0, s[1]) for s in steps]
    cost = learned(timed)
    found = cost.decode_s + cost.prompt_s(tokens, attended(tokens, 0))
    assert found == pytest.approx(likely_s, abs=1e-4)


def test_prompts_of_few_tokens_say_little_of_what_a_token_takes() -> None:
    """A step with a prompt takes longer than its tokens explain."""
    cost = learned([(0, 0, 0.0073), (1000, 0, 0.0338)] * 20 + [(10, 0, 0.009)])
    assert 0.025 < cost.prompt_s(1000, attended(1000, 0)) < 0.028


def test_a_token_that_sees_more_costs_more() -> None:
    def step_s(start: int) -> float:
        return 0.005 + 25e-6 * 2000 + 0.7e-9 * attended(2000, start)

    places = [*range(0, 32_000, 2000)] * 2
    cost = learned([(0, 0, 0.005), *((2000, start, step_s(start)) for start in places)])
    for start in (0, 16_000, 30_000):
        likely_s = cost.decode_s + cost.prompt_s(2000, attended(2000, start))
        assert likely_s == pytest.approx(step_s(start), rel=0.05)


def test_nothing_bounds_a_step_before_anything_is_known() -> None:
    assert StepCost().tokens_within(0.0, 0) == sys.maxsize


def test_no_time_is_enough_for_no_token() -> None:
    """A token costs nothing by itself here, but its context does."""
    cost = learned([(1, 49_663, 2e-9), (0, 0, 2e-9), (1, 0, 2e-9), (1, 48_133, 2e-9)])
    assert cost.tokens_within(0.0, 0) == 0
    assert cost.tokens_within(1e-313, 0) == 0, "the arithmetic does not underflow"


@given(STEPS, SECONDS, st.floats(0.0, 1.0), st.integers(0, 100_000), st.integers(0, 1000))
def test_less_time_and_later_tokens_never_give_more(
    steps: list[tuple[int, int, float]], seconds: float, part: float, start: int, later: int
) -> None:
    cost = learned(steps)
    tokens = cost.tokens_within(seconds, start)
    assert 0 <= cost.tokens_within(part * seconds, start) <= tokens
    assert cost.tokens_within(seconds, start + later) <= tokens
    if tokens != sys.maxsize:
        longest = max([256, *(count for count, _, _ in steps)])
        assert tokens <= 2 * longest, "more than anything that was seen"
        assert cost.prompt_s(tokens, attended(tokens, start)) <= seconds * 1.001 + 1e-9
    assert 0 <= cost.prompt_s(100, 100 * start) <= cost.prompt_s(101, 101 * (start + later))


@given(
    decode_s=st.floats(0.001, 0.03),
    fixed_s=st.floats(0.0, 0.01),
    token_s=st.floats(2e-6, 2e-4),
    slope=st.floats(0.0, 4e-5),
    length=st.integers(2000, 40_000),
    noise=st.lists(st.floats(0.97, 1.03), min_size=7, max_size=7),
)
def test_steps_come_to_last_as_long_as_they_may(
    decode_s: float, fixed_s: float, token_s: float, slope: float, length: int, noise: list[float]
) -> None:
    """fixed_s: that a step takes less with prompts than without. slope: what a token of context
    costs, as a part of a token."""
    cost, start, timed = StepCost(), 0, list[float]()
    for number in range(80):
        cost.took(0, 0, decode_s)
        room = max(256, cost.tokens_within(TARGET_S - cost.decode_s, start)) if number else 256
        tokens = min(room, length - start)
        work_s = token_s * (tokens + slope * attended(tokens, start))
        step_s = (max(0.0, decode_s - fixed_s) + work_s) * noise[number % len(noise)]
        cost.took(tokens, attended(tokens, start), step_s)
        if number >= 40 and tokens > 256:
            timed.append(step_s)
        start = 0 if start + tokens >= length else start + tokens
    assert max(timed, default=0.0) <= 1.25 * TARGET_S
