"""Reads messages that offer an upgrade to another protocol as the HTTP/1.1 that they are.

Java's HttpClient and `curl --http2` offer `Upgrade: h2c` with every first request. A server may
ignore that (RFC 9110 section 7.8), but httptools then stops behind the head and drops the body.
"""

from typing import Any, Protocol

import httptools

_OFFER = (b"upgrade", b"http2-settings")


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
    """Parses requests in place of `httptools.HttpRequestParser`. A head with an offer is read
    twice.
    """

    def __init__(self, reader: HeadReader) -> None:
        self._reader = reader
        self._offered = False
        self.on_message_begin = reader.on_message_begin
        self.on_url = reader.on_url
        self.on_header = reader.on_header
        self.on_body = reader.on_body
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
