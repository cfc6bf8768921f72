"""Whether a worker is heard, and hears. Pure: times are on one monotonic clock, in seconds."""

from typing import Literal

# deaf: it speaks, but has not heard this router; a network may lose one direction alone.
Hearing = Literal["good", "silent", "deaf"]
# A connection of which something lies unread is judged after so many times the limit.
_PATIENCE = 10
# A process that is late at each look forgives a worker so many times in a row.
_EXCUSES = 20


class Liveness:
    """Judges one connection from its beginning."""

    __slots__ = (
        *("_asked_at", "_behind_since", "_deaf_excuses", "_heard_at", "_silent_excuses"),
        *("_unsent", "hearing"),
    )

    def __init__(self, now: float) -> None:
        self.hearing: Hearing = "good"
        self._heard_at = now
        self._asked_at: float | None = None
        self._behind_since: float | None = None
        self._unsent = self._silent_excuses = self._deaf_excuses = 0

    def heard(self, now: float) -> None:
        self._heard_at = now
        self._silent_excuses = 0

    def asked(self, now: float) -> None:
        """Notes that the worker was asked for a sign that it hears this router."""
        self._asked_at = now

    def answered(self) -> None:
        self._asked_at = None
        self._deaf_excuses = 0

    def unsent(self, nbytes: int, now: float) -> None:
        """Notes the unsent bytes here. While they get fewer, a question may lie behind them."""
        if self._asked_at is not None and 0 < nbytes < self._unsent:
            self._asked_at = now
        self._unsent = nbytes

    def unread(self, nbytes: int, now: float) -> None:
        """Notes how much has come that this process has not read. The answer may be among it."""
        if not nbytes:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now

    def excuse(self, now: float) -> None:
        """Forgives silence until now, as this process did not listen; but not for ever."""
        if self._silent_excuses < _EXCUSES:
            self._silent_excuses += 1
            self._heard_at = now
        if self._asked_at is not None and self._deaf_excuses < _EXCUSES:
            self._deaf_excuses += 1
            self._asked_at = now

    def judge(self, now: float, limit_s: float) -> bool:
        """Sets `hearing`, and says whether it is another than before. While something lies unread,
        nothing new is known: `hearing` stays, but not for ever.
        """
        since = self._behind_since
        if since is not None and now - since <= _PATIENCE * limit_s:
            return False
        before = self.hearing
        if now - self._heard_at > limit_s:
            self.hearing = "silent"
        elif self._asked_at is not None and now - self._asked_at > limit_s:
            self.hearing = "deaf"
        else:
            self.hearing = "good"
        return self.hearing != before
