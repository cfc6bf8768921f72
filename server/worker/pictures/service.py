"""Brings pictures from routers to the engine: files in, patches out. On the event loop.

The engine says which pictures it waits for. Their files are kept for a while, or else asked of the
router whose sequence it is; a file is decoded once for each size, and its patches lie in host
memory until the engine has taken them.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from loraplex.server.engine.messages import EncodePicture, PictureFailed, PictureTaken, ToEngine
from loraplex.server.protocol import BACKGROUND_PRIORITY, GenerateRequest, Grid, PictureSpan
from loraplex.server.worker.metrics import WorkerMetrics
from loraplex.server.worker.pictures.decoder import NoPatches, PictureDecoder
from loraplex.server.worker.pictures.jobs import DecodeJob
from loraplex.server.worker.pictures.segments import MAX_SEGMENTS, PatchSegment

log = logging.getLogger(__name__)

# Of files that may be asked for again, by another sequence or after a preemption.
MAX_KEPT_BYTES = 256 << 20
# Of files that wait to be decoded, kept or not.
MAX_WAITING_BYTES = 1 << 30
# SHA-256 of a picture's file, and the patches that it is to have.
_Sized = tuple[str, Grid]


@dataclass(slots=True)
class _Wanted:
    """A picture that the engine waits for. span: one of its places. tenant, is_batch: of the
    sequence that asked first. askers: keys of the sequences that need it and have not ended."""

    span: PictureSpan
    tenant: str
    is_batch: bool
    askers: set[int] = field(default_factory=set)


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
        self._wanted: dict[_Sized, _Wanted] = {}
        self._asked: dict[int, set[_Sized]] = {}  # pictures of each sequence that asked for some
        self._decoding: dict[_Sized, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # these, and what lost engines waited for
        self._waiting_bytes = 0
        self._segments: dict[int, PatchSegment] = {}
        self._room = asyncio.Semaphore(MAX_SEGMENTS)

    def wanted(
        self, key: int, request: GenerateRequest, spans: tuple[PictureSpan, ...]
    ) -> tuple[str, ...]:
        """The engine waits for these pictures of a sequence. Returns those whose files are not
        here; `arrived` brings them."""
        is_batch = request.priority >= BACKGROUND_PRIORITY
        for span in spans:
            sized = span.picture, span.grid
            self._asked.setdefault(key, set()).add(sized)
            known = _Wanted(span, request.tenant, is_batch)
            self._wanted.setdefault(sized, known).askers.add(key)
            self._begin(sized)
        missing = dict.fromkeys(span.picture for span in spans)
        return tuple(picture for picture in missing if picture not in self._files)

    def ended(self, key: int) -> None:
        """A sequence waits for nothing any more."""
        for sized in self._asked.pop(key, ()):
            wanted = self._wanted.get(sized)
            if wanted is not None:
                wanted.askers.discard(key)
                if not wanted.askers and sized not in self._decoding:
                    del self._wanted[sized]

    def arrived(self, picture: str, data: bytes) -> None:
        """A picture's file came from a router. picture: its SHA-256."""
        if picture not in self._files:
            self._files[picture] = data
            self._kept_bytes += len(data)
        while self._kept_bytes > MAX_KEPT_BYTES:
            _, oldest = self._files.popitem(last=False)
            self._kept_bytes -= len(oldest)
        for sized in [sized for sized in self._wanted if sized[0] == picture]:
            self._begin(sized)

    def taken(self, frame: PictureTaken) -> None:
        """The engine does not read a segment any more."""
        segment = self._segments.pop(frame.segment, None)
        if segment is not None:
            self._drop(segment)

    def engine_lost(self) -> None:
        """Forgets what the lost engine waited for."""
        for wanted in self._wanted.values():
            wanted.askers.clear()
        self._wanted.clear()
        self._asked.clear()
        self._decoding.clear()  # what they make is dropped
        while self._segments:
            self._drop(self._segments.popitem()[1])

    async def close(self) -> None:
        """Ends the decoding processes, and removes what lies in host memory."""
        self.engine_lost()
        await self._decoder.close()
        await asyncio.gather(*self._tasks)

    def _begin(self, sized: _Sized) -> None:
        """Decodes a picture if it is wanted, and its file is here."""
        wanted, data = self._wanted.get(sized), self._files.get(sized[0])
        if wanted is None or data is None or sized in self._decoding:
            return
        self._files.move_to_end(sized[0])
        if self._waiting_bytes + len(data) > MAX_WAITING_BYTES:
            del self._wanted[sized]
            message = "too many bytes of pictures wait to be decoded"
            self._to_engine(PictureFailed(*sized, message, "overloaded"))
            return
        self._waiting_bytes += len(data)
        task = asyncio.create_task(self._decode(sized, wanted, data))
        self._decoding[sized] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _decode(self, sized: _Sized, wanted: _Wanted, data: bytes) -> None:
        segment, failed = None, None
        try:
            segment = await self._patches(wanted, data)
        except NoPatches as error:
            failed = PictureFailed(*sized, error.message, error.code)
        self._waiting_bytes -= len(data)
        is_late = self._decoding.get(sized) is not asyncio.current_task()
        if is_late:
            self._drop(segment)
            return
        del self._wanted[sized], self._decoding[sized]
        if failed is not None:
            self._to_engine(failed)
        elif segment is not None:
            self._segments[segment.begin] = segment
            place = (segment.begin, segment.rows, segment.columns)
            self._to_engine(EncodePicture(*sized, *place))

    async def _patches(self, wanted: _Wanted, data: bytes) -> PatchSegment | None:
        """Makes patches of a file, and counts it. None: no sequence waits for the
        picture any more. Raises NoPatches."""
        began, outcome = time.monotonic(), "failed"
        try:
            segment = await self._decoded(wanted, data)
            outcome = "" if segment is None else "decoded"
        except NoPatches as error:
            outcome = "refused" if error.code == "invalid_image" else "failed"
            raise
        except Exception as error:  # whatever it is, sequences wait for an answer
            log.error("a picture could not be decoded", exc_info=error)
            raise NoPatches("internal", "the picture could not be decoded") from error
        finally:
            if outcome:
                self._metrics.images.labels(outcome).inc()
                self._metrics.image_decode_s.observe(time.monotonic() - began)
        return segment

    async def _decoded(self, wanted: _Wanted, data: bytes) -> PatchSegment | None:
        """Decodes a file in its turn, once there is room for its patches. Raises NoPatches."""
        with ExitStack() as held:
            async with self._decoder.turn(wanted.tenant, wanted.is_batch):
                await self._room.acquire()
                held.callback(self._room.release)
                if not wanted.askers:
                    return None
                job = DecodeJob(data, wanted.span.grid, wanted.span.pixels)
                pixels = await self._decoder.pixels(job)
            segment = await self._decoder.patches(pixels, wanted.span.grid)
            held.pop_all()
            return segment

    def _drop(self, segment: PatchSegment | None) -> None:
        """Gives back a segment and its room, if one was made."""
        if segment is not None:
            segment.remove()
            self._room.release()
