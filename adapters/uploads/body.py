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

    def read(self, count: int) -> bytes:
        """The next bytes: `count` of them, or fewer at the end."""
        while len(self._waiting) < count and not self._ended:
            asyncio.run_coroutine_threadsafe(self._gather(count), self._loop).result()
        piece = bytes(memoryview(self._waiting)[:count])
        del self._waiting[:count]
        return piece

    async def _gather(self, count: int) -> None:
        """Takes pieces until `count` bytes wait, or the body has ended."""
        while len(self._waiting) < count and not self._ended:
            try:
                message = await asyncio.wait_for(self._receive(), self._idle_s)
            except TimeoutError:
                raise BodyBroken("idle") from None
            if message["type"] == "http.disconnect":
                raise BodyBroken("gone")
            piece = message.get("body", b"")
            self._waiting += piece
            self._ended = not message.get("more_body", False)
