"""Finds tenants that use more than their share of the fleet while others wait. Pure."""

import math
from collections import Counter, OrderedDict

# A tenant counts for so long after its latest sequence.
_ABOUT_S = 10.0
MAX_TENANTS = 4096
# How far back it is looked for whether somebody lives within its share.
_MEAN_S = 5.0
# Of one that does, random arrivals vary by about the root of its share: so many of those are no
# sign of wanting more.
_SPREAD = 2.0
# A mean that has faded to so little of a sequence is forgotten.
_FADED = 0.01


class TenantShares:
    """Sequences on workers, by tenant: now, and as means over some seconds.

    rows: what tenants share, as far as it is known: sequences that can be computed at once.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._running: Counter[str] = Counter()
        self._total = 0
        self._means: dict[str, float] = {}
        self._mean_rows = 0.0
        self._aged_at = 0.0
        # When each last asked, and its weight.
        self._about: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._weights = 0.0

    def asks(self, tenant: str, now: float, weight: float = 1.0) -> None:
        """Notes that a tenant has something to do. weight: of its share against other tenants'."""
        _, old = self._about.pop(tenant, (0.0, 0.0))
        self._about[tenant] = (now, weight)
        self._weights += weight - old
        oldest, (asked_at, lost) = next(iter(self._about.items()))
        if asked_at < now - _ABOUT_S or len(self._about) > MAX_TENANTS:
            del self._about[oldest]
            self._weights -= lost

    def begins(self, tenant: str) -> None:
        self._running[tenant] += 1
        self._total += 1

    def ends(self, tenant: str) -> None:
        self._total -= 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def age(self, now: float) -> None:
        """Brings the means up to now; called a few times a second."""
        kept = math.exp((self._aged_at - now) / _MEAN_S)
        self._aged_at = now
        means = {
            tenant: kept * self._means.get(tenant, 0.0) + (1.0 - kept) * self._running[tenant]
            for tenant in {**self._means, **self._running}
        }
        self._means = {tenant: mean for tenant, mean in means.items() if mean > _FADED}
        self._mean_rows = kept * self._mean_rows + (1.0 - kept) * self._shared
        self._weights = math.fsum(weight for _, weight in self._about.values())

    def is_over(self, tenant: str) -> bool:
        """Whether it wants more than its share, and there are others.

        Who has more than that now is over if it had so for a while, or has far more. Rows that are
        kept free are part of what is shared: else who lives within its share would seem to be over.
        """
        if len(self._about) < 2:
            return False
        _, weight = self._about.get(tenant, (0.0, 1.0))
        part = weight / max(self._weights, weight)
        share, own = part * self._shared, self._running[tenant]
        if own <= share:
            return False
        wants_more = self._means.get(tenant, 0.0) > part * self._mean_rows
        return wants_more or own > share + _SPREAD * math.sqrt(share)

    @property
    def _shared(self) -> int:
        """Rows to share. Rows of a worker that leaves are still taken for a while."""
        return max(self.rows, self._total)
