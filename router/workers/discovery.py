"""Finds the workers that enlisted themselves in the shared store."""

import logging

from loraplex.adapters.common.worker_record import GROUP, verified
from loraplex.router.shared.replica import every
from loraplex.router.shared.store import Store
from loraplex.router.workers.fleet import Connections

logger = logging.getLogger(__name__)

PERIOD_S = 1.0


class Discovery:
    """Finds workers that enlisted in the store. secret: opens them, and signs what they say."""

    def __init__(self, store: Store, connections: Connections, secret: str) -> None:
        self._store = store
        self._connections = connections
        self._secret = secret
        self._refused: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Looks for workers until cancelled. While the store is away, the last known stay."""
        await every(PERIOD_S, self.look)

    async def look(self) -> None:
        """Reads which workers are enlisted, and connects to them. Raises StoreDown."""
        members = await self._store.leased(GROUP)
        records = {name: verified(data, self._secret) for name, data in members.items()}
        refused = frozenset(name for name, record in records.items() if record is None)
        for name in sorted(refused - self._refused):
            logger.warning("worker %s: enlisted without this router's secret", ascii(name[:80]))
        self._refused = refused
        found = {record.url for record in records.values() if record is not None}
        self._connections.discovered(found)
