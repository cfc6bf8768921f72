"""The workers of this router and the queue in front of them: who gets the next credit.

Carries out what `waiting` and `placement` decide; what is generated is `dispatch`'s business.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from adapters.errors import AdapterError
from adapters.manifest import AdapterManifest
from router.failures import DeadlinePassed, NoWorker
from router.generation import Secret
from router.model_card import CardStore
from router.placement import Reason, WorkerView, choose, choose_loader
from router.served import Origin
from router.waiting import Waiting, WaitingQueue
from router.worker_client import WorkerClient
from router.worker_session import Credit, WorkerLost, WorkerSession
from server.protocol import ModelCard

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_LATE_S = 0.25
_LOAD_ATTEMPTS = 3


Placed = tuple[Credit, Reason]


class Fleet:
    """`accept_card` is asked at every new connection; None = welcome, else why not.

    silence_s: how long a worker may be silent before its sequences go on elsewhere.
    """

    def __init__(
        self,
        queue: WaitingQueue[asyncio.Future[Placed]],
        accept_card: Callable[[ModelCard], Awaitable[str | None]],
        silence_s: float,
        handed_over: Callable[[int], None],
    ) -> None:
        self.queue = queue
        self._silence_s = silence_s
        self._handed_over = handed_over
        self.clients: Sequence[WorkerClient] = ()
        self.on_connect: Callable[[WorkerSession], None] = lambda session: None
        self._accept_card = accept_card

    def connect(self, urls: Sequence[str], router_id: str, secret: str, cards: CardStore) -> None:
        """Names the workers to keep connections to; `run` opens them."""
        self.clients = tuple(
            WorkerClient(url, router_id, secret, cards, self) for url in dict.fromkeys(urls)
        )

    async def run(self) -> None:
        """Keeps the connections until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for client in self.clients:
                tasks.create_task(client.run())
            loop = asyncio.get_running_loop()
            while True:
                due = loop.time() + _TICK_S
                await asyncio.sleep(_TICK_S)
                self._listen(loop.time(), loop.time() - due)
                self.worker_changed()

    def _listen(self, now: float, late_s: float) -> None:
        """What runs on a worker that has fallen silent goes on elsewhere, if there is another.

        late_s: how late this process is itself; then it may be that it only did not listen.
        """
        if late_s > _LATE_S:
            for session in self.sessions:
                session.excuse(now)
        silent = [s for s in self.sessions if s.listen(now, self._silence_s)]
        if silent and self.ready:
            for session in silent:
                moved = session.hand_over("the worker has fallen silent")
                if moved:
                    logger.warning("worker %s is silent: %d moved", session.worker_id, moved)
                    self._handed_over(moved)

    @property
    def views(self) -> list[WorkerView]:
        return [session.view for session in self.sessions]

    @property
    def ready(self) -> bool:
        return any(view.able for view in self.views)

    def check_ready(self) -> None:
        """Raises NoWorker when no worker takes new work."""
        if not self.ready:
            draining = any(view.draining for view in self.views)
            why = "every worker is draining" if draining else "no worker is ready"
            raise NoWorker(f"{why}; try again soon", 2.0)

    async def acquire(self, entry: "Waiting[None]") -> Placed:
        """Waits in the queue for a worker with room. Raises QueueFull, DeadlinePassed."""
        granted: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()
        ticket = self.queue.push(
            Waiting(granted, entry.flow, entry.cost, entry.nbytes, entry.priority, entry.deadline)
        )
        self._grant()
        try:
            return await granted
        except asyncio.CancelledError:
            if not self.queue.cancel(ticket) and granted.done() and not granted.cancelled():
                granted.result()[0].release()
            raise

    async def load_adapter(self, origin: Origin, token: Secret | None) -> AdapterManifest:
        """Lets some worker fetch or merge an adapter. Raises AdapterError."""
        for _ in range(_LOAD_ATTEMPTS):
            session = self._loader()
            if session is None:
                break
            try:
                return await session.load(origin, token)
            except WorkerLost:
                continue
        raise AdapterError("unavailable", "no worker is ready to load the adapter", (), 2.0)

    async def accept_card(self, card: ModelCard) -> str | None:
        return await self._accept_card(card)

    def worker_connected(self, session: WorkerSession) -> None:
        self.on_connect(session)

    def worker_changed(self) -> None:
        """Hands out credits while there are some and somebody waits."""
        for entry in self.queue.expire(asyncio.get_running_loop().time()):
            if not entry.payload.done():
                entry.payload.set_exception(DeadlinePassed())
        self._grant()

    def _grant(self) -> None:
        while len(self.queue):
            sessions = {session.worker_id: session for session in self.sessions}
            views = [session.view for session in sessions.values()]
            if not any(view.has_room for view in views):
                return
            entry = self.queue.pop()
            if entry is None or entry.payload.done():
                continue
            chosen = choose(views, entry.flow)
            if chosen is not None:
                worker_id, reason = chosen
                entry.payload.set_result((sessions[worker_id].reserve(), reason))

    def _loader(self) -> WorkerSession | None:
        sessions = {session.worker_id: session for session in self.sessions}
        chosen = choose_loader(session.view for session in sessions.values())
        return None if chosen is None else sessions[chosen]

    @property
    def sessions(self) -> list[WorkerSession]:
        return [client.session for client in self.clients if client.session is not None]
