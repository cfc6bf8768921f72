"""Retries of operations that may soon succeed: bounded, with back-off and jitter."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from loraplex.adapters.errors import AdapterChanged, AdapterError

_Result = TypeVar("_Result")


def _no_progress() -> int:
    return 0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Decides how often, and after which pauses, a failed call is made again. attempts: in a row
    without progress. most: in all. Seconds; jitter: from [0, 1).

    An error that asks for more than `longest_s` of patience is the caller's to wait for.
    """

    attempts: int = 3
    most: int = 32
    first_s: float = 0.5
    longest_s: float = 5.0
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random

    def run(
        self, work: Callable[[], _Result], progress: Callable[[], int] = _no_progress
    ) -> _Result:
        """Calls `work` until it succeeds. progress: grows when an attempt got further.

        Raises the last AdapterError; those that are not `unavailable`, and AdapterChanged, at once.
        """
        failures, reached = 0, progress()
        for _ in range(self.most - 1):
            try:
                return work()
            except AdapterChanged:
                raise
            except AdapterError as error:
                now = progress()
                failures = 1 if now > reached else failures + 1
                reached = now
                wait = self._wait(failures, error.retry_after_s or 0.0)
                if error.code != "unavailable" or failures >= self.attempts or wait is None:
                    raise
            self.sleep(wait)
        return work()

    def _wait(self, failures: int, asked_s: float) -> float | None:
        """Seconds before the next attempt; None = longer than is worth waiting for."""
        if asked_s > self.longest_s:
            return None
        backoff: float = self.first_s * 2 ** (failures - 1) * (0.5 + self.jitter() / 2)
        return min(self.longest_s, max(backoff, asked_s))
