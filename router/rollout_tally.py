"""What requests of versions in a rollout were like, of all routers together.

Each router adds what it saw to books of the store, one for a span of time; they end by themselves.
"""

from collections import Counter
from collections.abc import Callable

from router.policy.guards import Measured, Outcome, bucket_of
from router.shared.store import Store, StoreDown

SLICE_S = 10
# A book is read until a while after its span: routers are late by what a flush takes.
_OPEN_SLICES = 2
_TTL_S = 7200.0
_MAX_PENDING = 1 << 14
_MAX_CLOSED = 1 << 12
_OTHER = "other"

# Counter of a book -> how much.
_Counts = dict[str, int]


class Outcomes:
    """What this router saw and has not told yet."""

    def __init__(self) -> None:
        self._pending: Counter[tuple[str, str]] = Counter()

    def add(self, rollout: str, digest: str, outcome: Outcome) -> None:
        names = ["requests"]
        if outcome.failed:
            names.append("failed")
        if outcome.first_token_s is not None:
            names.append(f"first:{bucket_of(outcome.first_token_s)}")
        if outcome.token_s is not None:
            names.append(f"token:{bucket_of(outcome.token_s)}")
        if len(self._pending) < _MAX_PENDING:
            self._pending.update((rollout, f"{digest}:{name}") for name in names)

    def take(self) -> dict[str, _Counts]:
        """By rollout."""
        taken: dict[str, _Counts] = {}
        for (rollout, name), amount in self._pending.items():
            taken.setdefault(rollout, {})[name] = amount
        self._pending.clear()
        return taken

    def give_back(self, taken: dict[str, _Counts]) -> None:
        for rollout, counts in taken.items():
            self._pending.update({(rollout, name): count for name, count in counts.items()})


class RolloutTally:
    """clock: Unix seconds."""

    def __init__(self, store: Store, outcomes: Outcomes, clock: Callable[[], float]) -> None:
        self._store = store
        self._outcomes = outcomes
        self._clock = clock
        self._closed: dict[tuple[str, int], _Counts] = {}

    async def flush(self) -> None:
        """Raises StoreDown; what was not written is kept for the next time."""
        taken = self._outcomes.take()
        span = int(self._clock()) // SLICE_S
        while taken:
            rollout, counts = next(iter(taken.items()))
            try:
                groups = dict.fromkeys(counts, _OTHER)
                await self._store.count(_book(rollout, span), counts, groups, _TTL_S)
            except StoreDown:
                self._outcomes.give_back(taken)
                raise
            del taken[rollout]

    async def read(self, rollout: str, digest: str, window_s: int, since: int) -> Measured:
        """Of the last `window_s` seconds, and only of whole spans after `since`. Raises StoreDown.

        since: Unix seconds.
        """
        now = int(self._clock())
        first = max((now - window_s) // SLICE_S, -(-since // SLICE_S))
        measured = Measured(first_token={}, token={})
        for span in range(first, now // SLICE_S + 1):
            _add(measured, digest, await self._counts(rollout, span, now // SLICE_S))
        return measured

    async def _counts(self, rollout: str, span: int, current: int) -> _Counts:
        known = self._closed.get((rollout, span))
        if known is not None:
            return known
        counts = await self._store.counts(_book(rollout, span))
        if span <= current - _OPEN_SLICES:
            self._closed[rollout, span] = counts
            if len(self._closed) > _MAX_CLOSED:
                del self._closed[next(iter(self._closed))]
        return counts


def _book(rollout: str, span: int) -> str:
    return f"rollout:{rollout}:{span}"


def _add(measured: Measured, digest: str, counts: _Counts) -> None:
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
