"""Opens and keeps connections to workers, named ones and discovered ones."""

import asyncio
from collections.abc import Callable, Collection, Sequence

from loraplex.router.workers.client import WorkerClient
from loraplex.router.workers.roster import Roster

MAX_WORKERS = 4096


class Connections:
    """Keeps a client for each worker that is named or discovered. urls: of workers that the
    operator named. new_client: makes the client of a URL.

    `roster` lists all clients.
    """

    def __init__(
        self, roster: Roster, urls: Sequence[str], new_client: Callable[[str], WorkerClient]
    ) -> None:
        self._roster = roster
        self._new_client = new_client
        self._named = tuple(new_client(url) for url in dict.fromkeys(urls))
        self._found: dict[WorkerClient, asyncio.Task[None]] = {}
        roster.clients = self._named

    def discovered(self, urls: Collection[str]) -> None:
        """Connects to all workers that enlisted themselves; connected ones are never dropped."""
        urls = {url.rstrip("/") for url in urls}
        known = {client.url for client in self._roster.clients}
        for url in sorted(urls - known)[: MAX_WORKERS - len(known)]:
            client = self._new_client(url)
            self._found[client] = asyncio.create_task(client.run())
        for client in [c for c in self._found if c.url not in urls and c.session is None]:
            self._found.pop(client).cancel()
        self._roster.clients = (*self._named, *self._found)

    async def run(self) -> None:
        """Keeps the connections until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for client in self._named:
                    tasks.create_task(client.run())
                await asyncio.get_running_loop().create_future()  # new ones may be discovered
        finally:
            for task in self._found.values():
                task.cancel()
            await asyncio.gather(*self._found.values(), return_exceptions=True)
