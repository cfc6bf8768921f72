"""Clients that send or read too slowly or not at all, over plain sockets and TLS: each is ended."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraplex.router.failures import ReaderTooSlow
from loraplex.router.generation.sequence import Arrival, Inbox, memory_of
from loraplex.router.http import listeners
from loraplex.server.protocol import TokenEvent, TokenLogprob
from tests.router.fake_worker import BASE_NAME, EOS, FakeWorker, ids_of, running_worker
from tests.router.serving import Running, poll, running_router, trusting

PEM = Path(__file__).parents[2] / "adapters" / "self_signed.pem"
TLS: dict[str, Any] = {"tls_cert": PEM, "tls_key": PEM}
HOST = "host: x\r\n"
BODY = json.dumps({"model": BASE_NAME, "prompt": "x"})

CHOICES = 4

Bytes = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(params=["plain", "tls"])
def secure(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of a router with and without TLS."""
    return TLS if request.param == "tls" else {}


@asynccontextmanager
async def connected(router: Running, plain: bool = False) -> AsyncIterator[Bytes]:
    """plain: without TLS, also where the router wants it."""
    url = router.client.base_url
    context = trusting(PEM) if url.scheme == "https" and not plain else None
    reader, writer = await asyncio.open_connection(url.host, url.port, ssl=context)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def dribble(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Byte after byte: nobody can say that nothing comes. For ever, if it is let."""
    for number in range(1 << 30):
        writer.write(data[number : number + 1] or b"x")
        await asyncio.sleep(0.02)


async def ends(bytes_: Bytes, data: bytes) -> bytes:
    """What is answered to a client that dribbles this, up to the connection's end."""
    reader, writer = bytes_
    dribbling = asyncio.create_task(dribble(writer, data))
    answer = b""
    try:
        async with asyncio.timeout(240):
            while part := await reader.read(1 << 16):
                answer += part
    except ConnectionError:
        pass  # what came before it was read
    finally:
        dribbling.cancel()
    return answer


async def cut(router: Running) -> dict[str, float]:
    """Connections that were cut, by reason."""
    text = (await router.client.get("/metrics")).text
    lines = [
        line for line in text.splitlines() if line.startswith("loraplex_connections_cut_total{")
    ]
    values = [(line.split('"')[1], float(line.rsplit(" ", 1)[1])) for line in lines]
    return {why: value for why, value in values if value}


# Sending


@pytest.mark.parametrize(
    "data", [f"GET /health HTTP/1.1\r\n{HOST}x-long: ".encode(), b"GET /", b"\r\n" * 999]
)
async def test_a_head_that_never_ends(tmp_path: Path, secure: dict[str, Any], data: bytes) -> None:
    async with running_router(tmp_path, head_timeout_s=1.0, **secure) as router:
        async with connected(router) as bytes_:
            answer = await ends(bytes_, data)
        if data.startswith(b"GET"):
            assert answer.split()[1] == b"408"
            assert await cut(router) == {"head_late": 1}
        else:  # it has not begun
            assert not answer


async def test_a_connection_that_asks_nothing(tmp_path: Path, secure: dict[str, Any]) -> None:
    async with (
        running_router(tmp_path, head_timeout_s=0.5, **secure) as router,
        connected(router) as (reader, _),
    ):
        assert await asyncio.wait_for(reader.read(), 240) == b""
        assert await cut(router) == {}


async def test_a_connection_that_asks_no_more(tmp_path: Path, secure: dict[str, Any]) -> None:
    """The next head has its own time, which begins with its first byte."""
    options = {"idle_timeout_s": 0.5, "head_timeout_s": 1.0, **secure}
    async with running_router(tmp_path, **options) as router:
        request = f"GET /health/live HTTP/1.1\r\n{HOST}\r\n".encode()
        async with connected(router) as (reader, writer):
            writer.write(request)
            answer = await asyncio.wait_for(reader.read(), 240)
            assert answer.startswith(b"HTTP/1.1 200")
        async with connected(router) as bytes_:
            bytes_[1].write(request)
            await bytes_[0].readuntil(b"\r\n\r\n")
            assert b"HTTP/1.1 408" in await ends(bytes_, b"GET /health")


async def test_a_body_that_never_ends(tmp_path: Path, secure: dict[str, Any]) -> None:
    async with running_router(tmp_path, body_timeout_s=0.3, **secure) as router:
        for size in ("content-length: 99999", "transfer-encoding: chunked"):
            async with connected(router) as (reader, writer):
                writer.write(f"POST /generate HTTP/1.1\r\n{HOST}{size}\r\n\r\n".encode())
                answer = await ends((reader, writer), b"ffff\r\n{" if "ch" in size else b"{")
                assert answer.split()[1] == b"408"
                assert b'"error_type":"body_timeout"' in answer
        assert await cut(router) == {}


async def test_a_body_that_nobody_wants(tmp_path: Path, secure: dict[str, Any]) -> None:
    """It was answered at once; what still comes may not come for ever."""
    async with running_router(tmp_path, body_timeout_s=0.3, **secure) as router:
        async with connected(router) as (reader, writer):
            writer.write(f"POST /no HTTP/1.1\r\n{HOST}content-length: 99999\r\n\r\n".encode())
            assert (await ends((reader, writer), b"{")).split()[1] == b"404"
        assert await cut(router) == {"body_late": 1}


@pytest.mark.parametrize("last", ["1.1\r\nconnection: close", "1.0"])
async def test_the_last_body_is_read_after_its_answer(
    tmp_path: Path, secure: dict[str, Any], last: str
) -> None:
    piece, count = b"x" * 4096, 500
    async with running_router(tmp_path, **secure) as router, connected(router) as (reader, writer):
        head = f"POST /no HTTP/{last}\r\n{HOST}content-length: {len(piece) * count}\r\n\r\n"
        writer.write(head.encode())
        assert b" 404 " in await reader.readuntil(b"\r\n\r\n")
        for _ in range(count):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)  # the router runs in this loop
        assert b"not_found" in await asyncio.wait_for(reader.read(), 240)


@pytest.mark.parametrize("hello", [None, b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\n\r\n"])
async def test_a_handshake_that_never_ends(tmp_path: Path, hello: bytes | None) -> None:
    """It has its place among the connections, and its time."""
    options = {"head_timeout_s": 1.0, "max_connections": 2, **TLS}
    async with running_router(tmp_path, **options) as router, connected(router, plain=True) as held:
        door = router.service.front_door
        await poll(lambda: _is(lambda: door.open == 1))
        if hello is None:
            assert await asyncio.wait_for(held[0].read(), 240) == b""
        else:
            await ends(held, hello)
        await poll(lambda: _is(lambda: door.open == 0))
        assert await cut(router) == {"handshake_failed": 1}


async def test_handshakes_are_capped(tmp_path: Path) -> None:
    options = {"max_connections": 2, **TLS}
    async with running_router(tmp_path, **options) as router:
        door = router.service.front_door
        async with connected(router, plain=True), connected(router, plain=True):
            await poll(lambda: _is(lambda: door.open == 2))
            with pytest.raises((ssl.SSLError, ConnectionError)):
                async with connected(router):
                    pass
        await poll(lambda: _is(lambda: door.open == 0))
        assert (await router.client.get("/health/live")).status_code == 200
        assert await router.metric("loraplex_connections_refused_total") == 1


async def test_what_comes_with_the_end_of_a_handshake_is_not_lost(tmp_path: Path) -> None:
    """A client may send its request in one flight with its last word of the handshake."""
    async with running_router(tmp_path, **TLS) as router:
        url = router.client.base_url

        def ask() -> bytes:
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            client = trusting(PEM).wrap_bio(incoming, outgoing)
            with socket.create_connection((url.host, url.port), 10) as plain:
                while True:
                    try:
                        client.do_handshake()
                        break
                    except ssl.SSLWantReadError:
                        plain.sendall(outgoing.read())
                        incoming.write(plain.recv(1 << 16))
                client.write(f"GET /health/live HTTP/1.1\r\n{HOST}\r\n".encode())
                plain.sendall(outgoing.read())  # Finished and the request together
                while True:
                    incoming.write(plain.recv(1 << 16))
                    try:
                        return client.read(1 << 16)
                    except ssl.SSLWantReadError:
                        continue

        assert (await asyncio.to_thread(ask)).startswith(b"HTTP/1.1 200")


# Reading


async def _is(condition: Callable[[], bool]) -> bool:
    return condition()


@asynccontextmanager
async def stalled(router: Running, stream: bool, drip: bool = False) -> AsyncIterator[None]:
    """A client with small buffers that has asked for much and reads nothing, or bytes (drip)."""
    url = router.client.base_url
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    plain.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(plain, (url.host, url.port))
    context = trusting(PEM) if url.scheme == "https" else None
    name = url.host if context else None
    reader, writer = await asyncio.open_connection(
        sock=plain, ssl=context, server_hostname=name, limit=1
    )
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    # Alternatives make events large, so that buffers fill.
    much = {"n": CHOICES, "max_tokens": 450, "logprobs": 20, "stream": stream}
    body = json.dumps({"model": BASE_NAME, "prompt": "x", **much})
    head = f"POST /v1/completions HTTP/1.1\r\n{HOST}content-length: {len(body)}\r\n"
    head += "connection: close\r\n\r\n"
    writer.write((head + body).encode())
    dripping = asyncio.create_task(_drip(writer.transport, drip))
    try:
        yield
    finally:
        dripping.cancel()
        writer.transport.abort()


async def _drip(transport: asyncio.WriteTransport, drip: bool) -> None:
    assert isinstance(transport, asyncio.Transport)
    while drip:
        await asyncio.sleep(0.05)
        transport.resume_reading()
        transport.pause_reading()


def talker() -> FakeWorker:
    worker = FakeWorker()
    worker.script = lambda request: [*ids_of("x" * 450), EOS]
    return worker


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernel, so that a reader is seen to lag soon."""
    monkeypatch.setattr(listeners, "_SEND_BUFFER_BYTES", 4096)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("limit", ["max_stream_buffer", "max_stream_buffer_bytes"])
async def test_a_stream_that_is_not_read(
    tmp_path: Path, secure: dict[str, Any], limit: str
) -> None:
    """Its sequence is aborted, and its connection ended; another's beside it is whole."""
    worker = talker()
    options = {limit: 128 if limit == "max_stream_buffer" else 64 << 10, **secure}
    async with (
        running_worker(worker),
        running_router(tmp_path, worker, reader_timeout_s=1.0, **options) as router,
        stalled(router, stream=True),
    ):
        await worker.until(lambda: len(worker.requests) == CHOICES)
        slow = worker.requests[0].request_id
        other = {"model": BASE_NAME, "prompt": "x", "max_tokens": 450, "stream": True}
        whole = await router.client.post("/v1/completions", json=other)
        assert whole.text.endswith("data: [DONE]\n\n")
        await worker.until(lambda: len(worker.aborts) == CHOICES)
        assert {abort.request_id for abort in worker.aborts} == {slow}
        await router.until_idle()
        await poll(lambda: _is(lambda: router.service.front_door.open == 1))


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("drip", [False, True])
async def test_an_answer_that_is_not_read(
    tmp_path: Path, secure: dict[str, Any], drip: bool
) -> None:
    worker = talker()
    async with (
        running_worker(worker),
        running_router(tmp_path, worker, reader_timeout_s=0.5, **secure) as router,
    ):
        async with stalled(router, stream=False, drip=drip):
            await worker.until(lambda: len(worker.finished) == CHOICES)
            await poll(lambda: _is(lambda: router.service.front_door.open == 1))
        assert (await cut(router)).keys() == {"not_read"}


async def test_who_waits_for_a_whole_answer_is_no_slow_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far the router lags behind its worker: here it reads nothing for a while."""
    worker, take, delayed = talker(), Inbox.take, list[int]()

    async def late(self: Inbox) -> list[Arrival]:
        if not delayed:
            await worker.until(lambda: len(worker.finished) == CHOICES)
        events = await take(self)
        delayed.append(len(events))
        return events

    monkeypatch.setattr(Inbox, "take", late)
    async with (
        running_worker(worker),
        running_router(tmp_path, worker, max_stream_buffer=1) as router,
    ):
        body = {"model": BASE_NAME, "prompt": "x", "max_tokens": 450, "n": CHOICES}
        answer = await router.client.post("/v1/completions", json=body)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["x" * 450] * CHOICES
    assert delayed[0] > CHOICES


@pytest.mark.usefixtures("small_buffers")
async def test_an_unread_end_of_an_answer_keeps_no_connection(
    tmp_path: Path, secure: dict[str, Any]
) -> None:
    """What fits the router's own buffer is written, and closed behind: the kernel ends it."""
    async with (
        running_router(tmp_path, reader_timeout_s=0.5, **secure) as router,
        connected(router) as (_, writer),
    ):
        plain = writer.get_extra_info("socket")
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        asking = f"GET /openapi.json HTTP/1.1\r\n{HOST}connection: close\r\n\r\n"
        writer.write(asking.encode())
        await poll(lambda: _is(lambda: router.service.front_door.open == 1))
        await poll(lambda: _is(lambda: router.service.front_door.open == 0))


# The inbox


def event(index: int, alternatives: int = 0) -> TokenEvent:
    top = tuple((number, -1.0) for number in range(alternatives))
    logprobs = (TokenLogprob(1, -1.0, top),) if alternatives else None
    return TokenEvent("request", 0, 0, index, (1,), logprobs=logprobs)


async def test_an_inbox_is_bounded_in_events_and_in_memory() -> None:
    by_count, by_memory = Inbox(3, 1 << 20), Inbox(1000, 2 * memory_of(event(0, 20)))
    for inbox, most, one in ((by_count, 3, event(0)), (by_memory, 2, event(0, 20))):
        for _ in range(2):  # what was taken counts no more
            for _ in range(most):
                inbox.put(0, one, 0.0)
            assert len(await inbox.take()) == most
        for _ in range(most + 1):
            inbox.put(0, one, 0.0)
        with pytest.raises(ReaderTooSlow):
            await inbox.take()


async def test_other_requests_have_their_turn_between_many_events() -> None:
    inbox, turns, read = Inbox(1000, 1000 * memory_of(event(0))), 0, list[Arrival]()

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    for number in range(200):
        inbox.put(number, event(0), 0.0)
    while len(read) < 200:
        events = await inbox.take()
        assert len(events) <= 32
        read.extend(events)
    beside.cancel()
    assert [slot for slot, _, _ in read] == [*range(200)]
    assert turns >= 200 // 32
    for number in range(900):  # what was taken in pieces counts no more
        inbox.put(number, event(0), 0.0)
    assert not inbox.failed
    assert len(await inbox.take()) == 900, "a reader that is behind catches up at once"


async def test_one_event_is_always_taken() -> None:
    inbox = Inbox(1, 1)
    inbox.put(0, event(0, 20), 0.0)
    assert len(await inbox.take()) == 1


async def test_a_reader_of_the_whole_answer_is_woken_for_the_first_event_many_and_the_end() -> None:
    inbox = Inbox(1000, 1 << 20, gathers=4)

    async def taken() -> list[int]:
        return [one.index for _, one, _ in await inbox.take()]

    async def wakes(*events: TokenEvent) -> bool:
        reading = asyncio.create_task(taken())
        await asyncio.sleep(0)
        for one in events:
            inbox.put(0, one, 0.0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        is_woken = reading.done()
        reading.cancel()
        return is_woken

    assert await wakes(event(0))
    assert not await wakes(event(1), event(2), event(3))
    assert await taken() == [1, 2, 3], "who asks has what is there"
    assert await wakes(event(4), event(5), event(6), event(7))
    assert await wakes(msgspec.structs.replace(event(8), finish="length"))
    reading = asyncio.create_task(taken())
    await asyncio.sleep(0)
    inbox.fail(ReaderTooSlow())
    with pytest.raises(ReaderTooSlow):
        await reading


async def test_large_events_of_a_whole_answer_wake_its_reader_before_they_fill_the_memory() -> None:
    large = event(0, 20)
    inbox = Inbox(1000, 2 * memory_of(large), gathers=4)
    read: list[Arrival] = []

    async def reader() -> None:
        while True:
            read.extend(await inbox.take())

    reading = asyncio.create_task(reader())
    for count in range(1, 9):
        inbox.put(0, large, 0.0)
        for _ in range(2):
            await asyncio.sleep(0)
        assert len(read) == count
    reading.cancel()
