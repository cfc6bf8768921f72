"""How many lines of a batch are with the server at once. Pure."""

# It may be the line's own fault: its answer is too long for the time that it has.
TOO_LONG = 504
# The server is busy, or away: another attempt may help.
BUSY = frozenset((429, 502, 503, TOO_LONG))
_FIRST_S = 0.5
_LONGEST_S = 60.0
# Of the limit, for each answer: slow near the limit at which the server was busy last.
_FAST, _SLOW = 1 / 4, 1 / 64
_NEAR = 0.1


def pause_s(attempt: int, asked_s: float | None) -> float:
    """Seconds before another attempt. attempt: from 1. asked_s: the server's Retry-After."""
    backoff = min(_FIRST_S * 2.0 ** min(attempt - 1, 16), _LONGEST_S)
    return backoff if asked_s is None else min(max(asked_s, 0.0), _LONGEST_S)


class SendPace:
    """A limit that halves when the server is busy, and grows with its answers. now: seconds."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = self._ceiling = float(most)
        self._opens_at = 0.0
        self._active = 0

    @property
    def limit(self) -> int:
        return int(self._limit)

    def wait_s(self, now: float) -> float:
        """Seconds for which nothing may be sent."""
        return max(0.0, self._opens_at - now)

    def has_room(self, now: float) -> bool:
        return self._active < self.limit and now >= self._opens_at

    def sent(self) -> None:
        self._active += 1

    def answered(self) -> None:
        self._active -= 1
        is_near = abs(self._limit - self._ceiling) <= _NEAR * self._ceiling
        self._limit = min(float(self._most), self._limit + (_SLOW if is_near else _FAST))

    def busy(self, now: float, pause: float) -> None:
        """Notes a refusal. Lines sent together fail together: the limit halves once a pause."""
        self._active -= 1
        if now >= self._opens_at:
            self._ceiling = self._limit
            self._limit = max(1.0, self._limit / 2)
        self._opens_at = max(self._opens_at, now + pause)

    def lost(self) -> None:
        """Notes that no answer came."""
        self._active -= 1
