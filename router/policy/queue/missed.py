"""A count of the requests that lately found no worker of their base. Pure: times are seconds."""

from collections import deque

# Long enough for an autoscaler that looks twice a minute.
WINDOW_S = 60.0
MAX_REMEMBERED = 1024


class Missed:
    """Requests of the last minute that found no worker, whether they waited or not: what tells an
    autoscaler that a base without workers is wanted.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MAX_REMEMBERED)

    def note(self, now: float) -> None:
        self._times.append(now)

    def count(self, now: float) -> int:
        """Counts the requests of the last minute, at most `MAX_REMEMBERED`."""
        while self._times and self._times[0] <= now - WINDOW_S:
            self._times.popleft()
        return len(self._times)
