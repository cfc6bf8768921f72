"""Brings pictures from routers to the engine: files in, patches out. On the event loop.

The engine says which pictures it waits for. Their files are kept for a while, or else asked of the
router whose sequence it is; a file is decoded once, and its patches lie in shared memory until the
engine has taken them.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from loraplex.server.engine.messages import EncodePicture, PictureFailed, PictureTaken, ToEngine
from loraplex.server.protocol import BACKGROUND_PRIORITY, GenerateRequest, Grid
from loraplex.server.worker.metrics import WorkerMetrics
from loraplex.server.worker.pictures.decoder import NoPatches, PictureDecoder
from loraplex.server.worker.pictures.segments import PatchSegment

# Of files that may be asked for again, by another sequence or after a preemption.
MAX_KEPT_BYTES = 256 << 20
# In shared memory at once. The engine takes each as it comes.
MAX_SEGMENTS = 8


class _Wanted(NamedTuple):
    """A picture that the engine waits for. tenant, is_batch: of the sequence that asked first."""

    grid: Grid
    tenant: str
    is_batch: bool


class PictureService:
    """Answers PicturesWanted of the present engine. to_engine: sends the engine a frame."""

    def __init__(
        self,
        decoder: PictureDecoder,
        to_engine: Callable[[ToEngine], None],
        metrics: WorkerMetrics,
    ) -> None:
        self._decoder = decoder
        self._to_engine = to_engine
        self._metrics = metrics
        self._files: OrderedDict[str, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._wanted: dict[str, _Wanted] = {}
        self._decoding: dict[str, asyncio.Task[None]] = {}
        self._segments: dict[str, PatchSegment] = {}
        self._room = asyncio.Semaphore(MAX_SEGMENTS)

    def wanted(self, request: GenerateRequest, pictures: tuple[str, ...]) -> tuple[str, ...]:
        """The engine waits for these pictures of a request. Returns those whose files are not
        here; `arrived` brings them."""
        grids = {span.picture: span.grid for span in request.pictures}
        is_batch = request.priority >= BACKGROUND_PRIORITY
        for picture in pictures:
            known = _Wanted(grids[picture], request.tenant, is_batch)
            self._wanted.setdefault(picture, known)
            self._begin(picture)
        return tuple(p for p in pictures if p not in self._files)

    def arrived(self, picture: str, data: bytes) -> None:
        """A picture's file came from a router. picture: its SHA-256."""
        if picture not in self._files:
            self._files[picture] = data
            self._kept_bytes += len(data)
        while self._kept_bytes > MAX_KEPT_BYTES:
            _, oldest = self._files.popitem(last=False)
            self._kept_bytes -= len(oldest)
        self._begin(picture)

    def taken(self, frame: PictureTaken) -> None:
        """The engine does not read a segment any more."""
        segment = self._segments.pop(frame.segment, None)
        if segment is not None:
            self._drop(segment)

    def engine_lost(self) -> None:
        """Forgets what the lost engine waited for."""
        self._wanted.clear()
        self._decoding.clear()  # what they make is dropped
        while self._segments:
            self._drop(self._segments.popitem()[1])

    async def close(self) -> None:
        """Ends the decoding processes, and removes what lies in shared memory."""
        self.engine_lost()
        await self._decoder.close()

    def _begin(self, picture: str) -> None:
        if picture in self._wanted and picture in self._files and picture not in self._decoding:
            self._files.move_to_end(picture)
            self._decoding[picture] = asyncio.create_task(self._decode(picture))

    async def _decode(self, picture: str) -> None:
        wanted, data = self._wanted[picture], self._files[picture]
        await self._room.acquire()
        segment, failed, outcome = None, None, "decoded"
        began = time.monotonic()
        try:
            segment = await self._decoder.patches(data, *wanted)
        except NoPatches as error:
            failed = PictureFailed(picture, error.message, error.code)
            outcome = "refused" if error.code == "invalid_image" else "failed"
        self._metrics.images.labels(outcome).inc()
        self._metrics.image_decode_s.observe(time.monotonic() - began)
        is_late = self._decoding.get(picture) is not asyncio.current_task()
        if segment is None or is_late:
            self._drop(segment)
        if is_late:
            return
        del self._wanted[picture], self._decoding[picture]
        if failed is not None:
            self._to_engine(failed)
        elif segment is not None:
            self._segments[segment.name] = segment
            place = (segment.name, segment.rows, segment.columns)
            self._to_engine(EncodePicture(picture, wanted.grid, *place))

    def _drop(self, segment: PatchSegment | None) -> None:
        """Gives back the room of a segment, be it that none was made."""
        if segment is not None:
            segment.remove()
        self._room.release()
