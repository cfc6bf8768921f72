"""HTTP/1.1 on a socket, with the limits that uvicorn's protocol lacks.

A client that sends its head or body too slowly or too large, or that stops reading its answer, is
cut off.
"""

import asyncio
import json
import uuid
from functools import partial
from typing import Any, Protocol

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from loraplex.router.http.intake import Intake, caller_of
from loraplex.router.policy.front_door import Cut, FrontDoor, HttpDeadlines
from loraplex.router.telemetry.metrics import RouterMetrics

_OFFER = (b"upgrade", b"http2-settings")

# Parsed in one turn at most, if no request is complete before.
_TURN_BYTES = 64 << 10
# Parsed at once: what may be many requests, and what may be a body's end and some. A body whose
# length is known is parsed up to its end.
_HEAD_PIECE_BYTES, _BODY_PIECE_BYTES = 1 << 10, 4 << 10


class HeadReader(Protocol):
    """Gets httptools' callbacks. headers: names in lower case, of the message under way."""

    url: bytes
    headers: list[tuple[bytes, bytes]]

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class PlainHttpParser:
    """Parses requests in place of `httptools.HttpRequestParser`: one that offers an upgrade to
    another protocol is read as the HTTP/1.1 that it is. A head with an offer is read twice.

    Java's HttpClient and `curl --http2` offer `Upgrade: h2c` with every first request. A server may
    ignore that (RFC 9110 section 7.8), but httptools then stops behind the head and drops the body.
    """

    def __init__(self, reader: HeadReader) -> None:
        self._reader = reader
        self._offered = False
        self.on_message_begin = reader.on_message_begin
        self.on_url = reader.on_url
        self.on_header = reader.on_header
        # A body may come in chunks of a byte; the reader gets those of one piece of data as one.
        self._chunks = list[bytes]()
        self.on_body = self._chunks.append
        self._parser = self._new_parser()

    def feed_data(self, data: bytes) -> None:
        """Parses the next bytes. Raises httptools.HttpParserError."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            if not self._offered:
                raise
            head = self._head_without_offer()
            self._parser = self._new_parser()
            self._parser.feed_data(head + data[stop.args[0] :])
        finally:
            self._pass_body_on()

    def close(self) -> None:
        """Breaks the circle of references; nothing may be fed after it."""
        self._parser = None

    def on_headers_complete(self) -> None:
        names = [name for name, _ in self._reader.headers]
        self._offered = self._parser.should_upgrade() and b"upgrade" in names
        if not self._offered:
            self._reader.on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._offered:
            self._pass_body_on()
            self._reader.on_message_complete()

    def should_upgrade(self) -> bool:
        return False

    def should_keep_alive(self) -> bool:
        keeps: bool = self._parser.should_keep_alive()
        return keeps

    def get_http_version(self) -> str:
        http_version: str = self._parser.get_http_version()
        return http_version

    def get_method(self) -> bytes:
        method: bytes = self._parser.get_method()
        return method

    def _pass_body_on(self) -> None:
        if self._chunks:
            body = b"".join(self._chunks)
            self._chunks.clear()
            self._reader.on_body(body)

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        # Some clients end a body with a line end that does not belong to it.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _head_without_offer(self) -> bytes:
        version = self.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.get_method(), self._reader.url, version)]
        lines += [b"%s: %s" % field for field in self._reader.headers if field[0] not in _OFFER]
        return b"\r\n".join([*lines, b"", b""])


MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 128
MAX_DISCARDED_BYTES = 64 << 20
# Beyond it an answer waits for its reader, who must take so much in `HttpDeadlines.reader_s`.
MAX_UNREAD_BYTES = 64 << 10
_LEAST_READ_BYTES = 16 << 10
# When the server stops: what a client has just sent on an idle connection is still answered.
LINGER_S = 1.0
# And so long after that: a loop that was held up runs what is due before it reads what has come.
_LAST_READS_S = 0.02


class _Flow(FlowControl):
    """Reads on once all that came is parsed and the application takes more. unread: not parsed."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.unread = bytearray()
        self._is_held = False

    def pause_reading(self) -> None:
        self.read_paused = True
        self.settle()

    def resume_reading(self) -> None:
        self.read_paused = False
        self.settle()

    def settle(self) -> None:
        """Follows what is unread."""
        is_held = self.read_paused or bool(self.unread)
        if is_held != self._is_held and not self._transport.is_closing():
            self._is_held = is_held
            (self._transport.pause_reading if is_held else self._transport.resume_reading)()


class _HeadTooLarge(Exception):
    """Ends the parsing of a head; the parser passes it on as its own error."""


class _BadHost(Exception):
    """A request must say once for whom it is (RFC 9112 section 3.2)."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. Its answers to what is not HTTP are JSON, too.

    turns: of all connections of the process, to parse what came. is_inside: it has its place at the
    door already, and was counted. began: from then on its end frees its place.
    """

    flow: _Flow

    def __init__(
        self,
        door: FrontDoor,
        deadlines: HttpDeadlines,
        metrics: RouterMetrics,
        turns: Intake,
        *args: Any,
        is_inside: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._door = door
        self._deadlines = deadlines
        self._metrics = metrics
        self._turns = turns
        self._body_left = 0  # of a length that was said
        self._is_complete = False  # a request was, in this turn
        self._is_inside = is_inside
        self.began = False
        self._stopping = False
        self._refused = False  # nothing more is read
        self.parser: Any = PlainHttpParser(self)
        self._head_bytes = 0  # received of a head that is not complete
        self._parsed_bytes = 0  # of its fields
        self._in_head = True
        self._head_begun = False
        self._head_too_large = False
        self._discarded_bytes = 0
        self._ends = False  # with the request that is being read
        self._begun: RequestResponseCycle | None = None  # the latest whose turn has come
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.began = True
        super().connection_made(transport)
        self.flow = _Flow(transport)
        transport.set_write_buffer_limits(MAX_UNREAD_BYTES)
        if self._is_inside:
            self._await_head()
            return
        self._is_inside = True
        self._metrics.connections.inc()
        if self._door.enter():
            self._await_head()
            return
        self._metrics.connections_refused.inc()
        message = "too many connections; try again soon"
        self._refuse(b"503 Service Unavailable", message, "unavailable")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_inside:
            self._door.leave()
        _stop(self._head_timer)
        _stop(self._body_timer)
        _stop(self._read_timer)
        if isinstance(exc, TimeoutError):  # what it did not read the kernel held (TCP_USER_TIMEOUT)
            self._metrics.connections_cut.labels("not_read").inc()
        self.parser.close()
        # uvicorn informs the request that was read last; an earlier one may still be answered.
        if self._begun is not None and not self._begun.response_complete:
            self._begun.disconnected = True
            self._begun.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Keeps what came until it is parsed: a little in each turn, and nothing behind a request
        that waits for the answer to an earlier one."""
        self._unset_keepalive_if_required()
        waits = bool(self.flow.unread)
        self.flow.unread += data
        if not waits:
            self._go_on()

    def _go_on(self) -> None:
        """Takes a turn of the latest request's caller to parse what is unread, unless a request
        waits for the answer to an earlier one. New connections share a line."""
        if self.flow.unread and not self.pipeline:
            self._turns.begin(self.scope and caller_of(self.scope), self._parse)
        self.flow.settle()

    def _parse(self) -> None:
        unread, room, self._is_complete = self.flow.unread, _TURN_BYTES, False
        while unread and room > 0 and not self._is_complete:
            least = _HEAD_PIECE_BYTES if self._in_head else _BODY_PIECE_BYTES
            size = max(least, min(self._body_left, room))
            piece = bytes(unread[:size])
            del unread[:size]
            room -= len(piece)
            self._feed(piece)
        self._go_on()

    def _feed(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._await_head()
        super().data_received(data)
        too_large = self._in_head and self._head_bytes > MAX_HEAD_BYTES
        if self.transport.is_closing():
            return
        if too_large:
            self._refuse_head()
        elif not self._in_head and self._body_timer is None:
            self._await_body()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._head_begun = True
        self._parsed_bytes = 0
        if self._head_timer is None:  # it follows another request in one piece of data
            self._await_head()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if self._in_head:  # else a trailer field, which is never merged (RFC 9110 section 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = self._head_begun = False
        self._head_bytes = 0
        _stop(self._head_timer)
        self._head_timer = None
        hosts = [value for name, value in self.headers if name == b"host"]
        is_old = self.parser.get_http_version() == "1.0"
        if len(hosts) != 1 and (hosts or not is_old):
            raise _BadHost
        if is_old:
            self.expect_100_continue = False  # it knows no 1xx answers (RFC 9110 section 10.1.1)
        super().on_headers_complete()
        self._body_left = int(dict(self.headers).get(b"content-length", b"0"))
        self._ends = not self.cycle.keep_alive
        self.cycle.keep_alive = True  # until its body has come, however early its answer

    def on_body(self, body: bytes) -> None:
        """Handles a piece of a body. After an early answer (413, …) the rest is thrown away, up to
        a limit.

        To close under a client that still sends would take the answer from it.
        """
        self._body_left -= len(body)
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self._cut("body_not_wanted")
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = self._is_complete = True
        self._body_left = 0
        _stop(self._body_timer)
        self._body_timer = None
        if self._ends:
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if self._head_too_large:
            self._refuse_head()
        else:
            self._metrics.connections_cut.labels("not_http").inc()
            self._refuse(b"400 Bad Request", "not a valid HTTP request")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        _stop(self._read_timer)
        super().resume_writing()

    def shutdown(self) -> None:
        self._stopping = True
        self._end_soon()

    def on_response_complete(self) -> None:
        waited = bool(self.pipeline)
        super().on_response_complete()
        if waited:
            self._go_on()
        if self._stopping:
            self._end_soon()

    def timeout_keep_alive_handler(self) -> None:
        if not self.flow.unread:  # else it waits for its turn
            super().timeout_keep_alive_handler()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._begun = cycle
        is_old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, partial(_unchunked, cycle, app) if is_old else app)

    def _end_soon(self) -> None:
        """Ends the connection soon, where an answer began before the stop and did not say so."""
        self.loop.call_later(LINGER_S, self.loop.call_later, _LAST_READS_S, self._end)

    def _end(self) -> None:
        if not (self._answering() or self.flow.unread):
            self.transport.close()

    def _cut(self, why: Cut) -> None:
        self._metrics.connections_cut.labels(why).inc()
        self.transport.abort()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self._deadlines.head_s, self._head_late)

    def _head_late(self) -> None:
        self._head_timer = None
        # What came of the next head, or a stray line end, can wait.
        if self._answering() or self.flow.unread:
            self._await_head()
        elif not self._head_begun:
            self.transport.close()  # nothing to answer
        elif not self.transport.is_closing():
            self._metrics.connections_cut.labels("head_late").inc()
            self._refuse(b"408 Request Timeout", "the request head did not arrive in time")

    def _await_body(self) -> None:
        self._body_timer = self.loop.call_later(self._deadlines.body_s, self._body_late)

    def _body_late(self) -> None:
        """Handles a body that is late. The reader of the body reports this to its client; once a
        request is answered nobody reads its body.
        """
        if self._answering():
            self._await_body()
        else:
            self._cut("body_late")

    def _await_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        timeout_s = self._deadlines.reader_s
        self._read_timer = self.loop.call_later(timeout_s, self._check_reader, unread)

    def _check_reader(self, unread: int) -> None:
        if unread - self.transport.get_write_buffer_size() < _LEAST_READ_BYTES:
            self._cut("not_read")
        else:
            self._await_reader()

    def _count(self, nbytes: int) -> None:
        """Counts more bytes of a head. Raises _HeadTooLarge."""
        self._parsed_bytes += nbytes
        if len(self.headers) >= MAX_HEADERS or self._parsed_bytes > MAX_HEAD_BYTES:
            self._head_too_large = True
            raise _HeadTooLarge

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse_head(self) -> None:
        self._metrics.connections_cut.labels("head_too_large").inc()
        self._refuse(b"431 Request Header Fields Too Large", "the request head is too large")

    def _refuse(self, status: bytes, message: str, code: str = "validation") -> None:
        """Answers without the application, and closes; after the answers that are under way. code:
        others than "validation" are worth another try."""
        self._refused = True
        if self._answering():
            if not self.cycle.more_body:
                self.cycle.keep_alive = False  # of the last of them: its end closes
                return
            if self.cycle.response_started:
                self.transport.close()
                return
            self.cycle.disconnected = True  # its body is what was refused
            self.cycle.message_event.set()
        body = json.dumps({"error": message, "error_type": code}).encode()
        head = (
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nx-request-id: %s\r\n%sconnection: close\r\n\r\n"
        )
        later = b"" if code == "validation" else b"retry-after: 1\r\n"
        self.transport.write(head % (status, len(body), uuid.uuid4().hex.encode(), later) + body)
        self.transport.close()


async def _unchunked(
    cycle: RequestResponseCycle, app: Any, scope: Any, receive: Any, send: Any
) -> None:
    """Answers a client of HTTP/1.0, which knows no chunks (RFC 9112 section 6.1): the end of the
    connection is the answer's.
    """

    async def write(message: Any) -> None:
        if message["type"] == "http.response.start":
            cycle.chunked_encoding = False
        else:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, write)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
