"""Chooses adapters to bring to host memory before the engine asks for them. Pure; times are one
clock's."""

from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple

# Whoever it was brought for is likely to have left without it then.
KEPT_S = 30.0


class _Brought(NamedTuple):
    extents: int
    at: float


class Ahead:
    """Adapters that nobody has taken yet. They are kept for those they were brought for, and none
    is brought at another's expense once they fill half of `extents`."""

    def __init__(self, extents: int) -> None:
        self._most = extents // 2
        self._used = 0
        self._brought: OrderedDict[str, _Brought] = OrderedDict()  # in order

    def add(self, digest: str, extents: int, now: float) -> None:
        self.discard(digest)
        self._used += extents
        self._brought[digest] = _Brought(extents, now)

    def discard(self, digest: str) -> None:
        """Forget an adapter that was taken, or is here no longer."""
        brought = self._brought.pop(digest, None)
        if brought is not None:
            self._used -= brought.extents

    def kept(self, now: float) -> Collection[str]:
        while self._brought:
            digest, oldest = next(iter(self._brought.items()))
            if now - oldest.at <= KEPT_S:
                break
            self.discard(digest)
        return self._brought.keys()

    def has_room(self, extents: int, now: float) -> bool:
        self.kept(now)
        return self._used + extents <= self._most
