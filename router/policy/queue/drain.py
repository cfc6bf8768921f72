"""Estimates how fast a queue empties, and when a refused caller should retry. Pure."""

import math

_WINDOW_S = 10.0
_SHORTEST_S, _LONGEST_S = 1.0, 60.0


class DrainRate:
    """Departures a second: an exponentially weighted count over about ten seconds."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._at = 0.0

    def departed(self, now: float) -> None:
        self._decay(now)
        self._weight += 1.0

    def per_second(self, now: float) -> float:
        self._decay(now)
        return self._weight / _WINDOW_S

    def retry_after_s(self, waiting: int, now: float) -> float:
        """Until half of those who wait will have gone, so that who comes back then finds room."""
        rate = self.per_second(now)
        if rate <= 0.0:
            return _LONGEST_S / 2 if waiting else _SHORTEST_S
        return min(max(waiting / 2 / rate, _SHORTEST_S), _LONGEST_S)

    def _decay(self, now: float) -> None:
        if now > self._at:
            self._weight *= math.exp((self._at - now) / _WINDOW_S)
            self._at = now
