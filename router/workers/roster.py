"""The connections to workers that this router keeps, and what is known over them."""

from collections.abc import Sequence

from loraplex.router.policy.placement.workers import WorkerView
from loraplex.router.workers.client import WorkerClient
from loraplex.router.workers.session import WorkerSession
from loraplex.server.protocol import ModelCard, WorkerHello


class Roster:
    """The workers that this router knows; or those of one base among them, as `of` gives them."""

    def __init__(self, whole: "Roster | None" = None, base: str = "") -> None:
        self._whole = whole
        self._base = base
        self._clients: Sequence[WorkerClient] = ()

    def of(self, base: str) -> "Roster":
        """The workers of one base: those that served it when they were last connected."""
        return Roster(self, base)

    @property
    def clients(self) -> Sequence[WorkerClient]:
        """A client for each worker that was named or discovered, connected or not."""
        if self._whole is None:
            return self._clients
        return [client for client in self._whole.clients if client.base == self._base]

    @clients.setter
    def clients(self, clients: Sequence[WorkerClient]) -> None:
        self._clients = clients

    @property
    def sessions(self) -> list[WorkerSession]:
        """Sessions of connected workers."""
        return [client.session for client in self.clients if client.session is not None]

    @property
    def views(self) -> list[WorkerView]:
        """Views of connected workers."""
        return [session.view for session in self.sessions]

    @property
    def cards(self) -> list[ModelCard]:
        """Cards of connected workers, without their texts."""
        return [client.card for client in self.clients if client.card is not None]

    def accept_worker(self, hello: WorkerHello) -> str | None:
        """Accept a worker. If two workers have one name, the one that started last is believed."""
        for session in self.sessions:
            if session.worker_id != hello.worker_id:
                continue
            if session.epoch >= hello.epoch:
                return (
                    f"another worker {hello.worker_id} is connected, which started as late or "
                    "later: name it once, and give each worker a --worker-id of its own"
                )
            session.fence(f"another worker {hello.worker_id} has started since")
        return None
