"""Operators' actions: a line of JSON in the log each, and the newest of them in the store."""

import asyncio
import logging
import time
from collections import deque

import msgspec

from loraplex.router.shared.records import readable
from loraplex.router.shared.replica import every
from loraplex.router.shared.store import Store, StoreDown
from loraplex.router.tenancy.records import AuditRecord

logger = logging.getLogger(__name__)

KEPT = 10_000
FLUSH_S = 1.0
_LOG = "audit"
_MAX_UNWRITTEN = 10_000


class Audit:
    """Records operators' actions without waiting for the store, within bounds, until it can."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._unwritten: deque[bytes] = deque(maxlen=_MAX_UNWRITTEN)
        self._flushing = asyncio.Lock()

    def record(self, record: AuditRecord) -> None:
        line = msgspec.json.encode(record)
        facts = {"audit": msgspec.to_builtins(record)}
        logger.info("audit %s", line.decode(), extra={"facts": facts})
        self._unwritten.append(line)

    async def newest(self, count: int) -> list[AuditRecord]:
        """Reads the newest records of all routers. Raises StoreDown."""
        await self.flush()
        (entries,) = await self._store.tails([_LOG], count)
        return readable(entries, AuditRecord)

    async def run(self) -> None:
        await every(FLUSH_S, self.flush)

    async def flush(self) -> None:
        """Writes the records that wait to the store. Raises StoreDown."""
        async with self._flushing:
            lines = list(self._unwritten)
            self._unwritten.clear()
            try:
                await self._store.append(_LOG, lines, KEPT)
            except StoreDown:
                self._unwritten.extendleft(reversed(lines))
                raise


def now() -> float:
    return round(time.time(), 3)
