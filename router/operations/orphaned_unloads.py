"""Finishes unloads whose router was stopped or died."""

import contextlib

from loraplex.adapters.errors import AdapterError
from loraplex.router.names.aliases import Aliases
from loraplex.router.names.owned_name import OwnedName
from loraplex.router.operations.admin import AdapterAdmin
from loraplex.router.shared.every import every
from loraplex.router.shared.store import Store
from loraplex.router.tenancy.admission import ROUTERS

# Longer than routers take to say again that they are there, when the store has lost it.
TICK_S = 8.0


class OrphanedUnloads:
    """Ends dead routers' unloads. Every router looks, as not all know each name; one gets each."""

    def __init__(self, store: Store, aliases: Aliases, admin: AdapterAdmin) -> None:
        self._store = store
        self._aliases = aliases
        self._admin = admin
        self._left: set[tuple[OwnedName, str]] = set()

    async def run(self) -> None:
        """Takes over unloads of dead routers until cancelled."""
        await every(TICK_S, self.step)

    async def step(self) -> None:
        """Takes over unloads whose router was missing at the last look, too. Raises StoreDown."""
        before, self._left = self._left, set()
        unloading = {(r.key, r.drainer) for r in self._aliases.marked("unloading")}
        if not unloading or not self._admin.workers.ready:
            return
        there = await self._store.leased(ROUTERS)
        self._left = {(name, drainer) for name, drainer in unloading if drainer not in there}
        for name, drainer in self._left & before:
            with contextlib.suppress(AdapterError):  # another router was faster
                await self._admin.take_up(name, drainer)
