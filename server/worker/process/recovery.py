"""Decides when a child is stuck, and how long to wait before its restart. Pure."""

from typing import Literal


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


Verdict = Literal[
    "well",
    "suspect",  # its sequences had better go on elsewhere, if they can
    "stalled",  # only a new process can help
]

# An engine speaks four times a second, from beside its step loop.
SILENT_S = 1.0
FROZEN_S = 10.0
# Suspiciously long for a step, unless its predecessors were almost as long.
LONG_STEP_S = 5.0
_LONGER = 8.0
# From step to step: prompts may be hundreds of decodes apart; one odd step must not excuse all.
_FADING = 0.995
# A loop that has sequences but no step says so every second, or every other if messages wake it.
LEAST_LIMIT_S = 3.0


class StallWatch:
    """Watch whether an engine stands still.

    limit_s: longest time without progress while there is work; at least LEAST_LIMIT_S. Progress is
    a step, the loop's word that it waits for adapters, or the moment when work came to an idle
    engine. A suspicion is cheap and comes early, a verdict is not and comes late: a long prefill on
    a slow device is neither.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._heard_at = now
        self._since: float | None = None
        self._longest_s = 0.0  # of steps, fading

    def heard(self, now: float) -> None:
        """Any sign of life: what the loop does beside a step says nothing of that step."""
        self._heard_at = now

    def progressed(self, now: float, step_s: float = 0.0) -> None:
        """Note progress. step_s: what a step took, 0 if the loop had none to make."""
        self._heard_at = self._since = now
        if step_s:
            self._longest_s = max(step_s, _FADING * self._longest_s)

    def restart(self, now: float) -> None:
        """The watcher itself stood still: what it missed says nothing."""
        self._heard_at = now
        self._since = None if self._since is None else now

    def verdict(self, now: float, has_work: bool) -> Verdict:
        """Judge how the engine fares. The caller asks regularly. has_work: there are sequences, if
        only such as wait.
        """
        if not has_work:
            self._since = None
        elif self._since is None:
            self._since = now
        stuck_s = 0.0 if self._since is None else now - self._since
        silent_s = now - self._heard_at
        if stuck_s > max(self._limit_s, LEAST_LIMIT_S) or silent_s > min(FROZEN_S, self._limit_s):
            return "stalled"
        if silent_s > SILENT_S or stuck_s > max(LONG_STEP_S, _LONGER * self._longest_s):
            return "suspect"
        return "well"
