"""Checks at start that the adapters which `--adapter` declares can be fetched.

Its source is asked at once. When a worker is there, adapters are fetched and judged as a first
request would do, a few at a time. None is loaded to a device. Nobody waits for that. The catalog
notes and logs what cannot be had; it is tried again.
"""

import asyncio
import random
from collections.abc import Callable, Sequence

from loraplex.adapters.errors import AdapterError, AdapterErrorCode
from loraplex.adapters.ref import AdapterRef
from loraplex.router.call import AdapterChoice
from loraplex.router.names.catalog import Catalog

AT_ONCE = 2
POLL_S = 0.25
# A source that is down may be back soon; what an operator must mend takes longer.
_FIRST_PAUSE_S: dict[AdapterErrorCode, float] = {
    "unavailable": 5.0,
    "not_found": 60.0,
    "unauthorized": 60.0,
    "forbidden": 60.0,
}
_MAX_PAUSE_S = 600.0
_JITTER = 0.2


class DeclaredCheck:
    """Checks at the start that the declared adapters can be had. names: of the fleet's adapters.
    is_ready: whether a worker takes work.
    """

    def __init__(
        self, catalog: Catalog, names: Sequence[str], is_ready: Callable[[], bool]
    ) -> None:
        self._catalog = catalog
        self._names = names
        self._is_ready = is_ready
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._ready = asyncio.Event()

    async def run(self) -> None:
        """Checks until each adapter is there, or judged unfit; or until cancelled."""
        following = asyncio.create_task(self._follow())
        try:
            async with asyncio.TaskGroup() as tasks:
                for name in self._names:
                    tasks.create_task(self._watch(name))
        finally:
            following.cancel()

    async def _watch(self, name: str) -> None:
        attempt = 0
        while (error := await self._try(name)) is not None:
            pause_s = pause_after(error, attempt)
            if pause_s is None:
                return
            await asyncio.sleep(pause_s * random.uniform(1 - _JITTER, 1 + _JITTER))
            attempt += 1

    async def _try(self, name: str) -> AdapterError | None:
        choice = AdapterChoice(name, AdapterRef("alias", name))
        try:
            if not self._ready.is_set():  # a worker may take minutes to start
                async with self._slots:
                    await self._catalog.look(choice)
                await self._ready.wait()
            async with self._slots:
                if self._is_open(choice):
                    await self._catalog.resolve(choice)
        except AdapterError as error:
            return error
        return None

    def _is_open(self, choice: AdapterChoice) -> bool:
        """Checks whether an adapter is still to be judged. It is not where a request has found out
        meanwhile, or an operator has taken it away.
        """
        found = self._catalog.rules.registration(choice)
        if found is None or found.state != "registered":
            return False
        return found.digest is None or found.error is not None

    async def _follow(self) -> None:
        """Follows whether there is a worker, for all who wait for one."""
        while True:
            if self._is_ready():
                self._ready.set()
            else:
                self._ready.clear()
            await asyncio.sleep(POLL_S)


def pause_after(error: AdapterError, attempt: int) -> float | None:
    """Seconds until it is worth trying again; None = it was judged, and will be as it is. attempt:
    how often it was tried again already."""
    first = _FIRST_PAUSE_S.get(error.code)
    if first is None:
        return None
    pause_s: float = min(_MAX_PAUSE_S, first * 2.0 ** min(attempt, 16))
    return max(pause_s, min(_MAX_PAUSE_S, error.retry_after_s or 0.0))
