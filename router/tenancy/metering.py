"""Charges each request to quotas before its start, and records its usage at its end."""

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec

from router.call import AnswerHead, RequestError
from router.policy.quota import Ask, Subject, Verdict
from router.shared.records import readable
from router.shared.store import Store, StoreDown
from router.tenancy.admission import Admission, Admitted
from router.tenancy.keys import Caller
from router.tenancy.rate_headers import rate_headers, refusal, refusal_for_ever
from router.tenancy.usage import (
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

FLUSH_S = 1.0
KEPT_RECORDS = 10_000  # of each tenant
_MAX_UNWRITTEN = 10_000
_LISTED_S = 600.0
_BOOK_TTL_S = (MAX_DAYS + 1) * 86400.0


class Metering:
    """clock: Unix seconds."""

    def __init__(
        self, store: Store, admission: Admission, clock: Callable[[], float] = time.time
    ) -> None:
        self.admission = admission
        self._store = store
        self.clock = clock
        self._pending = Pending()
        self._records: deque[UsageRecord] = deque(maxlen=_MAX_UNWRITTEN)
        self._flushing = asyncio.Lock()
        self._listed: dict[tuple[int, str], float] = {}

    def charge(self, caller: Caller, request_id: str) -> "Charge":
        """Of one request, until it is closed."""
        return Charge(self, caller, request_id, self.clock())

    def record(self, record: UsageRecord) -> None:
        self._pending.add(record)
        self._records.append(record)

    async def run(self) -> None:
        """Writes what was used to the store, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.admission.run())
            while True:
                await asyncio.sleep(FLUSH_S)
                with contextlib.suppress(StoreDown):
                    await self.flush()

    async def close(self) -> None:
        await self.admission.close()
        with contextlib.suppress(StoreDown):
            await self.flush()

    async def tenants(self, first: int, last: int) -> set[str]:
        """Who used something in these days, though they may have no key any more. Raises
        StoreDown."""
        await self.flush()
        books = [await self._store.counts(tenants_book(day)) for day in range(first, last + 1)]
        return {tenant for book in books for tenant in book}

    async def usage(self, tenants: Sequence[str], first: int, last: int) -> list[UsageRow]:
        """Of these days since 1970-01-01, both included. Raises StoreDown."""
        await self.flush()
        rows: list[UsageRow] = []
        for tenant in tenants:
            names = [book_name(tenant, day) for day in range(first, last + 1)]
            rows += rows_of(tenant, [await self._store.counts(name) for name in names])
        return rows

    async def latest(self, tenants: Sequence[str], count: int) -> list[UsageRecord]:
        """The newest first. Raises StoreDown."""
        await self.flush()
        records = [
            record
            for tenant in tenants
            for record in readable(await self._store.tail(_log_name(tenant), count), UsageRecord)
        ]
        return sorted(records, key=lambda record: record.at, reverse=True)[:count]

    async def flush(self) -> None:
        """Raises StoreDown; what was not written is kept for the next time."""
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
        """Once in a while, as a store may come back empty. Raises StoreDown."""
        now = self.clock()
        if self._listed.get((day, tenant), 0.0) > now:
            return
        await self._store.count(tenants_book(day), {tenant: 1}, {tenant: OTHER}, _BOOK_TTL_S)
        self._listed = {known: until for known, until in self._listed.items() if until > now}
        self._listed[day, tenant] = now + _LISTED_S


def _log_name(tenant: str) -> str:
    return f"requests:{tenant}"


class Charge:
    """One request's. `admit` once, then `close` once, with what it used in between."""

    __slots__ = (
        *("_adapter", "_admitted", "_caller", "_closed", "_head", "_metering", "_started"),
        *("cached_tokens", "generated_tokens", "headers", "outcome", "prompt_tokens", "request_id"),
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
        self._head: AnswerHead | None = None
        self._adapter = ""
        self._closed = False

    @property
    def tenant(self) -> str:
        return self._caller.tenant

    @property
    def key_id(self) -> str:
        """ "" = no key was needed."""
        return self._caller.key_id

    def check(self) -> None:
        """Before any work is done for it. Raises RequestError if it is known to be refused."""
        refused = self._metering.admission.known_refusal(self._caller.subjects)
        if refused is not None:
            self._refuse(self._caller.subjects, refused, 0)

    async def admit(
        self, head: AnswerHead, adapter: str, prompt_tokens: int, output_tokens: int
    ) -> None:
        """adapter: see UsageRecord. output_tokens: the most that may come. Raises RequestError."""
        self._head = head
        self._adapter = adapter
        self.prompt_tokens = prompt_tokens
        subjects = self._caller.subjects
        if not subjects:
            return
        # Callers choose request ids, and may choose one twice; so the lease has an id of its own.
        tokens = prompt_tokens + output_tokens
        too_many = refusal_for_ever(subjects, tokens)
        if too_many is not None:
            raise RequestError("invalid", too_many, param="max_tokens")
        ask = Ask(self.tenant, subjects, uuid.uuid4().hex, tokens)
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

    def close(self) -> None:
        """Settles, and records a request that was let in."""
        if self._closed:
            return
        self._closed = True
        if self.outcome == "refused":
            self.prompt_tokens = 0
        if self._admitted is not None:
            used = self.prompt_tokens + self.generated_tokens
            self._metering.admission.settle(self._admitted, used)
        if self._head is None or self.outcome == "refused":
            return
        now = self._metering.clock()
        self._metering.record(
            UsageRecord(
                at=round(now, 3),
                request_id=self.request_id,
                tenant=self.tenant,
                key=self._caller.key_id,
                adapter=self._adapter,
                digest=self._head.adapter_digest,
                outcome=self.outcome,
                prompt_tokens=self.prompt_tokens,
                cached_tokens=self.cached_tokens,
                completion_tokens=self.generated_tokens,
                seconds=round(now - self._started, 3),
            )
        )
