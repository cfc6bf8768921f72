"""Retries: how often, how long apart, and what is not tried again."""

import pytest

from loraplex.adapters.common.retries import RetryPolicy
from loraplex.adapters.errors import AdapterChanged, AdapterError, AdapterErrorCode
from tests.adapters.refusals import refusal


class Work:
    """Fails with each error in turn, then succeeds."""

    def __init__(self, *errors: AdapterError) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def later(retry_after_s: float | None = None) -> AdapterError:
    return AdapterError("unavailable", "later", (), retry_after_s)


def test_waits_grow_with_jitter_and_heed_the_source() -> None:
    waits: list[float] = []
    retries = RetryPolicy(attempts=6, sleep=waits.append, jitter=lambda: 0.0)
    work = Work(later(), later(), later(3.0), later())
    assert retries.run(work) == "done"
    assert waits == [0.25, 0.5, 3.0, 2.0]
    waits.clear()
    high = RetryPolicy(attempts=6, sleep=waits.append, jitter=lambda: 1.0)
    high.run(Work(*[later() for _ in range(5)]))
    assert waits == [0.5, 1.0, 2.0, 4.0, 5.0]


def test_attempts_are_bounded() -> None:
    waits: list[float] = []
    work = Work(*[later() for _ in range(9)])
    assert refusal(lambda: RetryPolicy(sleep=waits.append).run(work)) is not None
    assert (work.calls, len(waits)) == (3, 2)


def test_progress_counts_anew_up_to_a_bound() -> None:
    waits: list[float] = []
    work = Work(*[later() for _ in range(99)])
    retries = RetryPolicy(most=10, sleep=waits.append)
    assert refusal(lambda: retries.run(work, lambda: work.calls)) is not None
    assert (work.calls, len(waits)) == (10, 9)
    assert max(waits) <= retries.first_s


@pytest.mark.parametrize("code", ["not_found", "forbidden", "invalid", "too_large"])
def test_what_is_final_is_not_tried_again(code: AdapterErrorCode) -> None:
    work = Work(AdapterError(code, "no"))
    assert refusal(lambda: RetryPolicy(sleep=lambda seconds: None).run(work)) is not None
    assert work.calls == 1


@pytest.mark.parametrize("error", [later(60.0), AdapterChanged("unavailable", "changed", (), 1.0)])
def test_what_is_anothers_to_wait_for(error: AdapterError) -> None:
    work = Work(error)
    assert refusal(lambda: RetryPolicy(sleep=lambda seconds: None).run(work)) is error
    assert work.calls == 1
