"""Claims of the router that runs a batch: a lease in what routers share, a lock in the folder.

The lease decides between machines, the lock between processes that share no store.
"""

import asyncio
import contextlib
import os

from loraplex.router.batches.folder import BatchFolder
from loraplex.router.files.disk import off_loop
from loraplex.router.shared.store import Store, StoreDown

LEASE_S = 10.0
# A router that could not renew for so long runs nothing: another may take over soon after.
_LOST_S = 6.0


class Claims:
    """Claims of this router on batches, so that no other router runs them."""

    def __init__(self, store: Store, folder: BatchFolder, router_id: str) -> None:
        self._store = store
        self._folder = folder
        self._me = router_id.encode()
        self._locks: dict[str, int] = {}
        self._renewed: dict[str, float] = {}

    async def take(self, tenant: str, batch_id: str) -> bool:
        """Claims a batch for this router. False = another router has it, or nobody can say who.
        Raises RequestError of a disk."""
        with contextlib.suppress(StoreDown):
            if await self._lease(batch_id):
                lock = await off_loop(self._folder.lock, tenant, batch_id)
                if lock is not None:
                    self._locks[batch_id] = lock
                    self._renewed[batch_id] = _now()
                    return True
                await self._unlease(batch_id)
        return False

    async def renew(self, batch_id: str) -> bool:
        """Renews the claim on a batch. False = it may be another's by now."""
        try:
            if not await self._lease(batch_id):
                return False
            self._renewed[batch_id] = _now()
        except StoreDown:
            return _now() - self._renewed[batch_id] < _LOST_S
        return True

    async def give_back(self, batch_id: str) -> None:
        os.close(self._locks.pop(batch_id))
        del self._renewed[batch_id]
        with contextlib.suppress(StoreDown):
            await self._unlease(batch_id)

    async def _lease(self, batch_id: str) -> bool:
        """Whether it is this router's now. Raises StoreDown."""
        name = _name(batch_id)
        if await self._store.swap(name, self._me, self._me, LEASE_S):
            return True
        return await self._store.add(name, self._me, LEASE_S) is None

    async def _unlease(self, batch_id: str) -> None:
        await self._store.swap(_name(batch_id), self._me, None, LEASE_S)


def _name(batch_id: str) -> str:
    return f"batches:{batch_id}"


def _now() -> float:
    return asyncio.get_running_loop().time()
