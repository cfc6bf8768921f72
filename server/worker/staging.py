"""Brings to the host arena what the engine asks for, beside whatever else the shell does."""

import asyncio
import logging
from collections.abc import Callable

from server.engine.messages import SlabMissing, SlabReleased, SlabStaged, ToEngine
from server.worker.adapter_meter import AdapterMeter
from server.worker.adapter_orders import AdapterOrders
from server.worker.host_tier import HostTier, SlabUnavailable

log = logging.getLogger(__name__)


class Staging:
    """Answers NeedSlab. to_engine: sends a frame to the present engine."""

    def __init__(
        self,
        tier: HostTier,
        orders: AdapterOrders,
        meter: AdapterMeter,
        to_engine: Callable[[ToEngine], None],
    ) -> None:
        self._tier = tier
        self._orders = orders
        self._meter = meter
        self._to_engine = to_engine
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """Slabs that the engine waits for."""
        return len(self._tasks)

    def begin(self, digest: str) -> None:
        self._orders.load_begins(digest)
        self._meter.wanted(digest)
        task = asyncio.create_task(self._stage(digest))
        self._tasks[digest] = task
        task.add_done_callback(lambda done: self._end(digest, done))

    def _end(self, digest: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(digest) is task:  # else the next engine wants it, too
            del self._tasks[digest]

    def released(self, frame: SlabReleased) -> None:
        self._orders.load_ends(frame.digest)
        self._meter.copied(frame.digest, self._tier.slab_bytes(frame.digest), frame.copy_s)
        self._tier.release(frame.digest)

    def engine_lost(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._meter.engine_lost()
        self._tier.release_all()

    async def _stage(self, digest: str) -> None:
        """The host block stays where it is until SlabReleased."""
        try:
            staged = await self._tier.acquire(digest)
        except SlabUnavailable as error:
            log.warning("adapter %.12s cannot be brought to the engine: %s", digest, error)
            self._to_engine(SlabMissing(digest, str(error)))
        else:
            self._meter.staged(digest)
            self._to_engine(SlabStaged(staged.layout, staged.extents, staged.load_s))
