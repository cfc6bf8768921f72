"""Tasks that run as long as a router's process."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

logger = logging.getLogger(__name__)


class Background:
    """Runs the router's background work, and sees when some of it fails.

    failed: set when such work ended in an error, which nothing foresees. The rest of the router
    would still look alive: it is to be stopped, so that another is started.
    """

    def __init__(self) -> None:
        self.failed = asyncio.Event()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    @asynccontextmanager
    async def running(self, *works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Runs works while inside; they are over when this returns."""
        tasks = [self.start(work) for work in works]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.critical("unforeseen error: this router stops", exc_info=error)
            self.failed.set()
