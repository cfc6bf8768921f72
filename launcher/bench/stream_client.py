"""A lean HTTP/1.1 client for many token streams: a connection a request, a time an event.

Times are seconds of `time.monotonic`, which all processes of a machine share.
"""

import asyncio
import ssl
import time
from typing import cast
from urllib.parse import urlsplit

import httptools

START_HEADER = b"x-loraplex-start"


class StreamProtocol(asyncio.Protocol):
    """Sends one POST and notes when each server-sent event arrives.

    start: what the server said of the adapter. began: set with the first event, or the end.
    """

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.parser = httptools.HttpResponseParser(self)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.began = asyncio.Event()
        self.status = 0
        self.retry_after_s: float | None = None
        self.start: str | None = None
        self.event_s: list[float] = []
        self.last_events: tuple[bytes, ...] = ()
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio's
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.finish(error)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == START_HEADER:
            self.start = value.decode("latin-1")
        elif name.lower() == b"retry-after":
            self.retry_after_s = float(value)

    def on_body(self, body: bytes) -> None:
        self.status = self.parser.get_status_code()
        *events, self.buffer = (self.buffer + body).split(b"\n\n")
        now = time.monotonic()
        for event in events:
            if event.startswith(b"data:") and event[5:].strip() != b"[DONE]":
                self.event_s.append(now)
                self.last_events = (*self.last_events[-1:], event[5:])
                self.began.set()

    def on_message_complete(self) -> None:
        self.status = self.parser.get_status_code()
        self.finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.finish(exc or ConnectionResetError("closed before the answer ended"))

    def finish(self, error: Exception | None) -> None:
        self.began.set()
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
        self.transport.close()

    def abandon(self) -> None:
        """The client leaves before the end; `done` fails, and nobody needs to look."""
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.transport.close()


async def open_stream(url: str, body: bytes, headers: dict[str, str]) -> StreamProtocol:
    """Posts, and reads from then on; `done` ends with the answer. Raises OSError."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    lines = {
        "Host": parts.netloc,
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **headers,
    }
    head = f"POST {parts.path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items())
    _, protocol = await asyncio.get_running_loop().create_connection(
        lambda: StreamProtocol(head.encode() + b"\r\n" + body),
        parts.hostname,
        parts.port or (443 if secure else 80),
        ssl=secure,
    )
    return protocol


async def post_stream(
    url: str, body: bytes, headers: dict[str, str], timeout_s: float
) -> StreamProtocol:
    """Posts and reads to the end. Raises OSError, TimeoutError or HttpParserError."""
    async with asyncio.timeout(timeout_s):
        protocol = await open_stream(url, body, headers)
        await protocol.done
    return protocol
