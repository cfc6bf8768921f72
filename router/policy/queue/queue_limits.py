"""Limits of the queue, in all and for one tenant. Pure."""

from collections import defaultdict
from dataclasses import dataclass

# A tenant may hold so many times the free capacity (Choudhury and Hahne, Dynamic Queue Length
# Thresholds, 1998). Alone it gets eight ninths, and the next tenant finds some. A request of who
# has nothing waiting may take all that is left: no wait would make its share larger.
_SHARE_OF_FREE = 8


class QueueFull(Exception):
    """The queue is at a limit, in sequences or in bytes. retry_after_s: a hint for the caller."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The most that waits. count: sequences. nbytes: of prompts. tenant_*: None = no limit."""

    count: int
    nbytes: int
    tenant_count: int | None = None
    tenant_nbytes: int | None = None

    @property
    def most_at_once(self) -> int:
        """Sequences that could ever wait for one request; an idle server takes so many."""
        return min(self.count, self.tenant_count or self.count)

    @property
    def most_bytes_at_once(self) -> int:
        """The most bytes of prompts that one request may bring."""
        return min(self.nbytes, self.tenant_nbytes or self.nbytes)


@dataclass(slots=True)
class QueueSize:
    """The size of what waits now."""

    count: int
    nbytes: int

    def add(self, count: int, nbytes: int) -> None:
        self.count += count
        self.nbytes += nbytes


@dataclass(slots=True)
class Promise(QueueSize):
    """Room for sequences of one request that have yet to come."""

    tenant: str


class QueueCapacity:
    """Sequences that wait and places that were booked, in all and by tenant, against the limits.

    held: the size of what waits.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.held = QueueSize(0, 0)
        self._taken = QueueSize(0, 0)
        self._tenants: defaultdict[str, QueueSize] = defaultdict(lambda: QueueSize(0, 0))

    def add(self, tenant: str, nbytes: int) -> None:
        self.held.add(1, nbytes)
        self.book(tenant, 1, nbytes)

    def remove(self, tenant: str, nbytes: int) -> None:
        self.held.add(-1, -nbytes)
        self.book(tenant, -1, -nbytes)

    def book(self, tenant: str, count: int, nbytes: int) -> None:
        """Books room where nothing waits yet; less than 0 gives it back."""
        self._taken.add(count, nbytes)
        own = self._tenants[tenant]
        own.add(count, nbytes)
        if not own.count and not own.nbytes:
            del self._tenants[tenant]

    def of(self, tenant: str) -> QueueSize:
        return self._tenants.get(tenant) or QueueSize(0, 0)

    def refusal(self, tenant: str, count: int, nbytes: int) -> tuple[str, int] | None:
        """Why `count` more sequences of `nbytes` in all do not fit, and how many are in the way."""
        limits, held, own = self.limits, self._taken, self.of(tenant)
        if held.count + count > limits.count:
            return f"the queue is full: {held.count} sequences are waiting", held.count
        if held.nbytes + nbytes > limits.nbytes:
            return f"the queue is full: {held.nbytes} bytes of prompts are waiting", held.count
        if _over(own.count, count, 1, limits.count - held.count, limits.tenant_count):
            return f"your share of the queue is full: {own.count} sequences are waiting", own.count
        one = nbytes // count
        if _over(own.nbytes, nbytes, one, limits.nbytes - held.nbytes, limits.tenant_nbytes):
            return f"your share of the queue is full: {own.nbytes} bytes of prompts", own.count
        return None


def _over(own: int, more: int, one: int, free: int, limit: int | None) -> bool:
    """Whether `more` sequences are too many for a party that has `own` waiting. The last of them
    counts, with the share that it would find, `one` by one."""
    before = more - one
    over_share = own > 0 and own + before > _SHARE_OF_FREE * (free - before)
    return over_share or (limit is not None and own + more > limit)
