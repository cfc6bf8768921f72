"""Counts running requests by adapter name and content, and waits for the last of them."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from loraplex.adapters.common.newest import NewestKept
from loraplex.router.names.served import OwnedName, ServedAdapter
from loraplex.router.policy.rollout import HeldContent

MAX_REMEMBERED = 1 << 16


class Use(NamedTuple):
    """An adapter as running requests named it.

    alias: its registered name. reference: what the caller wrote where it has none.
    """

    alias: OwnedName | None
    reference: str
    held: HeldContent

    @property
    def name(self) -> str:
        return self.reference if self.alias is None else str(self.alias)


class AdapterUse:
    """Counts the running requests of adapters. clock: Unix seconds, for `last_used`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running: dict[Use, int] = {}
        self._last_used = NewestKept[HeldContent, float](MAX_REMEMBERED)
        self._idle = asyncio.Condition()
        self._waiting = 0
        self._waking: set[asyncio.Task[None]] = set()

    def hold(self, adapter: ServedAdapter) -> Callable[[], None]:
        """Notes that a request begins to use an adapter; call the result when it is over."""
        reference = adapter.adapter_id if adapter.alias is None else ""
        use = Use(adapter.alias, reference, adapter.held)
        self._running[use] = self._running.get(use, 0) + 1
        self._last_used[adapter.held] = self._clock()
        return lambda: self._release(use)

    def running(self, name: OwnedName, held: HeldContent | None = None) -> int:
        """Counts running requests that named an adapter so. held: of this content alone."""
        return sum(
            count
            for use, count in self._running.items()
            if use.alias == name and held in (None, use.held)
        )

    def in_use(self) -> list[Use]:
        """Lists uses by name: first the registered ones, as any caller can name references."""
        return sorted(self._running, key=lambda use: (use.alias is None, use.name, use.held))

    def last_used(self, held: HeldContent) -> float | None:
        return self._last_used.get(held)

    async def drained(self, name: OwnedName, held: HeldContent | None = None) -> None:
        """Waits until no running request uses the adapter."""
        self._waiting += 1
        try:
            async with self._idle:
                await self._idle.wait_for(lambda: not self.running(name, held))
        finally:
            self._waiting -= 1

    def _release(self, use: Use) -> None:
        self._last_used[use.held] = self._clock()
        self._running[use] -= 1
        if self._running[use]:
            return
        del self._running[use]
        if self._waiting:
            task = asyncio.get_running_loop().create_task(self._wake())
            self._waking.add(task)
            task.add_done_callback(self._waking.discard)

    async def _wake(self) -> None:
        async with self._idle:
            self._idle.notify_all()
