"""A router's copy of a table of the store: read without waiting, at most a second old.

It outlives the store. A lost table is filled again from what its readers hold. The newest revision
of a row wins, so their order does not matter. Deleted rows stay as empty ones.
"""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, Protocol, TypeVar

from loraplex.adapters.common.newest import NewestKept
from loraplex.router.shared.store import Row, Store, StoreDown, TableFull, life_of
from loraplex.router.shared_tasks import SharedTasks

REFRESH_S = 1.0
# Rows that are taken over before others have their turn: about 10 ms.
_AT_ONCE = 500
# The version of a table that was written before it was read: whatever is there has another life.
_UNREAD = "unread"

T = TypeVar("T")


async def every(period_s: float, work: Callable[[], Awaitable[object]]) -> None:
    """Does some work again and again, until cancelled. While the store is down it is tried anew."""
    while True:
        with contextlib.suppress(StoreDown):
            await work()
        await asyncio.sleep(period_s)


class RowWatch(Protocol):
    """Hears of each row that changes, comes or goes."""

    def row_changes(self, key: str) -> None:
        """Is called before a row changes."""

    def row_changed(self, key: str) -> None:
        """Is called after a row changed."""


class Conflict(Exception):
    """Somebody else has written the row in the meantime."""


class Replica(Generic[T]):
    """A router's own copy of a table in the store. decode: a row's bytes to what it means, None for
    bytes that mean nothing (any more).

    on_change: called after each change, also one made here. is_spare: values that may go, as
    deleted ones do, when the table is full. watch: hears of each row. kept: as many values are kept
    decoded, and others are decoded when they are asked for; None = all. Then a row that did not
    change keeps its value's identity.
    """

    def __init__(
        self,
        store: Store,
        table: str,
        decode: Callable[[bytes], T | None],
        on_change: Callable[[], None] = lambda: None,
        is_spare: Callable[[T], bool] = lambda value: False,
        watch: RowWatch | None = None,
        kept: int | None = None,
    ) -> None:
        self._watch = watch
        self._kept = kept
        self.is_loaded = False
        self._store = store
        self._table = table
        self._decode = decode
        self._on_change = on_change
        self._is_spare = is_spare
        self._version = ""
        self._rows: dict[str, Row] = {}
        self._values = NewestKept[str, T](sys.maxsize if kept is None else kept)
        # Written here while the table was being read: what was read may be older.
        self._just_written: dict[str, Row] = {}
        self._refreshing = SharedTasks[None, None]()

    @property
    def values(self) -> Mapping[str, T]:
        """All values; only where all are kept."""
        assert self._kept is None
        return self._values

    def get(self, key: str) -> T | None:
        """The value of a row."""
        value = self._values.get(key)
        if value is not None or self._kept is None:
            return value
        row = self._rows.get(key)
        value = self._decode(row.value) if row is not None and row.value else None
        if value is not None:
            self._values[key] = value
        return value

    def row(self, key: str) -> Row | None:
        """A row as it is stored; the same object as long as nobody writes it."""
        return self._rows.get(key)

    async def run(self) -> None:
        """Follows the store until cancelled."""
        await every(REFRESH_S, self.refresh)

    async def refresh(self) -> None:
        """Brings the copy up to date with what was written before the call. Raises StoreDown."""
        if None in self._refreshing:  # it may have looked too early
            await self._refreshing.run(None, self._refresh)
        await self._refreshing.run(None, self._refresh)

    async def write(self, key: str, value: bytes | None) -> None:
        """Writes a row here and there; None deletes it. Raises StoreDown, TableFull, Conflict."""
        before = self._rows.get(key)
        row = Row(1 if before is None else before.revision + 1, value or b"")
        if not await self._put(key, row):
            await self.refresh()
            raise Conflict
        self._version = self._version or _UNREAD
        self._just_written[key] = row
        self._set(key, row)
        self._on_change()

    async def _put(self, key: str, row: Row) -> bool:
        try:
            return await self._store.put(self._table, key, row)
        except TableFull:
            spare = [name for name, there in self._rows.items() if self._may_go(name, there)]
            if not spare:
                raise
            await self._store.forget(self._table, spare)
            for name in spare:
                self._set(name, None)
            return await self._store.put(self._table, key, row)

    async def _refresh(self) -> None:
        version = await self._store.version(self._table)
        if self.is_loaded and version == self._version:
            return
        if life_of(version) != life_of(self._version) and self._rows:
            for key, row in list(self._rows.items()):
                await self._store.put(self._table, key, row)
            version = await self._store.version(self._table)
        self._just_written.clear()
        table = await self._store.read(self._table, self._version if self.is_loaded else "")
        if life_of(table.version) != life_of(version):
            return  # it was lost just now: the next look fills it again
        self._version = table.version
        if table.is_whole:
            for key in self._rows.keys() - table.rows.keys() - self._just_written.keys():
                self._set(key, None)
        for number, (key, row) in enumerate(table.rows.items()):
            if number % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)
            written = self._just_written.get(key)
            if self._rows.get(key) != row and (written is None or written.revision < row.revision):
                self._set(key, row)
        self.is_loaded = True
        self._on_change()

    def _may_go(self, key: str, row: Row) -> bool:
        value = self.get(key)
        return not row.value if value is None else self._is_spare(value)

    def _set(self, key: str, row: Row | None) -> None:
        if self._watch is not None:
            self._watch.row_changes(key)
        self._values.pop(key, None)
        if row is None:
            self._rows.pop(key, None)
        else:
            self._rows[key] = row
            value = self._decode(row.value) if row.value and self._kept is None else None
            if value is not None:
                self._values[key] = value
        if self._watch is not None:
            self._watch.row_changed(key)
