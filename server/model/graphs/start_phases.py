"""Where the time of a start goes, for a person."""

import time


class StartPhases:
    """Counts from its creation."""

    def __init__(self) -> None:
        self._begun = self._last = time.monotonic()
        self._phases: list[tuple[str, float]] = []

    def done(self, name: str) -> None:
        """What was done since the phase before has this name."""
        now = time.monotonic()
        self._phases.append((name, now - self._last))
        self._last = now

    def line(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._phases)
        return f"start: {self._last - self._begun:.1f} s ({parts})"
