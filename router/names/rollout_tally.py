"""Counts the outcomes of requests by version of a rollout, in this router and over all routers.

Each router adds what it saw to books of the store, one for a span of time; they end by themselves.
Of its own it keeps books in memory, too, for as long as the store is away.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Literal

from loraplex.router.names.registration import Registration
from loraplex.router.policy.guards import GuardSample, Measured, breach, bucket_of
from loraplex.router.policy.rollout import MAX_WINDOW_S, NO_SCORES, Rollout, ScorePair, Scores
from loraplex.router.shared.store import Store, StoreDown

SLICE_S = 10
# A book is read until a while after its span: routers are late by what a flush takes.
_OPEN_SLICES = 2
_TTL_S = 7200.0
_MAX_CLOSED = 1 << 12
# Books of this router's own, and rollouts of which the store has not heard.
_MAX_OWN = 1 << 12
_MAX_UNREPORTED = 1 << 12
_OTHER = "other"
# Scores count for as long as a version is judged.
_SCORES_TTL_S = 30 * 86400.0
_SCORE_UNITS = 10_000

# Counter of a book -> how much.
_Counts = Counter[str]
# `RolloutTally.read` or `read_own`.
Read = Callable[[str, str, int, int], Awaitable[Measured]]
# `RolloutTally.scores` or `no_scores`.
ReadScores = Callable[[Rollout], Awaitable[Mapping[str, ScorePair]]]


class Outcomes:
    """Outcomes that this router saw since they were last taken."""

    def __init__(self) -> None:
        self._seen: dict[str, _Counts] = {}
        self._scored: dict[str, _Counts] = {}

    def add(self, rollout: str, digest: str, outcome: GuardSample) -> None:
        names = ["requests"]
        if outcome.failed:
            names.append("failed")
        if outcome.first_token_s is not None:
            names.append(f"first:{bucket_of(outcome.first_token_s)}")
        if outcome.token_s is not None:
            names.append(f"token:{bucket_of(outcome.token_s)}")
        self._seen.setdefault(rollout, Counter()).update(f"{digest}:{name}" for name in names)

    def add_score(
        self, registration: Registration, digest: str, at: float, score: float
    ) -> Literal["old", "new"] | None:
        """Counts a score in [0, 1] of a request with this content. at: when it began, Unix seconds.

        A score of the old version counts beside each version that was judged then. Returns whose
        it is; None = it counts for nothing.
        """
        rollout = registration.rollout
        if rollout is None:
            return None
        whose: Literal["old", "new"] = "old" if digest == registration.digest else "new"
        counts: _Counts = Counter()
        for version in rollout.versions:
            is_judged = version.live and at >= version.since
            if is_judged and (whose == "old" or digest == version.digest):
                book = f"{version.digest}:{version.since}:{whose}"
                counts.update({f"{book}:count": 1, f"{book}:total": round(score * _SCORE_UNITS)})
        if not counts:
            return None
        self._scored.setdefault(rollout.id, Counter()).update(counts)
        return whose

    def take(self) -> dict[str, _Counts]:
        """Returns the outcomes by rollout, and begins anew."""
        taken, self._seen = self._seen, {}
        return taken

    def take_scores(self) -> dict[str, _Counts]:
        """Returns the scores by rollout, and begins anew."""
        taken, self._scored = self._scored, {}
        return taken


class RolloutTally:
    """Counts the outcomes of rollouts' versions in the store. clock: Unix seconds."""

    def __init__(self, store: Store, outcomes: Outcomes, clock: Callable[[], float]) -> None:
        self._store = store
        self._outcomes = outcomes
        self._clock = clock
        self._closed: dict[tuple[str, int], Mapping[str, int]] = {}
        self._own: dict[tuple[str, int], _Counts] = {}
        self._unreported: dict[str, _Counts] = {}
        self._unreported_scores: dict[str, _Counts] = {}

    async def flush(self) -> None:
        """Writes outcomes to the store. Raises StoreDown; then the rest waits for the next time."""
        span = int(self._clock()) // SLICE_S
        self._take(span)
        await self._write(self._unreported, lambda rollout: _book(rollout, span), _TTL_S)
        await self._write(self._unreported_scores, _score_book, _SCORES_TTL_S)

    async def _write(
        self, unreported: dict[str, _Counts], book_of: Callable[[str], str], ttl_s: float
    ) -> None:
        while unreported:
            rollout = next(iter(unreported))
            counts = unreported.pop(rollout)
            try:
                groups = dict.fromkeys(counts, _OTHER)
                await self._store.count(book_of(rollout), counts, groups, ttl_s)
            except StoreDown:
                unreported.setdefault(rollout, Counter()).update(counts)
                raise

    async def scores(self, rollout: Rollout) -> Mapping[str, ScorePair]:
        """Scores of the versions with a share, by digest, over all routers and all their time.
        Raises StoreDown."""
        (book,) = await self._store.counts([_score_book(rollout.id)])
        return {v.digest: _pair(book, v.digest, v.since) for v in rollout.versions if v.live}

    async def read(self, rollout: str, digest: str, window_s: int, since: int) -> Measured:
        """Measurements of the last `window_s` seconds, only of whole spans after `since`. since:
        Unix seconds. Raises StoreDown."""
        measured = Measured(first_token={}, token={})
        spans = self._spans(window_s, since)
        for span in spans:
            _add(measured, digest, await self._counts(rollout, span, spans.stop - 1))
        return measured

    async def read_own(self, rollout: str, digest: str, window_s: int, since: int) -> Measured:
        """Measures as `read` does, but what this router saw alone, up to the last `flush`."""
        measured = Measured(first_token={}, token={})
        for span in self._spans(window_s, since):
            _add(measured, digest, self._own.get((rollout, span), {}))
        return measured

    def _spans(self, window_s: int, since: int) -> range:
        now = int(self._clock())
        first = max((now - window_s) // SLICE_S, -(-since // SLICE_S))
        return range(first, now // SLICE_S + 1)

    def _take(self, span: int) -> None:
        for rollout, counts in self._outcomes.take().items():
            self._own.setdefault((rollout, span), Counter()).update(counts)
            _keep(self._unreported, rollout, counts)
        for rollout, counts in self._outcomes.take_scores().items():
            _keep(self._unreported_scores, rollout, counts)
        while self._own:
            oldest = next(iter(self._own))
            if len(self._own) <= _MAX_OWN and oldest[1] >= span - MAX_WINDOW_S // SLICE_S:
                break
            del self._own[oldest]

    async def _counts(self, rollout: str, span: int, current: int) -> Mapping[str, int]:
        known = self._closed.get((rollout, span))
        if known is not None:
            return known
        (counts,) = await self._store.counts([_book(rollout, span)])
        if span <= current - _OPEN_SLICES:
            self._closed[rollout, span] = counts
            if len(self._closed) > _MAX_CLOSED:
                del self._closed[next(iter(self._closed))]
        return counts


async def no_scores(rollout: Rollout) -> Mapping[str, ScorePair]:
    """Scores where the store is away: a router alone has not those of all."""
    return {version.digest: NO_SCORES for version in rollout.versions if version.live}


async def breaches(
    registration: Registration, read: Read, scores: ReadScores
) -> AsyncIterator[tuple[str, str]]:
    """Versions that must go back by their guards: digest, and why. Raises as `read`, `scores`."""
    rollout, old_digest = registration.rollout, registration.digest
    if rollout is None or rollout.guards is None or old_digest is None:
        return
    window_s = rollout.guards.window_s
    pairs = await scores(rollout)
    for version in rollout.versions:
        if not version.live:
            continue
        new = await read(rollout.id, version.digest, window_s, version.since)
        old = await read(rollout.id, old_digest, window_s, version.since)
        why = breach(rollout.guards, old, new, pairs[version.digest])
        if why is not None:
            yield version.digest, why


def _book(rollout: str, span: int) -> str:
    return f"rollout:{rollout}:{span}"


def _keep(unreported: dict[str, _Counts], rollout: str, counts: _Counts) -> None:
    """Adds counts to those that are to be written, unless there are too many."""
    if rollout in unreported or len(unreported) < _MAX_UNREPORTED:
        unreported.setdefault(rollout, Counter()).update(counts)


def _score_book(rollout: str) -> str:
    return f"scores:{rollout}"


def _pair(book: Mapping[str, int], digest: str, since: int) -> ScorePair:
    def scores(whose: str) -> Scores:
        name = f"{digest}:{since}:{whose}"
        return Scores(book.get(f"{name}:count", 0), book.get(f"{name}:total", 0) / _SCORE_UNITS)

    return ScorePair(scores("old"), scores("new"))


def _add(measured: Measured, digest: str, counts: Mapping[str, int]) -> None:
    for name, count in counts.items():
        whose, _, what = name.partition(":")
        if whose != digest:
            continue
        kind, _, bucket = what.partition(":")
        if kind == "requests":
            measured.requests += count
        elif kind == "failed":
            measured.failed += count
        else:
            histogram = measured.first_token if kind == "first" else measured.token
            histogram[int(bucket)] = histogram.get(int(bucket), 0) + count
