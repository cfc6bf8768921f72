"""Where the time of a start goes, for a person."""

import time
from collections.abc import Callable

from loraplex.server.engine.messages import StartProgress


class StartPhases:
    """Counts from its creation. report: hears of each phase, and how far it is."""

    def __init__(self, report: Callable[[StartProgress], None] | None = None) -> None:
        self._report = report or (lambda progress: None)
        self._name = ""
        self._begun = self._last = time.monotonic()
        self._phases: list[tuple[str, float]] = []

    def begin(self, name: str) -> None:
        """The phase before is over."""
        self._end()
        self._name = name
        self.count(0, 0)

    def count(self, done: float, total: float, unit: str = "") -> None:
        """How far the phase is."""
        self._report(StartProgress(self._name, done, total, unit))

    def line(self) -> str:
        """Return the log's line of all phases, of which the last is over."""
        self._end()
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._phases)
        return f"start: {self._last - self._begun:.1f} s ({parts})"

    def _end(self) -> None:
        now = time.monotonic()
        if self._name:
            self._phases.append((self._name, now - self._last))
        self._last = now
