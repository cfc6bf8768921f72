"""Decides which lines an engine's start gives, and when. Pure."""

import msgspec

from loraplex.server.engine.messages import StartProgress

_QUIET_S = 2.0  # what is over sooner needs no words
_INTERVAL_S = 10.0


class StartLog:
    """The log of one start. Times are in seconds on one clock."""

    def __init__(self, now: float) -> None:
        self.progress = StartProgress("starting")
        self._begun = now
        self._said = ("", now - _INTERVAL_S)

    def line(self, progress: StartProgress, now: float) -> str | None:
        """A line for the log at each new stage, and again while one takes long; else None."""
        self.progress = progress
        stage, at = self._said
        if now - self._begun < _QUIET_S:
            return None
        if progress.stage == stage and now - at < _INTERVAL_S:
            return None
        self._said = (progress.stage, now)
        return f"starting: {progress} ({now - self._begun:.0f} s so far)"

    def facts(self, now: float) -> dict[str, str | float]:
        """Return the progress and its seconds, for programs."""
        return msgspec.structs.asdict(self.progress) | {"seconds": round(now - self._begun, 1)}
