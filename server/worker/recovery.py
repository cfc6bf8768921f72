"""When is a child stuck, and how long to wait before starting it again? Pure."""


class Backoff:
    """Delays between restarts: doubling from first_s to most_s, anew after healthy_s of health."""

    def __init__(self, first_s: float = 0.5, most_s: float = 30.0, healthy_s: float = 60.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._healthy_s = healthy_s
        self._next_s = first_s

    def delay_s(self, healthy_for_s: float) -> float:
        """How long to wait now; healthy_for_s: how long the last life was ready (0 = never)."""
        if healthy_for_s >= self._healthy_s:
            self._next_s = self._first_s
        delay = self._next_s
        self._next_s = min(self._next_s * 2, self._most_s)
        return delay


class StallWatch:
    """Is an engine with work to do standing still?

    Progress is a step, a frame of any other kind, or the moment when work came to an idle engine.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None

    def progressed(self, now: float) -> None:
        self._since = now

    def stalled(self, now: float, has_work: bool) -> bool:
        """To be asked regularly. has_work: the engine could go on without anything from us."""
        if not has_work:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since > self._limit_s
