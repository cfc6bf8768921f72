"""Bytes that many connections send, or one sends at once, are parsed little by little."""

import asyncio
from collections import Counter

import pytest

from loraplex.router.http.protocol import BoundedHttpProtocol
from tests.router.serving import Running

HEAD = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
# Of these heads: 32 turns of 1 KiB.
MOST_IN_AN_ITERATION = 32 * (1024 // len(HEAD) + 1)


class Watch:
    """Counts heads by iteration of the event loop, and what lies unread."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.heads = Counter[int]()
        self.unread = 0
        self._iteration = 0
        complete = BoundedHttpProtocol.on_headers_complete

        def on_headers_complete(protocol: BoundedHttpProtocol) -> None:
            self.heads[self._iteration] += 1
            self.unread = max(self.unread, len(protocol.flow.unread))
            complete(protocol)

        patch.setattr(BoundedHttpProtocol, "on_headers_complete", on_headers_complete)
        self._tick()

    def _tick(self) -> None:
        self._iteration += 1
        asyncio.get_running_loop().call_soon(self._tick)


async def ask(router: Running, sent: bytes, answers: int) -> None:
    """Sends requests in one piece and reads until so many are answered."""
    url = router.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port, limit=1 << 26)
    try:
        writer.write(sent)
        left = answers
        while left:
            line = await reader.readline()
            assert line
            left -= line.endswith(b"HTTP/1.1 200 OK\r\n")
    finally:
        writer.transport.abort()


async def test_requests_behind_each_other(router: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait for the answers to others are not even parsed, nor read without end."""
    watch = Watch(monkeypatch)
    await ask(router, HEAD * 20_000, 500)
    assert max(watch.heads.values()) <= 1024 // len(HEAD) + 1
    assert watch.unread <= 600 << 10


async def test_requests_of_many_connections(
    router: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    await asyncio.gather(*(ask(router, HEAD * 40, 40) for _ in range(100)))
    assert max(watch.heads.values()) <= MOST_IN_AN_ITERATION


async def test_a_late_turn_is_no_idle_time(
    router: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that have come are answered, though the time of an idle connection is over."""
    complete = BoundedHttpProtocol.on_response_complete

    def on_response_complete(protocol: BoundedHttpProtocol) -> None:
        complete(protocol)
        if protocol.flow.unread:
            protocol.timeout_keep_alive_handler()

    monkeypatch.setattr(BoundedHttpProtocol, "on_response_complete", on_response_complete)
    await ask(router, HEAD * 100, 100)


async def test_a_body_between_requests_is_whole(router: Running) -> None:
    """It is parsed in larger pieces, up to its end."""
    body = b'{"inputs": "%s"}' % (b"x" * 300_000)
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    sized = head + b"content-length: %d\r\n\r\n" % len(body) + body
    pieces = (body[start : start + 700] for start in range(0, len(body), 700))
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    chunked = head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    await ask(router, (HEAD + sized + HEAD * 3 + chunked) * 2 + HEAD * 2, 14)
