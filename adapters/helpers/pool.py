"""Helpers that share a line of questions, for an event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

from loraplex.adapters.helpers.helper import Helper

Ask = Callable[[bytes], Awaitable[bytes]]


class HelperPool:
    """Asks whichever of the helpers is free. name: of their threads."""

    def __init__(self, helpers: Sequence[Helper], name: str) -> None:
        self._all = tuple(helpers)
        self._idle = [*helpers]
        self._threads = ThreadPoolExecutor(2 * len(self._all), name)
        self._slots = asyncio.Semaphore(len(self._all))

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[Ask]:
        """A helper for the caller alone. What is yielded asks the helper, as `ask` does."""
        async with self._slots:
            helper = self._idle.pop()
            try:
                yield partial(self._ask, helper)
            finally:
                self._idle.append(helper)

    async def ask(self, question: bytes) -> bytes:
        """A free helper's answer. Raises as `Helper.ask`. It is stopped when the caller leaves."""
        async with self.taken() as ask:
            return await ask(question)

    async def close(self) -> None:
        """Ends the processes."""
        for helper in self._all:
            await asyncio.to_thread(helper.stop)
        self._threads.shutdown(wait=False)

    async def _ask(self, helper: Helper, question: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        asking = loop.run_in_executor(self._threads, helper.ask, question)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            stopping = loop.run_in_executor(self._threads, helper.stop)
            await asyncio.shield(asyncio.gather(stopping, asking, return_exceptions=True))
            raise
