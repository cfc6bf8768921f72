"""Which tenants use more than their share of the fleet while others are about. Pure."""

from collections import Counter, OrderedDict

# A tenant counts for so long after its latest sequence.
_ABOUT_S = 10.0
MAX_TENANTS = 4096


class TenantShares:
    """Sequences on workers, by tenant."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._total = 0
        self._seen: OrderedDict[str, float] = OrderedDict()

    def asks(self, tenant: str, now: float) -> None:
        """It has something to do."""
        self._seen[tenant] = now
        self._seen.move_to_end(tenant)
        oldest, seen_at = next(iter(self._seen.items()))
        if seen_at < now - _ABOUT_S or len(self._seen) > MAX_TENANTS:
            del self._seen[oldest]

    def begins(self, tenant: str) -> None:
        self._running[tenant] += 1
        self._total += 1

    def ends(self, tenant: str) -> None:
        self._total -= 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def is_over(self, tenant: str) -> bool:
        """Whether it has more than an equal share, and there are others."""
        about = len(self._seen)
        return about > 1 and self._running[tenant] * about > self._total
