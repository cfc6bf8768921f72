"""Tests whether a version's mean score lies below another's, at any time and as often as wanted.
Pure.

Scores lie in [0, 1]. For a mean `mu`, the likelihood ratio of Bernoulli draws, mixed over their
alternatives by Beta(1/2, 1/2), is a supermartingale for every such score. The product over both
versions, at the least likely pair of means that would be no worse, is an e-value. By Ville's
inequality it exceeds 1 / error at any time with at most the probability `error`.
"""

import math
from typing import Literal

import msgspec

# Old, new: a score counts for that side of a rollout. The others: why for none.
Counted = Literal["old", "new", "again", "unknown", "over"]

# A mean of exactly 0 or 1 has no likelihood.
_EDGE = 1e-9
_HALVINGS = 60
_PRIOR = math.lgamma(0.5) * 2 - math.lgamma(1.0)


class Scores(msgspec.Struct, frozen=True):
    """Scores of one version. total: their sum."""

    count: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


class ScorePair(msgspec.Struct, frozen=True):
    """Scores of two versions from the same time."""

    old: Scores = Scores()
    new: Scores = Scores()

    def p_value(self, margin: float) -> float:
        """The error at which the new mean is found to lie more than `margin` below the old. It
        holds at any time: the least value that was ever seen has the same meaning."""
        old, new = self.old, self.new
        if not old.count or not new.count:
            return 1.0
        if new.total / new.count >= old.total / old.count - margin:
            return 1.0
        log_e = _least(old, new, margin) + _mixture(old) + _mixture(new)
        return min(1.0, math.exp(-log_e))


NO_SCORES = ScorePair()


def _mixture(scores: Scores) -> float:
    """Log of the mixed likelihood."""
    hits, misses = scores.total + 0.5, scores.count - scores.total + 0.5
    return math.lgamma(hits) + math.lgamma(misses) - math.lgamma(scores.count + 1.0) - _PRIOR


def _least(old: Scores, new: Scores, margin: float) -> float:
    """The least of -log likelihood where the new mean is the old one less `margin`. It is convex
    in the mean, so halving the side where it falls finds it.
    """
    low, high = margin + _EDGE, 1.0 - _EDGE
    for _ in range(_HALVINGS):
        mean = (low + high) / 2
        if _slope(old, mean) + _slope(new, mean - margin) < 0.0:
            low = mean
        else:
            high = mean
    return _surprise(old, low) + _surprise(new, low - margin)


def _surprise(scores: Scores, mean: float) -> float:
    missed = scores.count - scores.total
    return -scores.total * math.log(mean) - missed * math.log1p(-mean)


def _slope(scores: Scores, mean: float) -> float:
    return (scores.count - scores.total) / (1.0 - mean) - scores.total / mean
