"""Packed adapters in host memory that the engine maps: staged from disk, pinned while it copies.

What lies where and who must go is `AdapterArena`'s policy. Everything here runs on the event loop;
only reading from disk, packing and writing to it are done on threads.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing

import msgspec

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import SlabLayout
from loraplex.adapters.slab.file import SlabGarbled, SlabSource
from loraplex.server.engine.memory.residency import AdapterArena, EvictionReason, Placement, Span
from loraplex.server.engine.messages import SlabStaged
from loraplex.server.protocol import TierState
from loraplex.server.worker.adapters.ahead import Ahead
from loraplex.server.worker.adapters.slab_saver import SlabSaver
from loraplex.server.worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)

MAX_PREFETCHES = 64
# Hints that are remembered; what nobody waits for is staged while fewer than so many slabs are.
MAX_HINTS = 256
HINTED_AT_ONCE = 2


class SlabUnavailable(Exception):
    """The adapter cannot be brought to host memory; str() may be shown to the client."""


class SlabGone(SlabUnavailable):
    """Error of a slab that gave way in the store since a router had it admitted. The router will
    have it fetched again.
    """


class HostTier:
    """Keep adapters in host memory. `acquire` stages and pins, `take` pins what is here, `release`
    unpins; the rest is evicted when room is needed.
    """

    def __init__(
        self,
        memory: memoryview,
        arena: AdapterArena,
        open_slab: Callable[[str], SlabSource],
        threads: Executor,
        saver: SlabSaver,
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with no adapter in memory. saver: keeps on disk what is packed here."""
        self._clock = clock
        self._saver = saver
        self._memory = memory
        self._metrics = metrics
        self._arena = arena
        self._open_slab = open_slab
        self._threads = threads
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._hints: dict[str, None] = {}  # in order
        self._layouts: dict[str, SlabLayout] = {}
        self._load_s: dict[str, float] = {}  # not reported yet
        # Callers on their way to a pin: what they wait for must not be evicted before they run.
        self._awaited: Counter[str] = Counter()
        self._ahead = Ahead(arena.num_extents)
        self._room = saver.room

    @property
    def used_bytes(self) -> int:
        return self._arena.used_bytes

    @property
    def evictions(self) -> Mapping[EvictionReason, int]:
        return self._arena.evictions

    def measure(self) -> None:
        """Sets the metrics to what is here now."""
        self._metrics.adapters.labels("host").set(self._arena.num_adapters)
        self._metrics.adapter_bytes.labels("host").set(self._arena.used_bytes)
        self._metrics.note_host_evictions(self._arena.evictions)

    def pin_only(self, digests: Collection[str]) -> None:
        """Keep these here once they are here, as long as they leave room for one other."""
        self._arena.pin_only(digests)
        self._room.set()

    def state(self, digest: str) -> TierState:
        state = self._arena.stage(digest)
        return "loading" if state == "absent" and digest in self._jobs else state

    @property
    def extents(self) -> int:
        return self._arena.num_extents

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests that have a place here, least recently used first; staged ones come last."""
        return (*self._arena.ready, *self._arena.loading)

    def spans(self, digest: str) -> tuple[Span, ...]:
        return self._arena.spans(digest)

    def slab_bytes(self, digest: str) -> int:
        """0 unless it is here."""
        layout = self._layouts.get(digest)
        return 0 if layout is None else layout.nbytes

    async def evict(self, digest: str) -> None:
        """Free it, once it is staged if it is on its way, and copied if the engine reads it."""
        while True:
            job = self._jobs.get(digest)
            if job is not None and not job.done():
                await asyncio.wait([job])
            elif self._arena.stage(digest) == "absent":
                return
            elif not self._arena.leases(digest) and digest not in self._kept():
                self._arena.drop(digest)
                self._forget((digest,))
                self._room.set()
            else:
                self._room.clear()
                if digest in self._saver.reading:
                    self._saver.stop_reading()
                await self._room.wait()

    def _kept(self) -> Collection[str]:
        """Digests that are not to be evicted, whoever needs the room."""
        return self._saver.reading.union(self._awaited)

    def prefetch(self, digest: str) -> None:
        """Begin to stage it: the engine will ask for it soon. Failures show when it does, and so
        does want of room."""
        if digest not in self._layouts and len(self._jobs) < MAX_PREFETCHES:
            self._begin_ahead(digest)

    def hint(self, digests: Iterable[str]) -> None:
        """Stage adapters that may be wanted later, when little else is being staged. Failures are
        forgotten, and so are hints beyond MAX_HINTS.
        """
        for digest in digests:
            if self.state(digest) == "absent" and len(self._hints) < MAX_HINTS:
                self._hints[digest] = None
        self._follow_hints()

    def _follow_hints(self) -> None:
        while self._hints and len(self._jobs) < HINTED_AT_ONCE:
            digest = next(iter(self._hints))
            del self._hints[digest]
            self._begin_ahead(digest)

    def _begin_ahead(self, digest: str) -> None:
        """Unless even the smallest would push out another: to open it would be in vain."""
        if self._comes_ahead(1):
            self._job(digest)

    def _comes_ahead(self, extents: int) -> bool:
        """Whether there is room for what nobody waits for yet."""
        free = self._arena.free_extents >= extents
        return free or self._ahead.has_room(extents, self._clock())

    def take(self, digest: str) -> SlabStaged | None:
        """Pin an adapter that is here until `release`, and return its place; else None."""
        placement = self._arena.acquire(digest)
        if placement is None:
            return None
        self._ahead.discard(digest)
        load_s = self._load_s.pop(digest, 0.0)
        return SlabStaged(self._layouts[digest], placement.extents, load_s)

    async def acquire(self, digest: str) -> SlabStaged:
        """Wait for an adapter, pin it in host memory until `release`, and return its place. Raises
        SlabUnavailable, or what was not foreseen.
        """
        self._awaited[digest] += 1
        try:
            while (staged := self.take(digest)) is None:
                # Shielded: another caller may wait for the same job.
                await asyncio.shield(self._job(digest))
            return staged
        finally:
            self._awaited[digest] -= 1
            if not self._awaited[digest]:
                del self._awaited[digest]
            self._room.set()

    def release(self, digest: str) -> None:
        if self._arena.leases(digest):
            self._arena.release(digest)
            self._room.set()

    def finish(self, digest: str) -> None:
        """The engine has finished it where it lies (`SlabLayout.is_finished`); it is pinned."""
        placement = self._arena.placement(digest)
        if placement is None:
            raise ValueError(f"adapter {digest} is not here")
        layout = msgspec.structs.replace(self._layouts[digest], is_finished=True)
        self._layouts[digest] = layout
        self._saver.offer(layout, placement.extents)

    def release_all(self) -> None:
        """The engine is gone, and with it every pin. What it may have left half finished goes."""
        for digest in self._arena.ready:
            is_pinned = self._arena.leases(digest) > 0
            while self._arena.leases(digest):
                self._arena.release(digest)
            if is_pinned and self._layouts[digest].is_to_finish:
                self._arena.drop(digest)
                self._forget((digest,))
        self._room.set()

    def _job(self, digest: str) -> asyncio.Task[None]:
        job = self._jobs.get(digest)
        if job is None or job.done():  # what is over is taken out a turn of the loop later
            self._hints.pop(digest, None)
            job = self._jobs[digest] = asyncio.create_task(self._stage(digest))
            job.add_done_callback(lambda done: self._end_job(digest, done))
        return job

    def _end_job(self, digest: str, job: asyncio.Task[None]) -> None:
        if self._jobs[digest] is job:
            del self._jobs[digest]
        self._room.set()
        if not job.cancelled():
            job.exception()  # whoever waits gets it; a prefetch has nobody who waits
            self._follow_hints()

    async def _stage(self, digest: str) -> None:
        """Bring an adapter to host memory, and count the result. Raises SlabUnavailable, or what
        was not foreseen.
        """
        started = time.monotonic()
        try:
            ready = await self._bring(digest)
        except SlabGone:
            self._metrics.staged.labels("gone").inc()
            raise
        except Exception:
            self._metrics.staged.labels("failed").inc()
            raise
        if ready:
            self._metrics.staged.labels("ready").inc()
            self._metrics.load_took("stage", time.monotonic() - started)

    async def _bring(self, digest: str) -> bool:
        """Read an adapter into host memory. False: nobody waits yet, and there is no room."""
        loop = asyncio.get_running_loop()
        try:
            slab = await loop.run_in_executor(self._threads, self._open_slab, digest)
            with closing(slab):
                extents = await self._place(digest, slab.layout)
                if extents is None:
                    return False
                started = self._clock()
                try:
                    copy = slab.copy_runs
                    await loop.run_in_executor(self._threads, copy, self._memory, extents)
                except BaseException:
                    self._arena.drop(digest)
                    self._ahead.discard(digest)
                    raise
        except SlabGarbled as error:
            log.error("adapter %.12s is packed anew: %s", digest, error)
            return await self._bring(digest)
        except AdapterError as error:
            kind = SlabGone if error.code == "not_found" else SlabUnavailable
            raise kind(error.message) from error
        except OSError as error:
            log.error("adapter %.12s cannot be read: %s", digest, error)
            raise SlabUnavailable("its packed weights cannot be read from disk") from error
        load_s = self._clock() - started
        self._arena.finish(digest, load_s)
        self._layouts[digest] = slab.layout
        self._load_s[digest] = load_s
        # A file of what the engine will change would be torn, and of no use soon.
        if not slab.on_disk and not slab.layout.is_to_finish:
            self._saver.offer(slab.layout, extents)
        return True

    async def _place(self, digest: str, layout: SlabLayout) -> tuple[int, ...] | None:
        """Wait for room. For whom a sequence waits it comes: the engine gives back what has no room
        on the device, unless others run dry for it. None: nobody waits, and there is none."""
        while True:
            self._room.clear()
            placement = self._try_to_place(digest, layout)
            if placement is not None:
                self._forget(placement.evicted)
                if digest not in self._awaited:
                    self._ahead.add(digest, sum(layout.all_runs), self._clock())
                return placement.extents
            if digest not in self._awaited:
                return None
            await self._room.wait()

    def _try_to_place(self, digest: str, layout: SlabLayout) -> Placement | None:
        """Place an adapter in host memory, if there is room. None: not now. Raises SlabUnavailable
        if never.

        Pins that leave no room are ignored: pinned adapters lie on the device too, so serving
        another adapter is worth more than their copy here.
        """
        arena, pins, runs = self._arena, self._arena.pins, layout.all_runs
        if arena.refusal(runs) is not None:
            arena.pin_only(())
        try:
            refusal = arena.refusal(runs)
            if refusal is not None:
                raise SlabUnavailable(f"{refusal} (option host_adapter_memory)")
            return self._make_room(digest, runs)
        finally:
            arena.pin_only(pins)

    def _make_room(self, digest: str, runs: Sequence[int]) -> Placement | None:
        """Make room for an adapter, and place it. What was brought ahead for others gives way only
        if somebody waits for this one, and there is no other way.
        """
        awaited = digest in self._awaited
        if not awaited and not self._comes_ahead(sum(runs)):
            return None
        kept = self._kept()
        placement = self._arena.place(digest, runs, {*kept, *self._ahead.kept(self._clock())})
        if placement is None and awaited:
            placement = self._arena.place(digest, runs, kept)
            if placement is None and self._arena.would_fit(runs, ()):
                self._saver.stop_reading()
        return placement

    def _forget(self, evicted: Iterable[str]) -> None:
        for digest in evicted:
            del self._layouts[digest]
            self._ahead.discard(digest)
            self._load_s.pop(digest, None)
            self._saver.forget(digest)
