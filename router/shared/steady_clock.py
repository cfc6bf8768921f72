"""Unix time without jumps, so that leases do not end early and refills do not stop."""

import time
from collections.abc import Callable

# How much faster or slower than time itself it runs, until it shows what the wall clock shows.
_SLEW = 0.1


class SteadyClock:
    """A clock that never goes back. It follows a wall clock's new time at a tenth of its pace."""

    def __init__(
        self,
        wall: Callable[[], float] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall or time.time
        self._monotonic = monotonic
        self._at = monotonic()
        self._unix = self._wall()

    def __call__(self) -> float:
        """The time in Unix seconds."""
        now = self._monotonic()
        passed, self._at = now - self._at, now
        off = self._wall() - (self._unix + passed)
        most = passed * _SLEW
        self._unix += passed + min(max(off, -most), most)
        return self._unix
