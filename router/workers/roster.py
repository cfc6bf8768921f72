"""The connections to workers that this router keeps, and what is known over them."""

from collections.abc import Sequence

from loraplex.router.policy.placement.workers import WorkerView
from loraplex.router.workers.client import WorkerClient
from loraplex.router.workers.session import WorkerSession
from loraplex.server.protocol import ModelCard


class Roster:
    """The workers that this router knows. clients: one for each worker that was named or
    discovered, connected or not.
    """

    def __init__(self) -> None:
        self.clients: Sequence[WorkerClient] = ()

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
