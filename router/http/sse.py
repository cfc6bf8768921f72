"""Server-sent events: a response that streams prepared bytes and notices when its client leaves;
and JSON answers of any length, sent as fast as their readers take them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from loraplex.router.http.body import ClientGone

KEEP_ALIVE_S = 15.0
_KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

T = TypeVar("T")


def takes_events(request: Request) -> bool:
    """Whether the client asks for events by its `Accept`."""
    return "text/event-stream" in request.headers.get("accept", "")


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. Raises ClientGone."""
    task = asyncio.current_task()
    assert task is not None
    cancelling = task.cancelling()
    watch = asyncio.create_task(_disconnected(request.receive))
    has_left = False

    def leave(_: "asyncio.Task[None]") -> None:
        nonlocal has_left
        has_left = True
        task.cancel()

    watch.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        # Another's cancellation, that came at the same time, goes on.
        if has_left and task.cancelling() == cancelling + 1:
            raise ClientGone from None
        raise
    finally:
        watch.remove_done_callback(leave)
        watch.cancel()
        if has_left:
            task.uncancel()


class EventStream(Response):
    """Streams `first`, then what `rest` yields; `close` is called however it ends. has_failed: it
    ends, or has ended, with an error event."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        rest: AsyncIterator[bytes],
        close: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**_HEADERS, **headers})
        self._first = first
        self._rest = rest
        self._close = close
        self._idle = True
        self.has_failed = False

    def through(self, change: Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]]) -> None:
        """Sends the stream through a change. change: of what follows the first piece."""
        self._rest = change(self._rest)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = asyncio.create_task(self._stream(send))
        watch = asyncio.create_task(_disconnected(receive))
        try:
            while not (stream.done() or watch.done()):
                self._idle = True
                await asyncio.wait(
                    (stream, watch), timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED
                )
                if self._idle and not (stream.done() or watch.done()):
                    await send(_part(_KEEP_ALIVE))
            if stream.done():
                stream.result()
        finally:
            await _cancel(stream, watch)
            self._close()

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send(_part(self._first))
        async for chunk in self._rest:
            self._idle = False
            await send(_part(chunk))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class LongAnswer(Response):
    """Sends a long answer in pieces. Between two of them others have their turn."""

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes], headers: Mapping[str, str] | None = None) -> None:
        size = sum(map(len, pieces))
        super().__init__(pieces[0], 200, {**(headers or {}), "content-length": str(size)})
        self._rest = pieces[1:]

    @property
    def whole(self) -> bytes:
        return b"".join((bytes(self.body), *self._rest))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        body: bytes | memoryview = self.body
        for piece in self._rest:
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.sleep(0)
            body = piece
        await send({"type": "http.response.body", "body": body, "more_body": False})
