"""Whether a worker is heard, and hears. Pure: times are on one monotonic clock, in seconds."""

from typing import Literal

# deaf: it speaks, but has not heard this router; a network may lose one direction alone.
Hearing = Literal["good", "silent", "deaf"]


class Liveness:
    """Judges one connection from its beginning."""

    __slots__ = ("_asked_at", "_heard_at", "_unsent", "hearing")

    def __init__(self, now: float) -> None:
        self.hearing: Hearing = "good"
        self._heard_at = now
        self._asked_at: float | None = None
        self._unsent = 0

    def heard(self, now: float) -> None:
        self._heard_at = now

    def asked(self, now: float) -> None:
        """Notes that the worker was asked for a sign that it hears this router."""
        self._asked_at = now

    def answered(self) -> None:
        self._asked_at = None

    def unsent(self, nbytes: int, now: float) -> None:
        """Notes how much is still unsent on this router's side. While it gets less, a question may
        lie behind it.
        """
        if self._asked_at is not None and 0 < nbytes < self._unsent:
            self._asked_at = now
        self._unsent = nbytes

    def excuse(self, now: float) -> None:
        """Forgives silence until now, as this process did not listen."""
        self._heard_at = now
        if self._asked_at is not None:
            self._asked_at = now

    def judge(self, now: float, limit_s: float) -> bool:
        """Sets `hearing`, and says whether it is another than before."""
        before = self.hearing
        if now - self._heard_at > limit_s:
            self.hearing = "silent"
        elif self._asked_at is not None and now - self._asked_at > limit_s:
            self.hearing = "deaf"
        else:
            self.hearing = "good"
        return self.hearing != before
