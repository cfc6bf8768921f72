"""Runs work on long texts in threads, a bounded amount at once, to keep the event loop free."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from router.text.pieces import in_pieces

# Encoding runs at a few MB/s: below this size a thread costs more than it saves.
INLINE_SIZE = 16 << 10
# A tokenizer uses up to 400 bytes of memory a character while it works.
SIZE_AT_ONCE = 2 << 20
# JSON is read so many times as fast as text is encoded.
_PARSING = 8
# Between pieces of JSON. Python takes the interpreter from a thread that asks for it on and on only
# every 5 ms, and the event loop asks several times for each request.
_PAUSE_S = 0.0002

T = TypeVar("T")


class LongTexts:
    """Runs work in threads, in the order in which it comes; what is larger than `most` alone."""

    def __init__(self, most: int = SIZE_AT_ONCE) -> None:
        self._most = self._free = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """size: characters or ids that `work` goes through. Short work is done at once, here."""
        if size <= INLINE_SIZE:
            return work()
        size = min(size, self._most)
        await self._enter(size)
        job = asyncio.get_running_loop().run_in_executor(None, work)
        job.add_done_callback(lambda job: self._done(size, job))
        # Nobody stops a thread: its memory is in use until it ends, though its caller has left.
        return await asyncio.shield(job)

    async def parsed(self, body: bytes, parse: Callable[[bytes], T]) -> T:
        """What `parse` makes of a request's body."""
        return await self.run(len(body) // _PARSING, lambda: parse(body))

    async def written(self, size: int, answer: Callable[[], Any]) -> list[bytes]:
        """JSON of what `answer` makes, in pieces (`in_pieces`), at least one. size: as of `run`."""
        pause_s = 0.0 if size <= INLINE_SIZE else _PAUSE_S
        return await self.run(size, lambda: _pieces(answer(), pause_s))

    async def _enter(self, size: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._admit()  # there may be room for who stood behind it
            else:
                self._leave(size)
            raise

    def _done(self, size: int, job: "asyncio.Future[T]") -> None:
        if not job.cancelled():
            job.exception()  # known, whether or not somebody still waits for it
        self._leave(size)

    def _leave(self, size: int) -> None:
        self._free += size
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= self._free):
            size, turn = self._waiting.popleft()
            if not turn.done():
                self._free -= size
                turn.set_result(None)


def _pieces(answer: Any, pause_s: float) -> list[bytes]:
    pieces = []
    for piece in in_pieces(answer):
        pieces.append(piece)
        if pause_s:
            time.sleep(pause_s)
    return pieces
