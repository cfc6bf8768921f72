"""One call at a time for each key: callers that come meanwhile share its result or failure."""

import threading
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from loraplex.adapters.common.newest import NewestKept
from loraplex.adapters.errors import AdapterError

_Key = TypeVar("_Key")
_Result = TypeVar("_Result")

MAX_REMEMBERED = 4096
_UNAVAILABLE_TTL_S = 1.0
# Failures that speak of a credential; they hold only for callers who show the same one.
_PERSONAL = frozenset({"unauthorized", "forbidden", "not_found"})


class _Flight(Generic[_Result]):
    def __init__(self, credential: str) -> None:
        self.credential = credential
        self.done = threading.Event()
        self.result: _Result | None = None
        self.error: AdapterError | None = None


class _Failure(NamedTuple):
    until: float
    credential: str
    error: AdapterError


class SingleFlight(Generic[_Key, _Result]):
    """Lets calls for the same thing at the same time share one piece of work. Thread-safe. Failures
    are remembered for `ttl_s` (at most 1 s for `unavailable`).

    clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float], ttl_s: float) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._flights: dict[_Key, _Flight[_Result]] = {}
        self._failures = NewestKept[_Key, _Failure](MAX_REMEMBERED)

    def run(self, key: _Key, credential: str, work: Callable[[], _Result]) -> _Result:
        """Calls `work`, or waits for another caller's call with the same key.

        credential: a hash of what opens the key. Errors other than AdapterError reach the caller
        whose work it was; those who wait get `unavailable`.
        """
        while True:
            with self._lock:
                self._raise_remembered(key, credential)
                flight = self._flights.get(key)
                mine = flight is None
                if flight is None:
                    flight = self._flights[key] = _Flight(credential)
            if mine:
                return self._fly(key, flight, work)
            flight.done.wait()
            if flight.result is not None:
                return flight.result
            error = flight.error or AdapterError("unavailable", "loading failed; try again")
            if _concerns(error, flight.credential, credential):
                raise _copy(error)

    def _fly(self, key: _Key, flight: _Flight[_Result], work: Callable[[], _Result]) -> _Result:
        try:
            flight.result = work()
            return flight.result
        except AdapterError as error:
            flight.error = _copy(error)
            raise
        finally:
            with self._lock:
                del self._flights[key]
                if flight.error is not None:
                    self._remember(key, flight.credential, flight.error)
            flight.done.set()

    def _remember(self, key: _Key, credential: str, error: AdapterError) -> None:
        ttl_s = min(self._ttl_s, _UNAVAILABLE_TTL_S) if error.code == "unavailable" else self._ttl_s
        self._failures[key] = _Failure(self._clock() + ttl_s, credential, error)

    def _raise_remembered(self, key: _Key, credential: str) -> None:
        failure = self._failures.get(key)
        if failure is None:
            return
        if failure.until <= self._clock():
            del self._failures[key]
        elif _concerns(failure.error, failure.credential, credential):
            raise _copy(failure.error)


def _concerns(error: AdapterError, theirs: str, mine: str) -> bool:
    return error.code not in _PERSONAL or theirs == mine


def _copy(error: AdapterError) -> AdapterError:
    """An exception of one's own: a shared one would gather the tracebacks of all its raisers."""
    return type(error)(error.code, error.message, error.violations, error.retry_after_s)
