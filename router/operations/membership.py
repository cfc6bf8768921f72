"""Informs a router's parts of workers that connect and leave."""

from loraplex.router.background import Background
from loraplex.router.operations.admin import AdapterAdmin
from loraplex.router.workers.bases import Bases
from loraplex.router.workers.fleet import Roster
from loraplex.router.workers.session import WorkerSession
from loraplex.server.protocol import ModelCard, WorkerHello


class Membership:
    """Implements `WorkerListener`."""

    def __init__(
        self, bases: Bases, roster: Roster, admin: AdapterAdmin, background: Background
    ) -> None:
        self._bases = bases
        self._roster = roster
        self._admin = admin
        self._background = background

    def base_of(self, card: ModelCard) -> str:
        return self._bases.of_card(card).name

    async def accept_card(self, base: str, card: ModelCard) -> str | None:
        return await self._bases.of(base).adopt(card)

    def accept_worker(self, hello: WorkerHello) -> str | None:
        return self._roster.accept_worker(hello)

    def worker_connected(self, session: WorkerSession) -> None:
        self._admin.worker_connected(session)

    def worker_gone(self, base: str) -> None:
        """Notes that a worker has gone: the base is what connected workers say of it."""
        self._background.start(self._bases.of(base).review())

    def worker_changed(self, base: str) -> None:
        self._bases.of(base).fleet.worker_changed()
