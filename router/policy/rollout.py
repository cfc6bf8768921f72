"""Versions of one registered name side by side, and which of them a request gets. Pure.

Shares are drawn by weighted rendezvous hashing: a caller stays with its version. A raised weight
only gains callers, a lowered one only loses some.
"""

import math
from hashlib import blake2b
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.ref import AdapterRef, format_ref

MAX_VERSIONS = 8
MAX_WEIGHT = 100
MAX_WINDOW_S = 3600
_HASH_BITS = 64

Weight = Annotated[int, Meta(ge=0, le=MAX_WEIGHT)]
RolledBackBy = Literal[
    "guard",
    "guard_alone",  # of one router, for itself, while there was no Redis
    "operator",
]
VersionState = Literal[
    "warming",  # its share, or more of it, waits until enough workers have it on their devices
    "serving",
    "rolled_back",  # a guard or an operator took its share away
    "idle",  # without a share
]

# Old, new: a score counts for that side of a rollout. The others: why for none.
Counted = Literal["old", "new", "again", "unknown", "over"]

# A mean of exactly 0 or 1 has no likelihood.
_EDGE = 1e-9
_HALVINGS = 60
_PRIOR = math.lgamma(0.5) * 2 - math.lgamma(1.0)


class HeldContent(NamedTuple):
    """An adapter as workers hold it: its content, and the base for which they judged and packed it.

    base: the base's name, as the operator declares it; "" = the only one.
    """

    base: str
    digest: str


class Content(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of a reference. ref: with its commit, if any. base: see HeldContent."""

    ref: AdapterRef
    manifest: AdapterManifest
    base: str = ""

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def held(self) -> HeldContent:
        return HeldContent(self.base, self.digest)


class Guards(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Conditions under which a version goes back by itself; None of a limit = it is not looked at.

    window_s: what is looked at. min_requests: of a version, before it is judged.
    max_error_increase: how far its share of failed requests may lie above the old version's.
    max_latency_ratio: its p95 of the time to the first token, and of the time a token, over the old
    version's. max_score_drop: how far its mean score may lie below the old version's. score_error:
    the greatest probability that a version no worse than that ever goes back for its scores.
    """

    window_s: Annotated[int, Meta(ge=10, le=MAX_WINDOW_S)] = 300
    min_requests: Annotated[int, Meta(ge=1, le=1_000_000)] = 50
    max_error_increase: Annotated[float, Meta(ge=0, le=1)] | None = 0.05
    max_latency_ratio: Annotated[float, Meta(ge=1, le=1000)] | None = 2.0
    max_score_drop: Annotated[float, Meta(ge=0, le=0.5)] | None = 0.0
    score_error: Annotated[float, Meta(ge=1e-6, le=0.5)] = 0.01


class Version(msgspec.Struct, frozen=True):
    """A version beside the one that serves. weight: wanted; live: in force.

    since: from when on it is judged, Unix seconds; 0 = its rollout's begin. why: why it was
    rolled back.
    """

    ref: AdapterRef
    content: Content
    weight: Weight
    live: Weight = 0
    since: int = 0
    rolled_back: bool = False
    why: str | None = None

    @property
    def digest(self) -> str:
        return self.content.digest

    @property
    def state(self) -> VersionState:
        if self.rolled_back:
            return "rolled_back"
        if self.weight > self.live:
            return "warming"
        return "serving" if self.live else "idle"


class Declared(msgspec.Struct, frozen=True):
    """Versions in the adapters file: reference and weight of each, as written there."""

    versions: tuple[tuple[AdapterRef, Weight], ...]
    guards: Guards | None


class Rollout(msgspec.Struct, frozen=True):
    """Versions of one adapter that share its requests. id: what callers' draws depend on, so the
    next rollout tries other callers first.

    weight, live: of the old version, which serves when all weights are 0. declared: what it was
    made from; None = an operator's command.
    """

    id: str
    versions: tuple[Version, ...]
    weight: Weight
    live: Weight
    guards: Guards | None = Guards()
    declared: Declared | None = None

    @property
    def is_warming(self) -> bool:
        return any(version.state == "warming" for version in self.versions)

    def version(self, digest: str) -> Version | None:
        return next((v for v in self.versions if v.digest == digest), None)

    def share(self, digest: str) -> float:
        """The version's share of all requests, once its wanted weight is in force."""
        total = self.weight + sum(version.weight for version in self.versions)
        found = self.version(digest)
        return 0.0 if found is None or not total else found.weight / total

    def choose(self, sticky: str) -> Version | None:
        """The version that answers a caller; None = the old one. sticky: what a caller keeps."""
        chosen: Version | None = None
        best = _score(self.id, "", sticky, self.live)
        for version in self.versions:
            score = _score(self.id, format_ref(version.ref), sticky, version.live)
            if score < best:
                chosen, best = version, score
        return chosen


def sticky_value(tenant: str, user: str | None, key_id: str, request_id: str) -> str:
    """The value that decides a request's version: its user, else its key, else its own id."""
    if user:
        return f"user\0{tenant}\0{user}"
    return f"key\0{key_id}" if key_id else f"request\0{request_id}"


def _score(rollout: str, version: str, sticky: str, weight: int) -> float:
    """A version's score for a caller; the least wins. Exponential draws at the weights' rates."""
    if not weight:
        return math.inf
    text = f"{rollout}\0{version}\0{sticky}".encode("utf-8", "surrogatepass")
    drawn = int.from_bytes(blake2b(text, digest_size=_HASH_BITS // 8).digest())
    return -math.log((drawn + 0.5) / 2**_HASH_BITS) / weight


class Scores(msgspec.Struct, frozen=True):
    """Scores of one version. total: their sum."""

    count: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


class ScorePair(msgspec.Struct, frozen=True):
    """Scores in [0, 1] of two versions from the same time.

    For a mean `mu`, the likelihood ratio of Bernoulli draws, mixed over their alternatives by
    Beta(1/2, 1/2), is a supermartingale for every such score. The product over both versions, at
    the least likely pair of means that would be no worse, is an e-value. By Ville's inequality it
    exceeds 1 / error at any time with at most the probability `error`.
    """

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
