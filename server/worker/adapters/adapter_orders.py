"""Routers' orders for adapters: pins, loads to the device, evictions, tiers.

It decides nothing about room: that is `AdapterArena`'s policy, in the engine and in the host tier.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from typing import Protocol

from loraplex.adapters.common.newest import NewestKept
from loraplex.server.engine.messages import (
    AdapterSettled,
    EvictAdapter,
    PinAdapters,
    PreloadAdapter,
    ToEngine,
    WithdrawPreload,
)
from loraplex.server.protocol import AdapterOrder, AdapterReport, AdapterTiers, TierState
from loraplex.server.worker.adapters.host_tier import HostTier

log = logging.getLogger(__name__)

MAX_ORDERS = 1024
MAX_REMEMBERED = 1 << 16
_NEWEST = 0.2  # weight of the newest load in the mean rate
_LOST = "the engine was lost"

Report = Callable[[AdapterReport], None]


class EngineView(Protocol):
    """Facts about the engine that the orders need."""

    @property
    def engine_is_up(self) -> bool: ...

    def device_state(self, digest: str) -> TierState: ...

    def to_engine(self, frame: ToEngine) -> None: ...


class _Note:
    """Remembered facts about an adapter. Times are monotonic seconds."""

    __slots__ = ("asked_at", "load_s", "used_at")

    def __init__(self) -> None:
        self.asked_at: float | None = None
        self.load_s: float | None = None
        self.used_at: float | None = None


class AdapterOrders:
    """Carry out routers' orders, on the event loop; `on_disk` is asked on threads."""

    def __init__(
        self,
        tier: HostTier,
        on_disk: Callable[[str], bool],
        threads: Executor,
        engine: EngineView,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._on_disk = on_disk
        self._threads = threads
        self._clock = clock
        self._engine = engine
        self._pins: dict[int, frozenset[str]] = {}  # by connection
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[str | None]] = {}  # by number; why not
        self._tasks: dict[asyncio.Task[None], tuple[int, str]] = {}  # connection, order_id
        self._notes = NewestKept[str, _Note](MAX_REMEMBERED)
        self.load_bytes_s = 0.0  # a running mean over adapters that came to the device

    # ---- routers

    @property
    def pins(self) -> frozenset[str]:
        """Digests that any router wants pinned."""
        return frozenset[str]().union(*self._pins.values())

    def pin(self, connection: int, digests: Collection[str]) -> None:
        """Set all adapters that this router wants pinned, from now on and until it leaves."""
        before = self.pins
        self._pins[connection] = frozenset(digests)
        if self.pins != before:
            self._send_pins()

    def order(self, connection: int, order: AdapterOrder, report: Report) -> None:
        """Carry out an order. One AdapterReport answers it, when it is carried out or cannot be."""
        if order.action == "withdraw":
            self._give_up(lambda owner: owner == (connection, order.order_id))
            return
        if len(self._tasks) >= MAX_ORDERS:
            report(AdapterReport(order.order_id, (), "too many orders at once"))
            return
        task = asyncio.create_task(self._carry_out(order, report))
        self._tasks[task] = (connection, order.order_id)
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def disconnected(self, connection: int) -> None:
        before = self.pins
        self._pins.pop(connection, None)
        if self.pins != before:
            self._send_pins()
        self._give_up(lambda owner: owner[0] == connection)

    # ---- the engine

    def engine_ready(self) -> None:
        if self.pins:
            self._send_pins()

    def engine_lost(self) -> None:
        """Settle all open orders as lost: the device memory is gone with the engine."""
        for order in list(self._answers):
            self.settled(AdapterSettled(order, _LOST))

    def settled(self, settled: AdapterSettled) -> None:
        answer = self._answers.pop(settled.order, None)
        if answer is not None and not answer.done():
            answer.set_result(settled.error)

    def used(self, digest: str) -> None:
        self._note(digest).used_at = self._clock()

    def load_begins(self, digest: str) -> None:
        self._note(digest).asked_at = self._clock()

    def load_ends(self, digest: str, nbytes: int) -> None:
        """Note the end of a load. nbytes: that came to the device; 0 = it was given up."""
        note = self._note(digest)
        asked_at, note.asked_at = note.asked_at, None
        if asked_at is None or not nbytes:
            return
        note.load_s = self._clock() - asked_at
        if note.load_s > 0:
            rate = nbytes / note.load_s
            self.load_bytes_s += (_NEWEST if self.load_bytes_s else 1.0) * (
                rate - self.load_bytes_s
            )

    def load_s(self, digest: str) -> float | None:
        """Seconds that the adapter's last load to the device took; None if there was none."""
        note = self._notes.get(digest)
        return None if note is None else note.load_s

    # ---- inside

    def _give_up(self, whose: Callable[[tuple[int, str]], bool]) -> None:
        for task in [task for task, owner in self._tasks.items() if whose(owner)]:
            task.cancel()

    def _note(self, digest: str) -> _Note:
        note = self._notes.get(digest) or _Note()
        self._notes[digest] = note
        return note

    def _send_pins(self) -> None:
        self._tier.pin_only(self.pins)
        self._engine.to_engine(PinAdapters(tuple(sorted(self.pins))))

    async def _carry_out(self, order: AdapterOrder, report: Report) -> None:
        try:
            answer = await self._answer(order)
        except Exception as error:  # any error at all: the router must hear of it
            log.error("an order to %s adapters failed", order.action, exc_info=error)
            answer = AdapterReport(order.order_id, (), "the order could not be carried out")
        report(answer)

    async def _answer(self, order: AdapterOrder) -> AdapterReport:
        error: str | None = None
        if order.action == "load":
            error = await self._load(order.digests)
        elif order.action == "evict":
            error = await self._evict(order.digests)
        loop = asyncio.get_running_loop()
        stored = await loop.run_in_executor(
            self._threads, lambda: {d for d in order.digests if self._on_disk(d)}
        )
        tiers = tuple(self._tiers(digest, digest in stored) for digest in order.digests)
        return AdapterReport(order.order_id, tiers, error)

    async def _load(self, digests: Collection[str]) -> str | None:
        """Why one of them did not come to the device."""
        if not self._engine.engine_is_up:
            return "the engine is being started"
        return next(filter(None, await self._ask(PreloadAdapter, digests)), None)

    async def _evict(self, digests: Collection[str]) -> str | None:
        pinned = self.pins.intersection(digests)
        if pinned:
            return "a router has it pinned"
        if self._engine.engine_is_up:
            for error in await self._ask(EvictAdapter, digests):
                if error not in (None, _LOST):
                    return error
        for digest in digests:
            await self._tier.evict(digest)
        return None

    async def _ask(
        self, kind: type[PreloadAdapter] | type[EvictAdapter], digests: Collection[str]
    ) -> list[str | None]:
        """Why the engine could not, for each; sent at once, while it is known to be up."""
        loop = asyncio.get_running_loop()
        asked: dict[int, asyncio.Future[str | None]] = {}
        for digest in digests:
            order = next(self._numbers)
            asked[order] = self._answers[order] = loop.create_future()
            self._engine.to_engine(kind(order, digest))
        try:
            return await asyncio.gather(*asked.values())
        except asyncio.CancelledError:
            for order, digest in zip(asked, digests, strict=True):
                if kind is PreloadAdapter:
                    self._engine.to_engine(WithdrawPreload(order, digest))
            raise
        finally:
            for order in asked:
                self._answers.pop(order, None)

    def _tiers(self, digest: str, on_disk: bool) -> AdapterTiers:
        note = self._notes.get(digest)
        used_at = None if note is None else note.used_at
        return AdapterTiers(
            digest=digest,
            disk=on_disk,
            host=self._tier.state(digest),
            device=self._engine.device_state(digest),
            pinned=digest in self.pins,
            slab_bytes=self._tier.slab_bytes(digest),
            load_s=self.load_s(digest),
            idle_s=None if used_at is None else self._clock() - used_at,
        )
