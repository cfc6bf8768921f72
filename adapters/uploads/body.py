"""The body of an HTTP request, read by a thread as it comes."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Literal

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class BodyBroken(Exception):
    """The body did not come to its end. why: the client left, or sent nothing for too long."""

    def __init__(self, why: Literal["gone", "idle"]) -> None:
        super().__init__(why)
        self.why = why


class BodyStream:
    """Bytes of a body, for a thread other than the event loop's. Raises BodyBroken."""

    def __init__(self, receive: Receive, idle_s: float) -> None:
        self._receive = receive
        self._idle_s = idle_s
        self._loop = asyncio.get_running_loop()
        self._waiting = bytearray()
        self._ended = False
        self._waits: asyncio.Timeout | None = None

    def read(self, count: int) -> bytes:
        """The next bytes: `count` of them, or fewer at the end."""
        while len(self._waiting) < count and not self._ended:
            asyncio.run_coroutine_threadsafe(self._gather(count), self._loop).result()
        return self._taken(count)

    def rest(self) -> bytes:
        """Takes the bytes that had come when the body broke off, and were not read."""
        return self._taken(len(self._waiting))

    def hurry(self, idle_s: float) -> None:
        """Waits so long for the next bytes from now on. For the event loop's thread."""
        self._idle_s = idle_s
        if self._waits is not None and not self._waits.expired():
            self._waits.reschedule(self._loop.time() + idle_s)

    def _taken(self, count: int) -> bytes:
        piece = bytes(memoryview(self._waiting)[:count])
        del self._waiting[:count]
        return piece

    async def _gather(self, count: int) -> None:
        """Takes pieces until `count` bytes wait, or the body has ended."""
        while len(self._waiting) < count and not self._ended:
            try:
                async with asyncio.timeout(self._idle_s) as self._waits:
                    message = await self._receive()
            except TimeoutError:
                raise BodyBroken("idle") from None
            finally:
                self._waits = None
            if message["type"] == "http.disconnect":
                raise BodyBroken("gone")
            piece = message.get("body", b"")
            self._waiting += piece
            self._ended = not message.get("more_body", False)
