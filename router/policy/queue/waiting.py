"""The bounded queue in front of the workers, and the order in which sequences are tried. Pure.

Priority bands are strict. Within one, tenants take turns by what they were served (`fairness`), and
within a tenant its adapters do. Tenants that use more than their share of the fleet while others
wait stand back. It knows neither workers nor tasks; the fleet carries out what it decides. Prices
are relative work on a GPU, not money: the currency is the prompt token.
"""

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

import msgspec

from loraplex.adapters.common.newest import NewestKept
from loraplex.router.policy.placement.placement import PlacementRequest
from loraplex.router.policy.queue.fairness import Account, FairOrder
from loraplex.router.policy.queue.queue_limits import Promise, QueueCapacity, QueueFull, QueueLimits

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

# A generated token costs a share of a whole step, a prompt token rides in a chunk (VTC's prices).
PROMPT_PRICE = 1.0
OUTPUT_PRICE = 2.0
# Bytes that reach the device in about the time that a decode step gives one of its sequences.
LOAD_BYTES_A_TOKEN = 512 << 10

MAX_ESTIMATES = 4096
_FIRST_GUESS = 128.0  # output tokens of a flow without observations
_NEWEST = 0.1  # weight of the newest observation in a running mean

T = TypeVar("T")

# Flows tried in one go when the first in turn would rather wait for their own workers.
_TENANTS_TRIED, _ADAPTERS_TRIED = 8, 16
# Tenants without waiting sequences whose adapters' turns are remembered.
_IDLE_TENANTS = 64
# A flow's lead over its tenant's other flows decays by a factor of e in so many seconds of waiting.
# So no flow waits long for one expensive sequence of the past.
_AGEING_S = 5.0

_WINDOW_S = 10.0
_SHORTEST_S, _LONGEST_S = 1.0, 60.0


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


class Flow(NamedTuple):
    """A party that has turns: a tenant, for one adapter. adapter: digest, or "" for the base."""

    tenant: str
    adapter: str


def load_price(nbytes: int) -> float:
    """The price in tokens of bringing an adapter of `nbytes` to a device."""
    return nbytes / LOAD_BYTES_A_TOKEN


class OutputEstimate:
    """How long the outputs of a flow tend to be: a running mean, of at most so many flows."""

    def __init__(self) -> None:
        self._means = NewestKept[Flow | str, float](MAX_ESTIMATES)
        self._overall = _FIRST_GUESS

    def expected(self, flow: Flow, max_tokens: int) -> float:
        """Output tokens to reckon with; `max_tokens` is often no more than the model's limit."""
        mean = self._means.get(flow)
        if mean is None:
            mean = self._means.get(flow.tenant, self._overall)
        return min(mean, float(max_tokens))

    def observe(self, flow: Flow, num_tokens: int) -> None:
        self._overall += _NEWEST * (num_tokens - self._overall)
        for key in (flow, flow.tenant):
            old = self._means.get(key, float(num_tokens))
            self._means[key] = old + _NEWEST * (num_tokens - old)


class Bill:
    """The charge for one sequence: prompt and expected output at first, then what really comes.

    parties: the accounts that pay. Call `settle` when the sequence is over, however it ended.
    """

    __slots__ = ("_estimate", "_expected", "_flow", "_generated", "_parties", "_settled", "_shares")

    def __init__(
        self,
        parties: tuple[tuple[FairOrder, Account], ...],
        flow: Flow,
        expected: float,
        estimate: OutputEstimate,
        shares: TenantShares,
    ) -> None:
        shares.begins(flow.tenant)
        self._shares = shares
        self._parties = parties
        self._flow = flow
        self._expected = expected
        self._estimate = estimate
        self._generated = 0
        self._settled = False

    def generated(self, num_tokens: int) -> None:
        """Notes that so many tokens came. What exceeds the expected output is charged at once."""
        before = max(float(self._generated), self._expected)
        self._generated += num_tokens
        if self._generated > before:
            for _, account in self._parties:
                account.charge(OUTPUT_PRICE * (self._generated - before))

    def settle(self) -> None:
        """Ends the charge: tokens that never came cost nothing. Once is enough."""
        if self._settled:
            return
        self._settled = True
        self._shares.ends(self._flow.tenant)
        if self._generated:  # a request that was cancelled says nothing about output lengths
            self._estimate.observe(self._flow, self._generated)
        unused = self._expected - self._generated
        if unused > 0:
            for order, account in self._parties:
                order.refund(account, OUTPUT_PRICE * unused)


class DrainRate:
    """Sequences that leave the queue each second, weighted over about ten seconds."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._at = 0.0

    def departed(self, now: float) -> None:
        self._decay(now)
        self._weight += 1.0

    def per_second(self, now: float) -> float:
        self._decay(now)
        return self._weight / _WINDOW_S

    def retry_after_s(self, waiting: int, now: float) -> float:
        """Estimates the seconds until half of those who wait will have gone: 1 to 60. A caller that
        comes back then finds room.

        now: in seconds, as in `departed`. Before anybody has left the answer is 30, or 1 if nobody
        waits.
        """
        rate = self.per_second(now)
        if rate <= 0.0:
            return _LONGEST_S / 2 if waiting else _SHORTEST_S
        return min(max(waiting / 2 / rate, _SHORTEST_S), _LONGEST_S)

    def _decay(self, now: float) -> None:
        if now > self._at:
            self._weight *= math.exp((self._at - now) / _WINDOW_S)
            self._at = now


class Waiting(msgspec.Struct, Generic[T], frozen=True, eq=False):
    """One sequence that wants a worker.

    tenant, and the adapter of `request`: by whom turns are kept. max_tokens: of output.
    nbytes: memory that it holds while it waits. priority: lower goes first. deadline: on the clock
    of `now`, or None. weight: of its tenant's share, more than 0; the tenant's latest one holds.
    bill: of one that was taken before; it pays nothing more, and no limit holds it up.
    promise: of room for its request.
    """

    payload: T
    tenant: str
    request: PlacementRequest
    prompt_tokens: int
    max_tokens: int
    nbytes: int
    priority: int = 0
    deadline: float | None = None
    weight: float = 1.0
    bill: Bill | None = None
    promise: Promise | None = None

    @property
    def flow(self) -> Flow:
        return Flow(self.tenant, self.request.adapter)


class Candidate(NamedTuple, Generic[T]):
    """A sequence that may be taken now. held_s: since its turn came and it was not taken."""

    ticket: int
    entry: Waiting[T]
    held_s: float


class _Lane(Generic[T]):
    """The waiting sequences of one flow at one priority, oldest first."""

    __slots__ = ("account", "entries", "held_since")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.entries: OrderedDict[int, Waiting[T]] = OrderedDict()
        self.held_since: float | None = None


class _Tenant(Generic[T]):
    """One tenant at one priority. account: None while nothing of it waits."""

    __slots__ = ("account", "lanes", "order")

    def __init__(self) -> None:
        self.account: Account | None = None
        self.order = FairOrder()
        self.lanes: dict[str, _Lane[T]] = {}


class _Band(Generic[T]):
    """One priority: tenants in order, and each one's adapters in order."""

    def __init__(self) -> None:
        self.order = FairOrder()
        self.tenants: OrderedDict[str, _Tenant[T]] = OrderedDict()

    def lane(self, flow: Flow) -> _Lane[T]:
        return self.tenants[flow.tenant].lanes[flow.adapter]

    def add(self, ticket: int, entry: Waiting[T]) -> None:
        tenant = self.tenants.get(entry.tenant)
        if tenant is None:
            tenant = self.tenants[entry.tenant] = _Tenant()
        if tenant.account is None:
            tenant.account = self.order.join(entry.tenant)
        tenant.account.weight = entry.weight
        lane = tenant.lanes.get(entry.request.adapter)
        if lane is None:
            lane = tenant.lanes[entry.request.adapter] = _Lane(
                tenant.order.join(entry.request.adapter)
            )
        lane.entries[ticket] = entry

    def remove(self, ticket: int, entry: Waiting[T]) -> None:
        tenant = self.tenants[entry.tenant]
        lane = tenant.lanes[entry.request.adapter]
        if lane.held_since is not None and next(iter(lane.entries)) == ticket:
            lane.held_since = None
        del lane.entries[ticket]
        if lane.entries:
            return
        del tenant.lanes[entry.request.adapter]
        tenant.order.leave(lane.account)
        if not tenant.lanes and tenant.account is not None:
            self.order.leave(tenant.account)
            tenant.account = None
            self.tenants.move_to_end(entry.tenant)
            self._forget_idle()

    def heads(self) -> Iterator[tuple[int, Waiting[T], _Lane[T]]]:
        """The oldest of each lane, in the order of turns. May be changed after each."""
        for tenant_account in self.order.first(_TENANTS_TRIED):
            tenant = self.tenants[tenant_account.name]
            for account in tenant.order.first(_ADAPTERS_TRIED):
                lane = tenant.lanes[account.name]
                ticket, entry = next(iter(lane.entries.items()))
                yield ticket, entry, lane

    def charge(self, entry: Waiting[T], cost: float) -> tuple[tuple[FairOrder, Account], ...]:
        """Books a turn, while its entry still waits. Returns who pays for it."""
        tenant = self.tenants[entry.tenant]
        assert tenant.account is not None
        account = tenant.lanes[entry.request.adapter].account
        self.order.served(tenant.account, cost)
        tenant.order.served(account, cost)
        return (self.order, tenant.account), (tenant.order, account)

    def _forget_idle(self) -> None:
        while len(self.tenants) - len(self.order) > _IDLE_TENANTS:
            idle = next(name for name, tenant in self.tenants.items() if not tenant.lanes)
            del self.tenants[idle]


class WaitingQueue(Generic[T]):
    """Keeps sequences that wait for a worker. Bounded in count and bytes; fair between tenants and
    their adapters; strict in priority.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self.capacity = QueueCapacity(limits)
        self.drain = DrainRate()
        self.shares = TenantShares()
        self._estimate = OutputEstimate()
        self._bands: dict[int, _Band[T]] = {}
        self._entries: dict[int, Waiting[T]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._next_ticket = 0
        self._aged_at = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Waiting[T]]:
        return iter(self._entries.values())

    def check_room(self, tenant: str, count: int, nbytes: int, now: float) -> None:
        """Checks that `count` more sequences of `nbytes` in all may wait. Raises QueueFull."""
        refusal = self.capacity.refusal(tenant, count, nbytes)
        if refusal is not None:
            message, in_the_way = refusal
            raise QueueFull(message, self.drain.retry_after_s(in_the_way, now))

    def promise(self, tenant: str, count: int, nbytes: int) -> Promise:
        """Keeps room for the sequences of one request, which are not checked when they come with
        it. To be released when the request ends."""
        self.capacity.book(tenant, count, nbytes)
        return Promise(count, nbytes, tenant)

    def release(self, promise: Promise) -> None:
        """Give the rest of a promise, if there is any, back to others."""
        self._redeem(promise, promise.count, promise.nbytes)

    def _redeem(self, promise: Promise, count: int, nbytes: int) -> None:
        promise.add(-count, -nbytes)
        self.capacity.book(promise.tenant, -count, -nbytes)

    def push(self, entry: Waiting[T], now: float) -> int:
        """Adds at the end of its flow. Returns a ticket. Raises QueueFull."""
        if entry.bill is None:
            if entry.promise is not None and entry.promise.count:
                self._redeem(entry.promise, 1, entry.nbytes)
            else:
                self.check_room(entry.tenant, 1, entry.nbytes, now)
        ticket = self._next_ticket
        self._next_ticket += 1
        self._entries[ticket] = entry
        self.shares.asks(entry.tenant, now, entry.weight)
        self.capacity.add(entry.tenant, entry.nbytes)
        self._bands.setdefault(entry.priority, _Band()).add(ticket, entry)
        if entry.deadline is not None:
            heapq.heappush(self._deadlines, (entry.deadline, ticket))
            if len(self._deadlines) > 64 + 2 * len(self._entries):
                self._deadlines = [late for late in self._deadlines if late[1] in self._entries]
                heapq.heapify(self._deadlines)
        return ticket

    def candidates(self, now: float) -> Iterator[Candidate[T]]:
        """Entries whose turn it is, the first in turn first. Stop iterating after a change."""
        for priority in sorted(self._bands):
            for ticket, entry, lane in self._bands[priority].heads():
                held_s = 0.0 if lane.held_since is None else now - lane.held_since
                yield Candidate(ticket, entry, held_s)

    def hold(self, ticket: int, now: float) -> None:
        """Notes that a sequence whose turn has come would rather wait for a worker of its own."""
        entry = self._entries[ticket]
        lane = self._bands[entry.priority].lane(entry.flow)
        if lane.held_since is None:
            lane.held_since = now

    def take(self, ticket: int, now: float, load_price: float = 0.0) -> Bill:
        """Removes a sequence that goes to a worker. load_price: of what must be loaded for it
        there.

        Returns its bill, the same each time that it is taken; it must be settled, in any case.
        """
        entry = self._entries[ticket]
        bill = self._charge(entry, load_price, now) if entry.bill is None else entry.bill
        self._remove(ticket)
        return bill

    def _charge(self, entry: Waiting[T], load_price: float, now: float) -> Bill:
        expected = self._estimate.expected(entry.flow, entry.max_tokens)
        cost = PROMPT_PRICE * entry.prompt_tokens + OUTPUT_PRICE * expected + load_price
        parties = self._bands[entry.priority].charge(entry, cost)
        self.drain.departed(now)
        return Bill(parties, entry.flow, expected, self._estimate, self.shares)

    def cancel(self, ticket: int) -> bool:
        """Takes this one out; False when it is no longer waiting."""
        if ticket not in self._entries:
            return False
        self._remove(ticket)
        return True

    def expire(self, now: float) -> list[Waiting[T]]:
        """Takes out all whose deadline has come, in the order of their deadlines."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, ticket = heapq.heappop(self._deadlines)
            entry = self._entries.get(ticket)
            if entry is not None:
                self._remove(ticket)
                late.append(entry)
        return late

    def age(self, now: float) -> None:
        """Forgives flows what they are ahead as they wait; called a few times a second."""
        share = 1.0 - math.exp((self._aged_at - now) / _AGEING_S)
        self._aged_at = now
        self.shares.age(now)
        for band in self._bands.values():
            for name, tenant in band.tenants.items():
                tenant.order.age(share)
                if tenant.account is not None:  # who waits still asks
                    self.shares.asks(name, now, tenant.account.weight)

    def withdraw_new(self) -> list[Waiting[T]]:
        """Takes out all that were never taken before."""
        new = [ticket for ticket, entry in self._entries.items() if entry.bill is None]
        entries = [self._entries[ticket] for ticket in new]
        for ticket in new:
            self._remove(ticket)
        return entries

    def _remove(self, ticket: int) -> None:
        entry = self._entries.pop(ticket)
        self.capacity.remove(entry.tenant, entry.nbytes)
        band = self._bands[entry.priority]
        band.remove(ticket, entry)
        # The last band keeps its counters: who had a turn still counts when the queue was dry.
        if not len(band.order) and len(self._bands) > 1:
            del self._bands[entry.priority]
