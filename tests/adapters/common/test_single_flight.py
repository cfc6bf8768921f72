"""One piece of work for all who ask at once; failures shared, but not between credentials."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from loraplex.adapters.common.single_flight import SingleFlight
from loraplex.adapters.errors import AdapterError, AdapterErrorCode

CALLERS = 50


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Work:
    """Counts its runs; each waits until it is let go."""

    def __init__(self, outcome: Callable[[int], str]) -> None:
        self.runs = 0
        self.started = threading.Semaphore(0)
        self.go = threading.Event()
        self._outcome = outcome

    def __call__(self) -> str:
        self.runs += 1
        self.started.release()
        assert self.go.wait(240)
        return self._outcome(self.runs)


def fail(code: AdapterErrorCode) -> Callable[[int], str]:
    def outcome(run: int) -> str:
        raise AdapterError(code, f"failure {run}")

    return outcome


def everyone(flight: SingleFlight[str, str], work: Work, credentials: list[str]) -> list[str]:
    """What each caller gets, when all have asked before the first work ends."""

    def call(credential: str) -> str:
        try:
            return flight.run("key", credential, work)
        except AdapterError as error:
            return f"{error.code}: {error.message}"

    with ThreadPoolExecutor(len(credentials)) as pool:
        futures = [pool.submit(call, credential) for credential in credentials]
        assert work.started.acquire(timeout=240)
        work.go.set()
        return [future.result(30) for future in futures]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def flight(clock: Clock) -> SingleFlight[str, str]:
    return SingleFlight(clock, ttl_s=5.0)


def test_a_failure_is_shared_and_remembered(flight: SingleFlight[str, str], clock: Clock) -> None:
    work = Work(fail("invalid"))
    found = everyone(flight, work, [str(n) for n in range(CALLERS)])
    assert found == ["invalid: failure 1"] * CALLERS
    clock.now = 4.9
    with pytest.raises(AdapterError, match="failure 1"):
        flight.run("key", "other", work)
    clock.now = 5.1
    with pytest.raises(AdapterError, match="failure 2"):
        flight.run("key", "other", work)
    assert work.runs == 2


def test_unavailable_is_remembered_for_a_second(
    flight: SingleFlight[str, str], clock: Clock
) -> None:
    work = Work(fail("unavailable"))
    everyone(flight, work, ["a"])
    clock.now = 0.9
    with pytest.raises(AdapterError, match="failure 1"):
        flight.run("key", "b", work)
    clock.now = 1.1
    assert flight.run("key", "b", lambda: "fine") == "fine"


@pytest.mark.parametrize("code", ["unauthorized", "forbidden", "not_found"])
def test_a_refused_credential_is_not_another_callers(
    code: AdapterErrorCode, flight: SingleFlight[str, str]
) -> None:
    work = Work(fail(code))
    everyone(flight, work, ["bad", "bad", "bad"])
    assert work.runs == 1
    assert flight.run("key", "good", lambda: "fine") == "fine"


def test_a_waiter_with_another_credential_tries_for_itself(
    flight: SingleFlight[str, str],
) -> None:
    def outcome(run: int) -> str:
        if run == 1:
            raise AdapterError("forbidden", "not you")
        return "fine"

    work = Work(outcome)
    found = everyone(flight, work, ["bad", *["good"] * 9])
    assert sorted(set(found)) in (["fine", "forbidden: not you"], ["fine"])
    assert found.count("fine") >= 1
    assert work.runs >= 2 or found == ["fine"] * 10


def test_other_errors_reach_their_caller_and_end_the_wait(
    flight: SingleFlight[str, str],
) -> None:
    started, go = threading.Event(), threading.Event()

    def broken() -> str:
        started.set()
        assert go.wait(240)
        raise ZeroDivisionError

    def wait() -> str:
        return flight.run("key", "b", lambda: "fine")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(flight.run, "key", "a", broken)
        assert started.wait(240)
        second = pool.submit(wait)
        go.set()
        assert isinstance(first.exception(30), ZeroDivisionError)
        error = second.exception(30)
        assert error is None or isinstance(error, AdapterError)
    assert flight.run("key", "c", lambda: "fine") == "fine"


def test_results_are_not_remembered(flight: SingleFlight[str, str]) -> None:
    assert flight.run("key", "a", lambda: "one") == "one"
    assert flight.run("key", "a", lambda: "two") == "two"
