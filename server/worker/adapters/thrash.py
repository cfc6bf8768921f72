"""Detects adapters that return to the device soon after their eviction. Pure."""

from collections.abc import Collection

from loraplex.adapters.common.newest import NewestKept

MAX_REMEMBERED = 4096


class ThrashWatch:
    """Notice adapters that come back soon after their eviction. window_s: a reload within so many
    seconds is thrash. Times are one clock's.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._left = NewestKept[str, float](MAX_REMEMBERED)

    def changed(self, before: Collection[str], after: Collection[str], now: float) -> None:
        """Note the adapters that were on the device, and those that are after evictions."""
        for digest in set(before).difference(after):
            self._left[digest] = now

    def loads(self, digest: str, now: float) -> bool:
        """Note that an adapter has come to the device, and say whether that is thrash."""
        left = self._left.pop(digest, None)
        return left is not None and now - left <= self._window_s
