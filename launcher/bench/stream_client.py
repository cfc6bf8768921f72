"""A lean HTTP/1.1 client for many token streams: a connection a request, a time an event."""

import asyncio
import ssl
from typing import cast
from urllib.parse import urlsplit

import httptools


class StreamProtocol(asyncio.Protocol):
    """Sends one POST and notes when each server-sent event arrives."""

    def __init__(self, request: bytes, clock: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.clock = clock
        self.parser = httptools.HttpResponseParser(self)
        self.done: asyncio.Future[None] = clock.create_future()
        self.status = 0
        self.retry_after_s: float | None = None
        self.event_s: list[float] = []
        self.last_events: list[bytes] = []
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
        if name.lower() == b"retry-after":
            self.retry_after_s = float(value)

    def on_body(self, body: bytes) -> None:
        self.status = self.parser.get_status_code()
        *events, self.buffer = (self.buffer + body).split(b"\n\n")
        now = self.clock.time()
        for event in events:
            if event.startswith(b"data:") and event[5:].strip() != b"[DONE]":
                self.event_s.append(now)
                self.last_events = [*self.last_events[-1:], event[5:]]

    def on_message_complete(self) -> None:
        self.status = self.parser.get_status_code()
        self.finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.finish(exc or ConnectionResetError("closed before the answer ended"))

    def finish(self, error: Exception | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
        self.transport.close()


async def post_stream(
    url: str, body: bytes, headers: dict[str, str], timeout_s: float
) -> StreamProtocol:
    """Posts and reads to the end. Raises OSError, TimeoutError or HttpParserError."""
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
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        _, protocol = await loop.create_connection(
            lambda: StreamProtocol(head.encode() + b"\r\n" + body, loop),
            parts.hostname,
            parts.port or (443 if secure else 80),
            ssl=secure,
        )
        await protocol.done
    return protocol
