"""The adapters that have own metrics: those with the most tokens; the rest share one. Pure.

Only registered names are counted by name, so no caller can make a series. Each series only rises
while it is there, and what the rest share rises by exactly what no series of its own got.
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Literal, get_args

from loraplex.router.names.served import OwnedName

Count = Literal["requests", "errors", "prompt_tokens", "generated_tokens", "device_seconds", "cost"]
COUNTS: tuple[Count, ...] = get_args(Count)

_REQUESTS, _ERRORS, _PROMPT_TOKENS, _GENERATED_TOKENS, _, _ = range(len(COUNTS))
# No registered name begins with `_`.
OTHER = OwnedName("_other")
BASE = OwnedName("_base")

RANK_INTERVAL_S = 10.0
HALF_LIFE_S = 300.0
# How much busier than one that is shown another must be to take its place.
MARGIN = 1.5
# Names whose rank is remembered, as a multiple of those shown.
_REMEMBERED = 4


# One of each of COUNTS, in their order.
Amounts = list[float]


class TopAdapters:
    """Counts by adapter. size: names with series of their own, besides the base and the rest."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pending: dict[OwnedName, Amounts] = {}
        self._shown: dict[OwnedName, Amounts] = {}
        self._fixed = {BASE: _none(), OTHER: _none()}
        self._score: dict[OwnedName, float] = {}
        self._ranked_at: float | None = None

    def count(self, name: OwnedName, what: int, amount: float = 1) -> None:
        """Adds to a count. name: a registered adapter, BASE or OTHER. what: index into COUNTS."""
        amounts = self._pending.get(name)
        if amounts is None:
            amounts = self._pending[name] = _none()
        amounts[what] += amount

    def settle(self, now: float, is_registered: Callable[[OwnedName], bool]) -> None:
        """Choose anew who has a series, now and then; then credit to them what was counted. In this
        order no series takes along what nobody has read of it."""
        if self._ranked_at is None:
            self._ranked_at = now
        elif now - self._ranked_at >= RANK_INTERVAL_S:
            self._rank(0.5 ** ((now - self._ranked_at) / HALF_LIFE_S), is_registered)
            self._ranked_at = now
        for name, amounts in self._pending.items():
            _add(self._series(name, amounts, is_registered), amounts)
        self._pending.clear()

    def rows(self, what: Count) -> Iterator[tuple[tuple[str, ...], float]]:
        """The series of a count, as of the last `settle`."""
        index = COUNTS.index(what)
        for name, amounts in (*self._fixed.items(), *self._shown.items()):
            yield (str(name),), amounts[index]

    @property
    def shown(self) -> frozenset[OwnedName]:
        return frozenset(self._shown)

    def _series(
        self, name: OwnedName, amounts: Amounts, is_registered: Callable[[OwnedName], bool]
    ) -> Amounts:
        """The series to which these amounts of `name` are credited."""
        fixed = self._fixed.get(name)
        if fixed is not None:
            return fixed
        # Ranked by tokens; what asks for little still counts.
        weight = amounts[_REQUESTS] + amounts[_PROMPT_TOKENS] + amounts[_GENERATED_TOKENS]
        self._score[name] = self._score.get(name, 0.0) + weight
        shown = self._shown.get(name)
        if shown is None and len(self._shown) < self._size and is_registered(name):
            shown = self._shown[name] = _none()
        return self._fixed[OTHER] if shown is None else shown

    def _rank(self, decay: float, is_registered: Callable[[OwnedName], bool]) -> None:
        scores = {name: score * decay for name, score in self._score.items() if is_registered(name)}
        kept = heapq.nlargest(_REMEMBERED * self._size, scores, key=scores.__getitem__)
        self._score = {name: scores[name] for name in {*kept, *self._shown} & scores.keys()}

        def rank(name: OwnedName) -> float:
            return scores[name] * (MARGIN if name in self._shown else 1.0)

        top = heapq.nlargest(self._size, self._score, key=rank)
        self._shown = {name: self._shown.get(name, _none()) for name in sorted(top)}


def _none() -> Amounts:
    return [0.0] * len(COUNTS)


def _add(total: Amounts, amounts: Amounts) -> None:
    for what, amount in enumerate(amounts):
        total[what] += amount
