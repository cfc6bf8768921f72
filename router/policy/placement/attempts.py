"""Decides how a sequence whose worker failed goes on: again, alone, or not at all. Pure.

A worker's death is no verdict on what ran there: most deaths are nobody's fault. A sequence that
got on between two deaths caused neither of them. Nor did one that the dead engine had not begun.
Any other is a suspect, by as much as each death says (`Evidence`). It is tried again as the only
suspect of its router, and convicted once enough deaths say so. A worker that a router cannot hear
is held against nothing.
"""

from typing import Literal

from loraplex.adapters.common.newest import NewestKept
from loraplex.server.protocol import ErrorCode, Evidence

MAX_LOSSES = 10
MAX_ADAPTER_FAILURES = 2
# Weights of deaths without a token between them: three that say much convict, five that say little,
# or ten of whole workers, which say nothing of their last step.
_WEIGHTS: dict[Evidence | None, int] = {"none": 0, None: 1, "weak": 2, "strong": 4}
_SUSPICIOUS, _CONVICTING = 3, 10
# Losses before an attempt that gave so many tokens do not count.
_MANY_TOKENS = 100

Step = Literal[
    "again",
    "later",  # refused for want of room: nothing was tried
    "quarantine",  # it killed its workers
    "fail",
]


class Attempts:
    """One sequence's history. number: of the present attempt, counted as it is dispatched."""

    __slots__ = ("_adapter_failures", "_at", "_losses", "_weight", "number")

    def __init__(self) -> None:
        self.number = 0
        self._losses = 0
        self._weight = 0
        self._at = 0
        self._adapter_failures = 0

    def failed(self, code: ErrorCode, accepted: int, evidence: Evidence | None = None) -> Step:
        """Notes that the present attempt ended in `code` after so many accepted tokens in all.
        evidence: of `engine_lost`; None = not known.
        """
        self.number += 1
        if accepted > self._at:
            if accepted - self._at >= _MANY_TOKENS:
                self._losses = 0
            self._at, self._weight = accepted, 0
        if code in ("overloaded", "draining"):
            return "later"
        if code == "adapter_unavailable":
            self._adapter_failures += 1
            return "again" if self._adapter_failures <= MAX_ADAPTER_FAILURES else "fail"
        if code not in ("engine_lost", "unheard"):
            return "fail"
        self._losses += 1
        self._weight += _WEIGHTS["none" if code == "unheard" else evidence]
        if self._weight >= _CONVICTING:
            return "quarantine"
        return "again" if self._losses <= MAX_LOSSES else "fail"

    @property
    def is_suspect(self) -> bool:
        """Whether it runs with no other suspect beside it, until it gets on."""
        return self._weight >= _SUSPICIOUS


class Quarantine:
    """Requests that killed workers, by fingerprint; bounded, forgotten after `ttl_s`."""

    def __init__(self, ttl_s: float, most: int = 1024) -> None:
        self._ttl_s = ttl_s
        self._until = NewestKept[bytes, float](most)

    def __len__(self) -> int:
        return len(self._until)

    def add(self, fingerprint: bytes, now: float) -> None:
        self._until[fingerprint] = now + self._ttl_s

    def holds(self, fingerprint: bytes, now: float) -> bool:
        until = self._until.get(fingerprint)
        if until is not None and until <= now:
            del self._until[fingerprint]
            return False
        return until is not None


class RetryBudget:
    """Limits retries with a token bucket over all requests of a router: what fails must not make
    more work than it can.

    share: of a retry that each request pays for. per_s: retries a second that need no payment.
    burst: what may be saved up. A retry that is not paid for is late, not lost.
    """

    def __init__(self, share: float, per_s: float, burst: float, now: float) -> None:
        self._share = share
        self._per_s = per_s
        self._burst = burst
        self._tokens = burst
        self._at = now

    def request(self) -> None:
        self._tokens = min(self._burst, self._tokens + self._share)

    def take(self, now: float) -> float:
        """Seconds for which this retry has to wait for its turn."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        self._tokens -= 1
        return max(0.0, -self._tokens) / self._per_s
