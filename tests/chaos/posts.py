"""A lean HTTP/1.1 client for the load's requests: a connection each, read as it comes."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import httpx

from loraplex.launcher.bench.load.serve import EventReader, request_bytes
from loraplex.router.http.protocol import LINGER_S

# A router that stops gives a connection as long to send its first request.
PUNCTUAL_S = LINGER_S / 2


class Refused(OSError):
    """Nobody listens there, or nobody did any more when this process came to send."""


class Broken(OSError):
    """The connection ended, or the time was over, before the answer's end."""


class Posted(asyncio.Protocol):
    """One POST and its answer. status, headers: once `head` has returned; names in lower case."""

    def __init__(self, request: bytes) -> None:
        self._begun = time.monotonic()
        self._waited_s = self._lived_s = 0.0  # until it was sent, and from then until the end
        self.status = 0
        self.headers: dict[str, str] = {}
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._has_head = self._is_whole = self._is_lost = False
        self._events = EventReader()
        self._came: list[tuple[float, bytes]] = []
        self._news = asyncio.Event()

    # Of the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._waited_s = time.monotonic() - self._begun
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._lived_s = time.monotonic() - self._begun - self._waited_s
        self._news.set()

    # Of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._came.append((time.monotonic(), body))

    def on_message_complete(self) -> None:
        self._is_whole = True

    # Of the reader

    async def head(self) -> None:
        while not self._has_head:
            await self._wait()

    async def body(self) -> bytes:
        while not self._is_whole:
            await self._wait()
        return b"".join(piece for _, piece in self._came)

    async def events(self) -> AsyncIterator[tuple[float, bytes]]:
        """The data of server-sent events, each with the time of its arrival."""
        while True:
            came, self._came = self._came, []
            for at, piece in came:
                for data in self._events.feed(piece):
                    yield at, data
            if self._is_whole and not self._came:
                return
            await self._wait()

    async def _wait(self) -> None:
        """Raises Broken; Refused where nothing came, and this process was late to send."""
        if self._is_lost and not self._is_whole:
            if self._waited_s > PUNCTUAL_S and not self._has_head:
                raise Refused(f"sent {self._waited_s:.2f} s after connecting")
            told = f"{self._lived_s:.2f} s after {self._waited_s:.2f} s"
            raise Broken(f"the connection ended before the answer did ({told})")
        await self._news.wait()
        self._news.clear()

    def close(self) -> None:
        self._transport.abort()


class Transport(httpx.AsyncHTTPTransport):
    """A transport for calls to processes that may die at any time."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:  # anyio's, where a connection ends as it begins
            raise httpx.ConnectError(str(error), request=request) from error


@asynccontextmanager
async def posting(
    url: str, body: dict[str, Any], headers: dict[str, str], timeout_s: float
) -> AsyncIterator[Posted]:
    """Sends a request on a connection of its own, and has its answer's head. Raises Refused,
    Broken."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    request = request_bytes(parts, json.dumps(body).encode(), headers)
    try:
        _, posted = await asyncio.get_running_loop().create_connection(
            lambda: Posted(request), parts.hostname, parts.port
        )
    except OSError as error:
        raise Refused(str(error)) from error
    try:
        async with asyncio.timeout(timeout_s):
            await posted.head()
            yield posted
    except TimeoutError as error:
        raise Broken(f"no end within {timeout_s:g} s") from error
    finally:
        posted.close()
