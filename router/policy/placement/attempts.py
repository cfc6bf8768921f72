"""Decides how a sequence whose worker failed goes on: again, alone, or not at all. Pure.

A worker's death is no verdict on what ran there: most deaths are nobody's fault. A sequence that
got on between two deaths caused neither of them. One that did not is a suspect. It is tried once
more, as the only suspect of its router, and convicted if its worker dies then, too. A worker that a
router cannot hear is held against nothing.
"""

from typing import Literal

from loraplex.adapters.common.newest import NewestKept
from loraplex.server.protocol import ErrorCode

MAX_LOSSES = 8
MAX_ADAPTER_FAILURES = 2
_SUSPICIOUS = 2

Step = Literal[
    "again",
    "later",  # refused for want of room: nothing was tried
    "probe",  # again, but with no other suspect beside it, until it gets on
    "quarantine",  # it killed its workers
    "fail",
]


class Attempts:
    """One sequence's history. number: of the present attempt, counted as it is dispatched."""

    __slots__ = ("_adapter_failures", "_at", "_losses", "_strikes", "number")

    def __init__(self) -> None:
        self.number = 0
        self._losses = 0
        self._strikes = 0
        self._at = -1
        self._adapter_failures = 0

    def failed(self, code: ErrorCode, accepted: int) -> Step:
        """Notes that the present attempt ended in `code` after so many accepted tokens in all."""
        self.number += 1
        if code in ("overloaded", "draining"):
            return "later"
        if code == "adapter_unavailable":
            self._adapter_failures += 1
            return "again" if self._adapter_failures <= MAX_ADAPTER_FAILURES else "fail"
        if code not in ("engine_lost", "unheard"):
            return "fail"
        self._losses += 1
        if code == "unheard":
            return "again" if self._losses <= MAX_LOSSES else "fail"
        return self._lost(accepted)

    def _lost(self, accepted: int) -> Step:
        self._strikes = self._strikes + 1 if accepted == self._at else 1
        self._at = accepted
        if self._strikes > _SUSPICIOUS:
            return "quarantine"
        if self._losses > MAX_LOSSES:
            return "fail"
        return "probe" if self._strikes == _SUSPICIOUS else "again"


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
