"""When a version goes back by itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.policy.guards import Measured, breach, bucket_of, judged, quantile
from loraplex.router.policy.rollout import Guards

GUARDS = Guards(min_requests=10, max_error_increase=0.1, max_latency_ratio=2.0)


def measured(
    requests: int, failed: int = 0, first_s: float = 0.1, token_s: float = 0.01
) -> Measured:
    answered = requests - failed
    return Measured(
        requests, failed, {bucket_of(first_s): answered}, {bucket_of(token_s): answered}
    )


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (measured(100), measured(100), None),
        (measured(100), measured(9, failed=9), None),  # too early
        (measured(100), measured(10, failed=3), None),  # chance may have done it
        (measured(100), measured(10, failed=4), "40.0% of its 10 requests failed, 0.0%"),
        (measured(1000), measured(1000, failed=120), None),
        (measured(1000), measured(1000, failed=121), "12.1% of its 1000"),
        (measured(100, failed=100), measured(100, failed=100), None),
        (measured(100, failed=40), measured(10, failed=10), "100.0% of its 10 requests"),
        (measured(100, failed=50), measured(100, failed=55), None),  # both do badly
        (measured(0), measured(10, failed=4), "0.0% of the old version's 0"),
        (measured(100), measured(100, first_s=0.15), None),
        (measured(100), measured(100, first_s=0.3), "time to first token"),
        (measured(100), measured(100, token_s=0.03), "time a token"),
        (measured(9), measured(100, first_s=9.0), None),  # nothing to compare it with
        (measured(100, first_s=0.3), measured(100), None),
        (measured(100, first_s=0.002), measured(100, first_s=0.02), None),  # noise
        (measured(100, token_s=0.0004), measured(100, token_s=0.0014), None),
    ],
)
def test_table(old: Measured, new: Measured, words: str | None) -> None:
    why = breach(GUARDS, old, new)
    assert (why is None) == (words is None), why
    assert words is None or (why is not None and words in why)
    if new.requests < GUARDS.min_requests:
        assert judged(GUARDS, old, new) == "early"
    else:
        assert judged(GUARDS, old, new) == ("holds" if why is None else "breaks")


def test_a_limit_of_nothing_allows_nothing() -> None:
    strict = Guards(min_requests=1, max_error_increase=0.0)
    assert breach(strict, measured(100), measured(100, failed=1)) is not None
    assert breach(strict, measured(100), measured(100)) is None


def test_a_guard_that_is_off_lets_everything_through() -> None:
    off = Guards(min_requests=1, max_error_increase=None, max_latency_ratio=None)
    assert breach(off, measured(100), measured(100, failed=99, first_s=60.0)) is None


def test_the_slow_tail_counts_not_the_middle() -> None:
    new = measured(94)
    new.requests += 6
    new.first_token[bucket_of(1.0)] = 6
    assert breach(GUARDS, measured(100), new) is not None
    new.first_token[bucket_of(0.1)] += 100
    assert breach(GUARDS, measured(100), new) is None


@given(st.floats(1e-3, 1e3))
def test_seconds_are_kept_within_five_percent(seconds: float) -> None:
    found = quantile({bucket_of(seconds): 1})
    assert found is not None
    assert abs(found / seconds - 1) < 0.051


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=200))
def test_a_quantile_is_that_of_the_sorted_values(values: list[float]) -> None:
    histogram: dict[int, int] = {}
    for value in values:
        histogram[bucket_of(value)] = histogram.get(bucket_of(value), 0) + 1
    exact = sorted(values)[-(-len(values) * 95 // 100) - 1]
    found = quantile(histogram)
    assert found is not None
    assert abs(found / exact - 1) < 0.051
    assert quantile({}) is None
