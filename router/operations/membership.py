"""Informs a router's parts of workers that connect and leave."""

from loraplex.router.background import Background
from loraplex.router.generation.dispatcher import Dispatcher
from loraplex.router.operations.admin import AdapterAdmin
from loraplex.router.workers.base_model import BaseModel
from loraplex.router.workers.fleet import Fleet
from loraplex.router.workers.session import WorkerSession
from loraplex.server.protocol import ModelCard, WorkerHello


class Membership:
    """Implements `WorkerListener`."""

    def __init__(
        self,
        base: BaseModel,
        fleet: Fleet,
        admin: AdapterAdmin,
        dispatcher: Dispatcher,
        background: Background,
    ) -> None:
        self._base = base
        self._fleet = fleet
        self._admin = admin
        self._dispatcher = dispatcher
        self._background = background

    async def accept_card(self, card: ModelCard) -> str | None:
        return await self._base.adopt(card, self._in_use)

    def _in_use(self) -> bool:
        """Checks whether something runs or waits that was tokenised for the base of now."""
        return bool(self._fleet.views) or self._dispatcher.running > 0

    def accept_worker(self, hello: WorkerHello) -> str | None:
        return self._fleet.accept_worker(hello)

    def worker_connected(self, session: WorkerSession) -> None:
        self._admin.worker_connected(session)

    def worker_gone(self) -> None:
        """Notes that a worker has gone: the base is what connected workers say of it."""
        self._background.start(self._base.review())

    def worker_changed(self) -> None:
        self._fleet.worker_changed()
