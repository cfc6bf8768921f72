"""The store of a single router, in its process's memory."""

import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from loraplex.router.policy import quota
from loraplex.router.policy.quota import Ask, QuotaAccount, Verdict
from loraplex.router.shared.divided_room import DividedRoom
from loraplex.router.shared.store import (
    MAX_COUNTERS,
    MAX_ROWS,
    Row,
    Settlement,
    Table,
    TableFull,
    life_of,
)

MAX_VALUES = 1 << 16
MAX_ACCOUNTS = 1 << 16
_SWEPT = 16  # values, or accounts, looked at when one is added

_AccountKey = tuple[str, str]


class _Rows:
    """The rows of a table, in the order of their last writes, and how many writes there were."""

    def __init__(self) -> None:
        self.life = secrets.token_hex(8)
        self.rows: dict[str, Row] = {}
        self.writes = 0
        self.forgotten = 0


class MemoryStore:
    """A Store. clock: Unix seconds that do not jump."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._values: dict[str, tuple[float, bytes]] = {}
        self._room = DividedRoom()
        self._tables: dict[str, _Rows] = {}
        self._leases: dict[str, dict[str, tuple[float, bytes]]] = {}
        self._logs: dict[str, deque[bytes]] = {}
        self._books: OrderedDict[str, tuple[float, dict[str, int]]] = OrderedDict()
        self._accounts: OrderedDict[_AccountKey, tuple[QuotaAccount, quota.Limits]] = OrderedDict()

    async def get(self, key: str) -> bytes | None:
        until, value = self._values.get(key, (0.0, b""))
        return value if until > self._clock() else None

    async def set(self, key: str, value: bytes, ttl_s: float) -> None:
        now = self._clock()
        self._values[key] = (now + ttl_s, value)
        self._room.put(_owner(key), key, now + ttl_s)
        for old in self._room.expired(now, _SWEPT):
            del self._values[old]
        if len(self._room) > MAX_VALUES:
            del self._values[self._room.pop()]

    async def add(self, key: str, value: bytes, ttl_s: float) -> bytes | None:
        there = await self.get(key)
        if there is None:
            await self.set(key, value, ttl_s)
        return there

    async def swap(self, key: str, old: bytes, new: bytes | None, ttl_s: float) -> bool:
        if await self.get(key) != old:
            return False
        if new is None:
            del self._values[key]
            self._room.drop(key)
        else:
            await self.set(key, new, ttl_s)
        return True

    async def version(self, table: str) -> str:
        found = self._tables.get(table)
        return "" if found is None else f"{found.life}:{found.writes}.{found.forgotten}"

    async def read(self, table: str, since: str = "") -> Table:
        found, version = self._tables.get(table), await self.version(table)
        if found is None or life_of(since) != found.life:
            return Table(version, {} if found is None else dict(found.rows))
        last = int(since.partition(":")[2].partition(".")[0])
        fresh = islice(reversed(found.rows), found.writes - last)
        return Table(version, {key: found.rows[key] for key in fresh}, is_whole=False)

    async def put(self, table: str, key: str, row: Row) -> bool:
        found = self._tables.setdefault(table, _Rows())
        there = found.rows.get(key)
        if there is not None and there.revision >= row.revision:
            return False
        if there is None and len(found.rows) >= MAX_ROWS:
            raise TableFull
        found.writes += 1
        found.rows.pop(key, None)
        found.rows[key] = row
        return True

    async def forget(self, table: str, keys: Sequence[str]) -> None:
        found = self._tables.setdefault(table, _Rows())
        for key in keys:
            found.rows.pop(key, None)
        found.forgotten += 1

    async def lease(self, group: str, member: str, value: bytes, ttl_s: float) -> None:
        await self.leased(group)
        self._leases.setdefault(group, {})[member] = (self._clock() + ttl_s, value)

    async def unlease(self, group: str, member: str) -> None:
        self._leases.get(group, {}).pop(member, None)

    async def leased(self, group: str) -> dict[str, bytes]:
        members, now = self._leases.get(group, {}), self._clock()
        for gone in [member for member, (until, _) in members.items() if until <= now]:
            del members[gone]
        return {member: value for member, (_, value) in members.items()}

    async def append(self, log: str, entries: Sequence[bytes], keep: int) -> None:
        kept = self._logs.get(log)
        if kept is None or kept.maxlen != keep:
            kept = self._logs[log] = deque(kept or (), keep)
        kept.extend(entries)

    async def tails(self, logs: Sequence[str], count: int) -> list[list[bytes]]:
        return [list(islice(reversed(self._logs.get(log, ())), count)) for log in logs]

    async def count(
        self, book: str, amounts: Mapping[str, int], groups: Mapping[str, str], ttl_s: float
    ) -> None:
        now = self._clock()
        (counters,) = await self.counts([book])
        for counter, amount in amounts.items():
            is_new = counter not in counters
            name = groups[counter] if is_new and len(counters) >= MAX_COUNTERS else counter
            counters[name] = counters.get(name, 0) + amount
        self._books[book] = (now + ttl_s, counters)
        for old in [name for name, (until, _) in self._books.items() if until <= now]:
            del self._books[old]

    async def counts(self, books: Sequence[str]) -> list[dict[str, int]]:
        now, nothing = self._clock(), (0.0, dict[str, int]())
        found = (self._books.get(book, nothing) for book in books)
        return [dict(counters) if until > now else {} for until, counters in found]

    async def admit(self, ask: Ask) -> Verdict:
        now_ms = self._now_ms()
        accounts = [self._account(ask, subject) for subject in ask.subjects]
        verdict = quota.admit(accounts, ask, now_ms)
        self._sweep(now_ms)
        return verdict

    async def settle(self, settlement: Settlement) -> tuple[int, int]:
        ask = settlement.ask
        accounts = [self._account(ask, subject) for subject in ask.subjects]
        windows = [standing.window for standing in settlement.verdict.standings]
        now_ms = self._now_ms()
        return now_ms, quota.settle(accounts, ask, windows, settlement.used, now_ms)

    async def renew(self, asks: Sequence[Ask]) -> None:
        now_ms = self._now_ms()
        for ask in asks:
            for subject in ask.subjects:
                leases = self._account(ask, subject).leases
                if ask.lease in leases:
                    leases[ask.lease] = now_ms + ask.lease_ms

    def _account(self, ask: Ask, subject: quota.Subject) -> QuotaAccount:
        key = (ask.tenant, subject.name)
        account = self._accounts[key][0] if key in self._accounts else QuotaAccount(leases={})
        self._accounts[key] = (account, subject.limits)
        return account

    def _sweep(self, now_ms: int) -> None:
        """Forgets accounts that say nothing any more, a few at a time, oldest first."""
        for key, (account, limits) in list(islice(self._accounts.items(), _SWEPT)):
            if quota.is_idle(account, limits, now_ms):
                del self._accounts[key]
            else:
                self._accounts.move_to_end(key)
        while len(self._accounts) > MAX_ACCOUNTS:
            self._accounts.popitem(last=False)

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


def _owner(key: str) -> str:
    """The owner of a value, who shares the room with others: the key but for its last part."""
    return key.rpartition(":")[0]
