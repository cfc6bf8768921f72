"""Slab files of adapters that were packed straight into host memory, or finished there. They are
written in the background, one after the other, so nobody waits for the disk. Nothing is packed or
finished twice."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import SlabLayout
from loraplex.server.worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)

MAX_UNSAVED = 1024

Save = Callable[[SlabLayout, memoryview, Sequence[int], Callable[[], bool]], bool]


class _Slab(NamedTuple):
    layout: SlabLayout
    extents: tuple[int, ...]


class SlabSaver:
    """Write packed adapters from host memory to disk. Runs on the event loop; `thread` writes.

    save: `AdapterStore.save_slab`. reading: what must not be evicted. room: set when that changes
    to nothing, and by others who free host memory.
    """

    def __init__(
        self, memory: memoryview, save: Save, thread: Executor, metrics: WorkerMetrics
    ) -> None:
        self._memory = memory
        self._save = save
        self._thread = thread
        self._metrics = metrics
        self._waiting: dict[str, _Slab] = {}  # in order
        self._writing: asyncio.Task[None] | None = None
        self._stop = threading.Event()
        self.reading: frozenset[str] = frozenset()
        self.room = asyncio.Event()

    def offer(self, layout: SlabLayout, extents: tuple[int, ...]) -> None:
        """A slab that lies in host memory, not on disk. Beyond MAX_UNSAVED it is not written."""
        if len(self._waiting) < MAX_UNSAVED:
            self._waiting[layout.digest] = _Slab(layout, extents)
            self._go_on()

    def forget(self, digest: str) -> None:
        """Forget an adapter that leaves host memory. It must not be in `reading`."""
        self._waiting.pop(digest, None)

    def stop_reading(self) -> None:
        """Give up the present file, since its room is needed; `room` is set soon."""
        self._stop.set()

    def _go_on(self) -> None:
        if self._writing is None and self._waiting:
            digest = next(iter(self._waiting))
            slab = self._waiting.pop(digest)
            self.reading = frozenset((digest,))
            self._stop.clear()
            self._writing = asyncio.create_task(self._write(slab))
            self._writing.add_done_callback(self._written)

    def _written(self, task: asyncio.Task[None]) -> None:
        self._writing = None
        self.reading = frozenset()
        self.room.set()
        if not task.cancelled():
            self._go_on()

    async def _write(self, slab: _Slab) -> None:
        loop = asyncio.get_running_loop()
        arguments = (slab.layout, self._memory, slab.extents, self._stop.is_set)
        try:
            saved = await loop.run_in_executor(self._thread, self._save, *arguments)
        except Exception as error:  # foreseen or not, it is packed again when it is needed again
            self._metrics.slabs_saved.labels("failed").inc()
            log.warning(
                "adapter %.12s is not kept packed: %s",
                slab.layout.digest,
                error,
                exc_info=not isinstance(error, AdapterError),
            )
        else:
            self._metrics.slabs_saved.labels("saved" if saved else "given_up").inc()
