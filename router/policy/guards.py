"""Decides whether a new version does worse than the old one beside it. Pure.

Latencies are counted in buckets of 10 %, which add up over routers and over time.
"""

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from loraplex.router.policy.rollout import NO_SCORES, Guards, ScorePair

_BASE = math.log(1.1)
_SHORTEST_S = 1e-4
QUANTILE = 0.95

# Differences as small as these are noise, whatever their ratio.
_FIRST_TOKEN_NOISE_S, _TOKEN_NOISE_S = 0.02, 0.002

# Bucket -> how many.
Histogram = dict[int, int]

Verdict = Literal[
    "early",  # it has not had enough requests yet
    "holds",  # it may stay
    "breaks",  # it must go back
]


class GuardSample(msgspec.Struct, frozen=True):
    """Measurements of one request. token_s: for a token after the first; None without one."""

    failed: bool
    first_token_s: float | None = None
    token_s: float | None = None


class Measured(msgspec.Struct):
    """Sums over the requests of one version."""

    requests: int = 0
    failed: int = 0
    first_token: Histogram = {}
    token: Histogram = {}

    @property
    def error_rate(self) -> float:
        return self.failed / self.requests if self.requests else 0.0


class Measurements(msgspec.Struct, frozen=True):
    """Measurements of a rollout's versions, by digest. verdicts: for those that are judged.

    of_all: over all routers' requests, not over this one's alone. scores: of the versions that are
    judged beside the old one, by digest.
    """

    versions: Mapping[str, Measured]
    verdicts: Mapping[str, Verdict]
    of_all: bool = True
    scores: Mapping[str, ScorePair] = {}


def bucket_of(seconds: float) -> int:
    return round(math.log(max(seconds, _SHORTEST_S)) / _BASE)


def quantile(histogram: Mapping[int, int], share: float = QUANTILE) -> float | None:
    """Seconds, within 5 %; None of nothing."""
    rest = math.ceil(share * sum(histogram.values()))
    for bucket in sorted(histogram):
        rest -= histogram[bucket]
        if rest <= 0:
            return math.exp(bucket * _BASE)
    return None


def judged(guards: Guards, old: Measured, new: Measured, scores: ScorePair = NO_SCORES) -> Verdict:
    if breach(guards, old, new, scores) is not None:
        return "breaks"
    return "early" if new.requests < guards.min_requests else "holds"


def breach(
    guards: Guards, old: Measured, new: Measured, scores: ScorePair = NO_SCORES
) -> str | None:
    """Why the new version must go back, for people; None = it may stay, or it is too early.

    Without requests of the old version all of the new one's errors count, and its latency is not
    judged. The test of scores holds for any number of them.
    """
    margin = guards.max_score_drop
    if margin is not None and scores.p_value(margin) <= guards.score_error:
        return (
            f"its mean score is {scores.new.mean:.3g} over {scores.new.count} requests, "
            f"the old version's {scores.old.mean:.3g} over {scores.old.count}"
        )
    if new.requests < guards.min_requests:
        return None
    if _fails_more(guards.max_error_increase, old, new):
        return (
            f"{new.error_rate:.1%} of its {new.requests} requests failed, "
            f"{old.error_rate:.1%} of the old version's {old.requests}"
        )
    for what, noise_s, ours, theirs in (
        ("time to first token", _FIRST_TOKEN_NOISE_S, new.first_token, old.first_token),
        ("time a token", _TOKEN_NOISE_S, new.token, old.token),
    ):
        if min(sum(ours.values()), sum(theirs.values())) >= guards.min_requests:
            slow, usual = quantile(ours), quantile(theirs)
            if _is_slower(guards.max_latency_ratio, noise_s, slow or 0.0, usual or 0.0):
                return f"its p95 {what} is {slow:.3g} s, the old version's {usual:.3g} s"
    return None


def _fails_more(limit: float | None, old: Measured, new: Measured) -> bool:
    """Whether the new version fails more than chance explains. Chance explains two standard
    deviations of what is allowed."""
    if limit is None or new.error_rate - old.error_rate <= limit:
        return False
    allowed = new.requests * min(1.0, old.error_rate + limit)
    return new.failed > allowed + 2 * math.sqrt(allowed) or new.failed == new.requests


def _is_slower(limit: float | None, noise_s: float, new_s: float, old_s: float) -> bool:
    return limit is not None and new_s > max(limit * old_s, old_s + noise_s)
