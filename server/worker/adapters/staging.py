"""Hands adapters in host memory over to the engine: those it asks for, and those it will miss."""

import asyncio
import logging
from collections.abc import Callable

from loraplex.server.engine.messages import SlabMissing, SlabReleased, SlabStaged, ToEngine
from loraplex.server.worker.adapters.adapter_meter import AdapterMeter
from loraplex.server.worker.adapters.adapter_orders import AdapterOrders
from loraplex.server.worker.adapters.host_tier import HostTier, SlabGone, SlabUnavailable

log = logging.getLogger(__name__)

UNFORESEEN = "the adapter could not be brought to the engine"


class Staging:
    """Answers NeedSlab, or is ahead of it. to_engine: sends a frame to the present engine.

    A slab is handed over once until it comes back: from SlabStaged to SlabReleased its digest is
    held. The engine asks for nothing that it was handed and has not released, and both directions
    keep their order. So a NeedSlab for a held digest was sent before the slab arrived, and the slab
    answers it. A NeedSlab that follows a refused slab finds the slab released.
    """

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
        self._held: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def push(self, digest: str) -> bool:
        """Hand it over unasked, if it lies in host memory; after the Submit of a sequence that
        needs it, or the engine gives it back. Whether the engine has it now, or will be answered.
        """
        if digest in self._held or digest in self._tasks:
            return True
        staged = self._tier.take(digest)
        if staged is None:
            return False
        self._orders.load_begins(digest)
        self._hand_over(staged)
        return True

    def need(self, digest: str) -> None:
        """The engine asks for it."""
        if self.push(digest):
            return
        self._orders.load_begins(digest)
        self._tasks[digest] = asyncio.create_task(self._stage(digest))

    def released(self, frame: SlabReleased) -> None:
        """frame.copy_s is None: the engine did not use it, and may ask for it."""
        digest = frame.digest
        self._held.discard(digest)
        nbytes = self._tier.slab_bytes(digest) if frame.copy_s is not None else 0
        self._orders.load_ends(digest, nbytes)
        self._meter.released(digest, nbytes, frame.copy_s)
        if frame.is_finished:
            self._tier.finish(digest)
        self._tier.release(digest)

    def engine_lost(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        self._held.clear()
        self._meter.engine_lost()
        self._tier.release_all()

    def _hand_over(self, staged: SlabStaged) -> None:
        """The host block stays where it is until SlabReleased."""
        digest = staged.layout.digest
        self._held.add(digest)
        self._meter.staged(digest)
        self._to_engine(staged)

    async def _stage(self, digest: str) -> None:
        try:
            self._hand_over(await self._tier.acquire(digest))
        except SlabUnavailable as error:
            level = logging.INFO if isinstance(error, SlabGone) else logging.WARNING
            log.log(level, "adapter %.12s cannot be brought to the engine: %s", digest, error)
            self._to_engine(SlabMissing(digest, str(error)))
        except Exception as error:  # any error at all: its waiters must hear of it
            log.error("adapter %.12s cannot be brought to the engine", digest, exc_info=error)
            self._to_engine(SlabMissing(digest, UNFORESEEN))
        finally:
            # At once, since the engine may ask again. One that is cancelled was taken out before,
            # and another may be in its place.
            if self._tasks.get(digest) is asyncio.current_task():
                del self._tasks[digest]
