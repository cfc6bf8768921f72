"""A lean HTTP/1.1 client for many token streams: a connection a request, a time an event.

Times are seconds of `time.monotonic`, which all processes of a machine share.
"""

import asyncio
import ssl
import time
from functools import cache
from typing import cast
from urllib.parse import SplitResult, urlsplit

import httptools

from loraplex.adapters.common.authorities import trusted_context
from loraplex.launcher.bench.load.answers import EventReader, StreamedAnswer
from loraplex.launcher.refusals import retry_after_s

START_HEADER = b"x-loraplex-start"
# Kept of a body that has no events: enough for its message.
_HEAD_BYTES = 16 << 10


class StreamProtocol(asyncio.Protocol):
    """Sends one POST and notes when each server-sent event arrives.

    start: what the server said of the adapter. head: how the body begins. began: set with the
    first token, or the end.
    """

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.parser = httptools.HttpResponseParser(self)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.began = asyncio.Event()
        self.status = 0
        self.retry_after_s: float | None = None
        self.start: str | None = None
        self.answer = StreamedAnswer()
        self.head = b""
        self._events = EventReader()

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
            self.retry_after_s = retry_after_s(value.decode("latin-1"), time.time())

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        now = time.monotonic()
        if len(self.head) < _HEAD_BYTES:
            self.head += body[: _HEAD_BYTES - len(self.head)]
        if self.status != 200:
            return
        for event in self._events.feed(body):
            self.answer.take(event, now)
        if self.answer.has_text:
            self.began.set()

    def on_message_complete(self) -> None:
        self.finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends an answer without a length; an early close is an error."""
        is_said = self.answer.has_ended or self.answer.fault or self.status not in (0, 200)
        if exc is None and not is_said:
            exc = ConnectionResetError("closed before the answer ended")
        self.finish(exc)

    def finish(self, error: Exception | None) -> None:
        self.began.set()
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
        self.transport.close()

    def abandon(self) -> None:
        """Leaves before the end; `done` fails, and nobody needs to look."""
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.transport.close()


@cache
def _tls() -> ssl.SSLContext:
    """Makes one context for all connections: that takes longer than a token."""
    return trusted_context()


def request_bytes(parts: SplitResult, body: bytes, headers: dict[str, str]) -> bytes:
    """A POST of JSON, whole. parts: of the URL."""
    lines = {
        "Host": parts.netloc.rpartition("@")[2],
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **headers,
    }
    head = f"POST {parts.path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items())
    return head.encode() + b"\r\n" + body


async def open_stream(url: str, body: bytes, headers: dict[str, str]) -> StreamProtocol:
    """Posts, and reads from then on; `done` ends with the answer. Raises OSError."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    secure = _tls() if parts.scheme == "https" else None
    request = request_bytes(parts, body, headers)
    try:
        _, protocol = await asyncio.get_running_loop().create_connection(
            lambda: StreamProtocol(request),
            parts.hostname,
            parts.port or (443 if secure else 80),
            ssl=secure,
        )
    except UnicodeError:
        raise OSError(f"{parts.hostname[:80]!r} is no name of a host") from None
    return protocol


async def post_stream(
    url: str, body: bytes, headers: dict[str, str], timeout_s: float
) -> StreamProtocol:
    """Posts and reads to the end. Raises OSError, TimeoutError or HttpParserError."""
    try:
        async with asyncio.timeout(timeout_s):
            protocol = await open_stream(url, body, headers)
            await protocol.done
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no end within {timeout_s:g} s") from None
    return protocol
