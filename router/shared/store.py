"""State that routers share, as a protocol: values, tables, leases, logs, counters and quotas. Pure.

`memory_store` is one router's own, `redis_store` that of many. Both keep the same contract.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from loraplex.router.policy.batch_limits import ResponsesLimits
from loraplex.router.policy.quota import Ask, Verdict

MAX_ROWS = 1 << 21
MAX_COUNTERS = 1 << 14


class StoreDown(Exception):
    """The store does not answer. What that means for a request is its user's to say."""


class TableFull(Exception):
    """A table has MAX_ROWS rows already."""


class Row(msgspec.Struct, frozen=True):
    """A row of a table. revision: the newest wins, so a writer writes the one it read plus one."""

    revision: int
    value: bytes


class Table(msgspec.Struct, frozen=True):
    """The rows of a table, as they were read. version: another one after each write; "" of a table
    that was never written, or was lost.

    Its first part names the table's life, see `life_of`. is_whole: rows are all there are.
    """

    version: str
    rows: dict[str, Row]
    is_whole: bool = True


def life_of(version: str) -> str:
    """The life in a table's version. A table that was lost and written again has another."""
    return version.partition(":")[0]


class Settlement(msgspec.Struct, frozen=True):
    """A request that is over. verdict: what it was admitted with; used: tokens in all."""

    ask: Ask
    verdict: Verdict
    used: int


class Store(Protocol):
    """Stores what routers share. Every method raises StoreDown, and is done within a bounded time.

    Names of tables, logs and books, and keys of values, are the code's own words or made of such
    and of ids; never a secret.
    """

    # Values: each for a time, found by its key alone. Keys that differ in the part behind the last
    # colon alone are one owner's, who shares a bounded room with others.

    async def get(self, key: str) -> bytes | None: ...

    async def set(self, key: str, value: bytes, ttl_s: float) -> None: ...

    async def add(self, key: str, value: bytes, ttl_s: float) -> bytes | None:
        """Sets a value if there is none, and returns None; else returns the one that is there."""
        ...

    async def swap(self, key: str, old: bytes, new: bytes | None, ttl_s: float) -> bool:
        """Replaces `old`, or removes it (new None); False when it is not what is there."""
        ...

    # Tables: kept until they are overwritten.

    async def version(self, table: str) -> str: ...

    async def read(self, table: str, since: str = "") -> Table:
        """Reads a table. since: a version; rows that are no newer may be left out."""
        ...

    async def put(self, table: str, key: str, row: Row) -> bool:
        """Writes a row unless what is there is as new. Raises TableFull."""
        ...

    async def forget(self, table: str, keys: Sequence[str]) -> None:
        """Forgets rows, as if they had never been written."""
        ...

    # Leases: who is there, as long as they say so.

    async def lease(self, group: str, member: str, value: bytes, ttl_s: float) -> None: ...

    async def unlease(self, group: str, member: str) -> None: ...

    async def leased(self, group: str) -> dict[str, bytes]: ...

    # Logs: the newest entries.

    async def append(self, log: str, entries: Sequence[bytes], keep: int) -> None: ...

    async def tails(self, logs: Sequence[str], count: int) -> list[list[bytes]]:
        """Lists so many entries of each log, the newest first."""
        ...

    # Counters, in books of at most MAX_COUNTERS.

    async def count(
        self, book: str, amounts: Mapping[str, int], groups: Mapping[str, str], ttl_s: float
    ) -> None:
        """Adds amounts to counters of a book, which lasts for `ttl_s` after its latest count.

        groups: each counter of `amounts` -> the one that counts in its place when the book is full.
        """
        ...

    async def counts(self, books: Sequence[str]) -> list[dict[str, int]]:
        """Counters of each book; none where there is no such book."""
        ...

    # Quotas: see `loraplex.router.policy.quota`.

    async def admit(self, ask: Ask) -> Verdict: ...

    async def settle(self, settlement: Settlement) -> tuple[int, int]:
        """Settles requests. Returns the store's time in ms, and for how many subjects."""
        ...

    async def renew(self, asks: Sequence[Ask]) -> None:
        """Renews leases of requests that still run."""
        ...


class Shelf(Protocol):
    """Values of tenants, by names that sort by age. b"" is none. Every method raises StoreDown, or
    RequestError of a disk."""

    async def shelved(self, tenant: str, name: str) -> bytes: ...

    async def shelve(
        self, tenant: str, name: str, old: bytes, new: bytes, limits: ResponsesLimits, least: str
    ) -> bool:
        """Puts `new` in the place of `old`; False when that is not what is there. Others make room,
        the oldest first, and those before `least`."""
        ...
