"""How much may wait, in all and for one tenant. Pure."""

from collections import defaultdict
from dataclasses import dataclass

# A tenant may hold so many times the room that is left (Choudhury and Hahne, Dynamic Queue Length
# Thresholds, 1998): alone it gets eight ninths, and whoever comes next always finds some.
_SHARE_OF_FREE = 8


class QueueFull(Exception):
    """The queue is at a limit, in sequences or in bytes. retry_after_s: a hint for the caller."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """count: sequences. nbytes: of their prompts. tenant_*: of one tenant's, None = no limit."""

    count: int
    nbytes: int
    tenant_count: int | None = None
    tenant_nbytes: int | None = None

    @property
    def most_at_once(self) -> int:
        """Sequences that could ever wait for one request."""
        return min(self.count, self.tenant_count or self.count)


@dataclass(slots=True)
class Held:
    """What waits now."""

    count: int = 0
    nbytes: int = 0

    def add(self, count: int, nbytes: int) -> None:
        self.count += count
        self.nbytes += nbytes


class QueueRoom:
    """What waits, in all and of each tenant, against the limits."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.held = Held()
        self._tenants: defaultdict[str, Held] = defaultdict(Held)

    def add(self, tenant: str, nbytes: int) -> None:
        self.held.add(1, nbytes)
        self._tenants[tenant].add(1, nbytes)

    def remove(self, tenant: str, nbytes: int) -> None:
        self.held.add(-1, -nbytes)
        own = self._tenants[tenant]
        own.add(-1, -nbytes)
        if not own.count:
            del self._tenants[tenant]

    def of(self, tenant: str) -> Held:
        return self._tenants.get(tenant) or Held()

    def refusal(self, tenant: str, count: int, nbytes: int) -> tuple[str, int] | None:
        """Why `count` more sequences of `nbytes` in all do not fit, and how many are in the way."""
        limits, held, own = self.limits, self.held, self.of(tenant)
        if held.count + count > limits.count:
            return f"the queue is full: {held.count} sequences are waiting", held.count
        if held.nbytes + nbytes > limits.nbytes:
            return f"the queue is full: {held.nbytes} bytes of prompts are waiting", held.count
        if _over(own.count, count, limits.count - held.count, limits.tenant_count):
            return f"your share of the queue is full: {own.count} sequences are waiting", own.count
        if _over(own.nbytes, nbytes, limits.nbytes - held.nbytes, limits.tenant_nbytes):
            return f"your share of the queue is full: {own.nbytes} bytes of prompts", own.count
        return None


def _over(own: int, more: int, free: int, limit: int | None) -> bool:
    return own > _SHARE_OF_FREE * free or (limit is not None and own + more > limit)
