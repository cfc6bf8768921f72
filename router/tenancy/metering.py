"""Charges each request to quotas before its start, and records its usage at its end.

Quotas are asked of the shared store. While that does not answer, the operator's mode holds. `open`
counts nothing, `closed` admits nobody who has quotas, `local-share` counts here, against this
router's share of the limits.
"""

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from heapq import nlargest
from itertools import islice
from operator import attrgetter
from typing import Literal, NoReturn, get_args

import msgspec
from msgspec import UNSET

from loraplex.adapters.common.newest import NewestKept
from loraplex.router.call import RequestError
from loraplex.router.policy.prices import FREE, Price, PriceTable, Receipt, Spent
from loraplex.router.policy.quota import Ask, Reason, Standing, Subject, Verdict, share
from loraplex.router.shared.memory_store import MemoryStore
from loraplex.router.shared.records import readable
from loraplex.router.shared.replica import every
from loraplex.router.shared.steady_clock import SteadyClock
from loraplex.router.shared.store import Settlement, Store, StoreDown
from loraplex.router.tenancy.keys import Caller, counts_tokens
from loraplex.router.tenancy.rate_headers import rate_headers, refusal, refusal_for_ever
from loraplex.router.tenancy.usage import (
    MAX_DAYS,
    OTHER,
    Outcome,
    Pending,
    UsageRecord,
    UsageRow,
    book_name,
    day_and_tenant,
    group_of,
    rows_of,
    tenants_book,
)
from loraplex.server.protocol import DeviceCost

OutageMode = Literal["open", "closed", "local-share"]
Mode = Literal["shared", "open", "closed", "local-share"]
MODES: tuple[Mode, ...] = ("shared", "open", "closed", "local-share")

LEASE_MS = 60_000  # after which a router that died holds no places any more
RENEW_S = 20.0
ROUTER_LEASE_S = 15.0
_ENLIST_S = 5.0
ROUTERS = "routers"  # those that are there, by their ids
MAX_BACKLOG = 1 << 14
MAX_REMEMBERED = 4096

FLUSH_S = 1.0
KEPT_RECORDS = 10_000  # of each tenant
_MAX_UNWRITTEN = 10_000
_LISTED_S = 600.0
_FEW_TENANTS = 256
_BOOKS_AT_ONCE = 1000
_RECORDS_AT_ONCE = 10_000
_BOOK_TTL_S = (MAX_DAYS + 1) * 86400.0


class Admitted(msgspec.Struct, frozen=True):
    """A request that holds its share until it is settled. store: where it is counted."""

    ask: Ask
    verdict: Verdict
    store: Store


class Admission:
    """Admits requests within the limits of their key and tenant. is_up: whether the shared store
    answers, as far as is known. clock: Unix seconds that do not jump.

    refusals: how often each limit kept a request out.
    """

    def __init__(
        self,
        store: Store,
        is_up: Callable[[], bool],
        outage: OutageMode,
        router_id: str,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.routers = 1
        self.refusals: dict[Reason, int] = dict.fromkeys(get_args(Reason), 0)
        self._store = store
        self._is_up = is_up
        self._outage: OutageMode = outage
        self._router_id = router_id
        self._local = MemoryStore(clock or SteadyClock())
        self._live: dict[str, Admitted] = {}
        # Requests a minute come back with time alone: until then the answer stays the same.
        self._used_up = NewestKept[tuple[Subject, ...], tuple[float, Verdict]](MAX_REMEMBERED)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def mode(self) -> Mode:
        return "shared" if self._is_up() else self._outage

    def known_refusal(self, subjects: tuple[Subject, ...]) -> Verdict | None:
        """A refusal that `admit` would still give, as far as is known without asking."""
        until, verdict = self._used_up.get(subjects, (0.0, None))
        left_ms = round(1000 * (until - time.monotonic()))
        if verdict is None or left_ms <= 0:
            return None
        self.refusals["requests"] += 1
        return msgspec.structs.replace(verdict, retry_ms=left_ms)

    async def admit(self, ask: Ask) -> Admitted | Verdict | None:
        """Asks the store to admit a request. A Verdict with a reason when it is refused; None when
        nothing is counted now. What holds its place already takes tokens alone.

        Raises RequestError (unavailable) when the mode is `closed`.
        """
        ask = msgspec.structs.replace(ask, lease_ms=LEASE_MS)
        store, asked = self._store, ask
        try:
            verdict = await store.admit(ask)
        except asyncio.CancelledError:
            if ask.lease not in self._live:  # it may have taken its place
                nothing = tuple(Standing(0, 0, 0, 0, 0) for _ in ask.subjects)
                self.settle(Admitted(ask, Verdict(0, nothing), store), ask.tokens)
            raise
        except StoreDown:
            if self._outage == "open":
                return None
            if self._outage == "closed":
                raise RequestError(
                    "unavailable", "quotas cannot be checked now; try again soon"
                ) from None
            store, asked = self._local, _share_of(ask, self.routers)
            verdict = await store.admit(asked)
        if verdict.reason is not None:
            self.refusals[verdict.reason] += 1
            if verdict.reason == "requests":
                self._remember(ask.subjects, verdict)
            return verdict
        admitted = Admitted(asked, verdict, store)
        held = self._live.get(ask.lease)
        if held is not None and held.store is not store:
            self.settle(held, 0)
        self._live[ask.lease] = admitted
        return admitted

    def _remember(self, subjects: tuple[Subject, ...], verdict: Verdict) -> None:
        self._used_up[subjects] = time.monotonic() + verdict.retry_ms / 1000, verdict

    def settle(self, admitted: Admitted, used: int) -> None:
        """Settles a request, without waiting. Unreported places expire soon; tokens refill."""
        self._live.pop(admitted.ask.lease, None)
        if len(self._tasks) >= MAX_BACKLOG:
            return
        settlement = Settlement(admitted.ask, admitted.verdict, used)
        task = asyncio.create_task(_settle(admitted.store, settlement))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self) -> None:
        """Renews what runs, and shows other routers that this one is there, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(every(RENEW_S, self._renew))
            tasks.create_task(every(_ENLIST_S, self._enlist))

    async def close(self) -> None:
        """Reports ended requests; this router is no longer counted."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(StoreDown):
            await self._store.unlease(ROUTERS, self._router_id)

    async def _renew(self) -> None:
        for store in (self._local, self._store):
            asks = [held.ask for held in self._live.values() if held.store is store]
            if asks:
                await store.renew(asks)

    async def _enlist(self) -> None:
        await self._store.lease(ROUTERS, self._router_id, b"", ROUTER_LEASE_S)
        self.routers = max(1, len(await self._store.leased(ROUTERS)))


async def _settle(store: Store, settlement: Settlement) -> None:
    with contextlib.suppress(StoreDown):
        await store.settle(settlement)


def _share_of(ask: Ask, routers: int) -> Ask:
    subjects = tuple(Subject(s.name, share(s.limits, routers)) for s in ask.subjects)
    return msgspec.structs.replace(ask, subjects=subjects)


class Metering:
    """Records how much each caller uses. clock: Unix seconds. prices: None = nothing has one."""

    def __init__(
        self,
        store: Store,
        admission: Admission,
        clock: Callable[[], float] = time.time,
        prices: PriceTable | None = None,
    ) -> None:
        self.admission = admission
        self.prices = prices
        self._store = store
        self.clock = clock
        self._pending = Pending()
        self._records: deque[UsageRecord] = deque(maxlen=_MAX_UNWRITTEN)
        self._flushing = asyncio.Lock()
        self._listed: dict[tuple[int, str], float] = {}
        self._most_listed = _FEW_TENANTS

    def charge(self, caller: Caller, request_id: str) -> "Charge":
        """The charge for one request, until it is closed."""
        return Charge(self, caller, request_id, self.clock())

    def record(self, record: UsageRecord, is_listed: bool) -> None:
        """Adds a request to the usage. is_listed: among the latest requests, too."""
        self._pending.add(record)
        if is_listed:
            self._records.append(record)

    def record_spent(self, record: UsageRecord) -> None:
        """Adds what a request spent that has been recorded: its seconds and money alone."""
        self._pending.add_spent(record)

    async def run(self) -> None:
        """Writes what was used to the store, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.admission.run())
            await every(FLUSH_S, self.flush)

    async def close(self) -> None:
        await self.admission.close()
        with contextlib.suppress(StoreDown):
            await self.flush()

    async def tenants(self, first: int, last: int) -> set[str]:
        """Tenants that used something in these days, also those without a key now. Raises
        StoreDown."""
        await self.flush()
        books = await self._store.counts([tenants_book(day) for day in range(first, last + 1)])
        return {tenant for book in books for tenant in book}

    async def usage(self, tenants: Sequence[str], first: int, last: int) -> list[UsageRow]:
        """Usage by tenant in these days since 1970-01-01, both included. Raises StoreDown."""
        await self.flush()
        rows, days = list[UsageRow](), range(first, last + 1)
        step = max(1, _BOOKS_AT_ONCE // len(days))
        for begin in range(0, len(tenants), step):
            some = tenants[begin : begin + step]
            names = [book_name(tenant, day) for tenant in some for day in days]
            books = iter(await self._store.counts(names))
            for tenant in some:
                rows += rows_of(tenant, [*islice(books, len(days))])
        return rows

    async def latest(self, tenants: Sequence[str], count: int) -> list[UsageRecord]:
        """Lists tenants' latest requests, the newest first. Raises StoreDown."""
        await self.flush()
        newest = list[UsageRecord]()
        step = max(1, _RECORDS_AT_ONCE // count)
        for begin in range(0, len(tenants), step):
            logs = [_log_name(tenant) for tenant in tenants[begin : begin + step]]
            for entries in await self._store.tails(logs, count):
                newest += readable(entries, UsageRecord)
            newest = nlargest(count, newest, key=attrgetter("at"))
        return newest

    async def flush(self) -> None:
        """Writes usage to the store. Raises StoreDown; then the rest waits for the next time."""
        async with self._flushing:
            await self._flush()

    async def _flush(self) -> None:
        while (book := self._pending.take()) is not None:
            name, counters = book
            groups = {counter: group_of(counter) for counter in counters}
            try:
                await self._list_tenant(*day_and_tenant(name))
                await self._store.count(name, counters, groups, _BOOK_TTL_S)
            except StoreDown:
                self._pending.give_back(name, counters)
                raise
        while self._records:
            tenant = self._records[0].tenant
            records = [record for record in self._records if record.tenant == tenant]
            self._records = deque(
                (record for record in self._records if record.tenant != tenant), _MAX_UNWRITTEN
            )
            try:
                lines = [msgspec.json.encode(record) for record in records]
                await self._store.append(_log_name(tenant), lines, KEPT_RECORDS)
            except StoreDown:
                self._records.extend(records)
                raise

    async def _list_tenant(self, day: int, tenant: str) -> None:
        """Lists a tenant in the day's book. This is done once in a while, as a store may come back
        empty. Raises StoreDown."""
        now = self.clock()
        if self._listed.get((day, tenant), 0.0) > now:
            return
        await self._store.count(tenants_book(day), {tenant: 1}, {tenant: OTHER}, _BOOK_TTL_S)
        self._listed[day, tenant] = now + _LISTED_S
        if len(self._listed) > self._most_listed:
            self._listed = {known: until for known, until in self._listed.items() if until > now}
            self._most_listed = 2 * len(self._listed) + _FEW_TENANTS


def _log_name(tenant: str) -> str:
    return f"requests:{tenant}"


class Charge:
    """The charge for one request. One request's. `enter` once, `admit` once, then `close` once,
    with what it used in between.

    adapter, base: see UsageRecord. has_entered: it has its place, so that work may be done for it.
    """

    __slots__ = (
        *("_admitted", "_caller", "_closed", "_digest", "_lease", "_metering", "_started"),
        *("adapter", "base", "cached_tokens", "generated_tokens", "has_entered", "headers"),
        *("outcome", "prompt_tokens", "request_id", "_copy_s", "_device_s", "_price"),
    )

    def __init__(self, metering: Metering, caller: Caller, request_id: str, started: float) -> None:
        self.headers: dict[str, str] = {}
        self.outcome: Outcome = "refused"
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self._metering = metering
        self._caller = caller
        self.request_id = request_id
        self._started = started
        self._admitted: Admitted | None = None
        self.adapter = ""
        self.base = ""
        self.has_entered = False
        self._digest: str | None = None
        # Callers choose request ids, and may choose one twice; so the lease has an id of its own.
        self._lease = uuid.uuid4().hex
        self._closed = False
        self._device_s = self._copy_s = 0.0
        self._price: Price | None = None

    @property
    def tenant(self) -> str:
        return self._caller.tenant

    @property
    def key_id(self) -> str:
        """The id of the caller's key; "" = no key was needed."""
        return self._caller.key_id

    async def enter(self) -> None:
        """Takes the request's place: concurrency, and one of the requests a minute. Before any work
        is done for it. Raises RequestError."""
        subjects = self._caller.subjects
        refused = self._metering.admission.known_refusal(subjects)
        if refused is not None:
            self._refuse(subjects, refused, 0)
        if subjects:
            await self._take(subjects, 0)
        self.has_entered = True

    async def admit(self, digest: str | None, prompt_tokens: int, output_tokens: int) -> None:
        """Reserves the request's tokens. digest: of the adapter. output_tokens: the most that may
        come. Raises RequestError."""
        self._digest = digest
        self.prompt_tokens = prompt_tokens
        subjects, tokens = self._caller.subjects, prompt_tokens + output_tokens
        if not any(counts_tokens(subject.limits) for subject in subjects):
            return
        too_many = refusal_for_ever(subjects, tokens)
        if too_many is not None:
            raise RequestError("invalid", too_many, param="max_tokens")
        await self._take(subjects, tokens)

    async def _take(self, subjects: tuple[Subject, ...], tokens: int) -> None:
        ask = Ask(self.tenant, subjects, self._lease, tokens)
        answer = await self._metering.admission.admit(ask)
        if answer is None:
            return
        if isinstance(answer, Verdict):
            self._refuse(subjects, answer, tokens)
        self.headers = rate_headers(answer.ask.subjects, answer.verdict)
        self._admitted = answer

    def _refuse(self, subjects: tuple[Subject, ...], verdict: Verdict, tokens: int) -> NoReturn:
        raise RequestError(
            "rate_limited",
            refusal(subjects, verdict, tokens),
            retry_after_s=verdict.retry_ms / 1000,
            headers=rate_headers(subjects, verdict),
        )

    def spent(self, cost: DeviceCost) -> float:
        """Adds the time of devices that one of the request's sequences took.

        It may come after `close`, as of a sequence that was aborted. Returns the money that this
        costs then; before, 0.
        """
        if not self._closed:
            self._device_s += cost.device_s
            self._copy_s += cost.copy_s
            return 0.0
        record = self._record(Spent(device_s=cost.device_s, copy_s=cost.copy_s))
        self._metering.record_spent(record)
        return record.cost

    @property
    def receipt(self) -> Callable[[], Receipt] | None:
        """Says what the request has cost so far; None where nothing has a price."""
        return None if self._metering.prices is None else self._receipt

    def _receipt(self) -> Receipt:
        return Receipt(self.price.cost(self._all_spent()), self._device_s)

    @property
    def price(self) -> Price:
        """The price of the request's tenant and adapter, which must be known."""
        prices = self._metering.prices
        if self._price is None:
            whose = (self.tenant, self.adapter, self.base)
            self._price = FREE if prices is None else prices.price_of(*whose)
        return self._price

    def _all_spent(self) -> Spent:
        return Spent(
            self.prompt_tokens,
            self.cached_tokens,
            self.generated_tokens,
            self._device_s,
            self._copy_s,
        )

    def close(self) -> float:
        """Settles the charge, and records the request. Requests that were refused before any work
        are counted, and not listed: they may be many. Returns what the request cost.
        """
        if self._closed:
            return 0.0
        self._closed = True
        if self.outcome == "refused":
            self.prompt_tokens = 0
        if self._admitted is not None:
            used = self.prompt_tokens + self.generated_tokens
            self._metering.admission.settle(self._admitted, used)
        record = self._record(self._all_spent())
        self._metering.record(record, is_listed=self.has_entered)
        return record.cost

    def _record(self, spent: Spent) -> UsageRecord:
        now = self._metering.clock()
        return UsageRecord(
            at=round(now, 3),
            request_id=self.request_id,
            tenant=self.tenant,
            key=self._caller.key_id,
            adapter=self.adapter,
            digest=self._digest,
            outcome=self.outcome,
            prompt_tokens=spent.prompt_tokens,
            cached_tokens=spent.cached_tokens,
            completion_tokens=spent.completion_tokens,
            seconds=round(now - self._started, 3),
            device_s=spent.device_s,
            copy_s=spent.copy_s,
            cost=self.price.cost(spent),
            base=self.base or UNSET,
        )
