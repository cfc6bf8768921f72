"""Who comes in, how, and what is said to those who do not; pages of other origins; HTTPS."""

import asyncio
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httptools
import pytest
from prometheus_client import CollectorRegistry

from loraplex.router.http.protocol import PlainHttpParser
from loraplex.router.http.tls import Certificate, TlsAcceptor
from loraplex.router.policy.front_door import FrontDoor, HttpDeadlines
from loraplex.router.telemetry.metrics import RouterMetrics
from tests.router.fake_worker import BASE_NAME, FakeWorker, running_worker
from tests.router.serving import Running, poll, running_router, trusting

PEM = Path(__file__).parents[2] / "adapters" / "self_signed.pem"
REQUEST = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"


def test_the_cap_holds() -> None:
    door = FrontDoor(2)
    assert [door.enter() for _ in range(3)] == [True, True, False]
    door.leave()
    door.leave()
    assert door.enter()
    assert door.open == 2


async def say(router: Running, data: bytes) -> bytes:
    """What comes back until the server closes."""
    url = router.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write(data)
        async with asyncio.timeout(240):
            return await reader.read()
    finally:
        writer.close()


class Reader:
    """Lists what a parser calls."""

    def __init__(self) -> None:
        self.url, self.headers, self.calls = b"/", list[tuple[bytes, bytes]](), list[bytes]()

    def on_message_begin(self) -> None:
        self.calls.append(b"begin")

    def on_url(self, url: bytes) -> None: ...

    def on_header(self, name: bytes, value: bytes) -> None: ...

    def on_headers_complete(self) -> None: ...

    def on_body(self, body: bytes) -> None:
        self.calls.append(body)

    def on_message_complete(self) -> None:
        self.calls.append(b"complete")


def test_chunks_that_come_together_are_read_as_one() -> None:
    reader = Reader()
    parser = PlainHttpParser(reader)
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % letter for letter in b"abcdefgh")
    parser.feed_data(head + chunks)
    parser.feed_data(chunks + b"0\r\n\r\n" + head + b"1\r\nx\r\n0\r\n\r\n")
    first = [b"begin", b"abcdefgh", b"abcdefgh", b"complete"]
    assert reader.calls == [*first, b"begin", b"x", b"complete"]
    with pytest.raises(httptools.HttpParserError):
        parser.feed_data(head + b"1\r\ny\r\n!")
    assert reader.calls[-1] == b"y", "what came before the fault is read"


@pytest.mark.parametrize("name", ["Authorization", "authorization", "X-Filler"])
async def test_a_credential_in_a_trailer_opens_nothing(tmp_path: Path, name: str) -> None:
    """Nor does it take anything from the head, or from the next request of the connection."""
    async with running_router(tmp_path, auth="keys", admin_key="admin") as router:
        head, good = "GET /v1/keys HTTP/1.1\r\nHost: x\r\n", "Authorization: Bearer admin\r\n"
        last, trailer = "Connection: close\r\n", f"{name}: Bearer admin\r\n"
        asked = [("", trailer), (good, trailer.replace("admin", "x")), ("", ""), (last, trailer)]
        chunked = "Transfer-Encoding: chunked\r\n\r\n0\r\n"
        data = "".join(f"{head}{fields}{chunked}{after}\r\n" for fields, after in asked)
        statuses = re.findall(rb"HTTP/1.1 (\d+)", await say(router, data.encode()))
        assert statuses == [b"401", b"200", b"401", b"401"]


@pytest.mark.parametrize("keeps", ["", "connection: keep-alive\r\n"])
async def test_an_old_client_gets_a_stream_without_chunks(tmp_path: Path, keeps: str) -> None:
    """HTTP/1.0 has none, and proxies speak it by default: the connection's end is the stream's."""
    body = b'{"prompt": "x", "max_tokens": 3, "stream": true}'
    head = f"POST /v1/completions HTTP/1.0\r\n{keeps}content-length: {len(body)}\r\n\r\n"
    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker) as router,
    ):
        answer = await say(router, head.encode() + body)
        whole = await say(router, head.encode() + body.replace(b"true}", b"null}"))
    fields, _, events = answer.partition(b"\r\n\r\n")
    assert fields.split()[1] == b"200"
    assert b"transfer-encoding" not in fields
    assert events.startswith(b"data: {")
    assert events.endswith(b"}\n\ndata: [DONE]\n\n")
    assert b"\r\n" not in events
    fields, _, content = whole.partition(b"\r\n\r\n")
    assert f"content-length: {len(content)}".encode() in fields


async def test_connections_are_capped(tmp_path: Path) -> None:
    async with running_router(tmp_path, max_connections=3) as router:
        url = router.client.base_url
        held = [await asyncio.open_connection(url.host, url.port) for _ in range(3)]

        async def inside() -> bool:
            return router.service.front_door.open == 3

        await poll(inside)
        refusal = await say(router, REQUEST)
        assert refusal.split()[1] == b"503"
        assert b"x-request-id: " in refusal
        assert b"\r\nretry-after: 1\r\n" in refusal
        assert b'"unavailable"' in refusal
        for _, writer in held:
            writer.close()

        async def room() -> bool:
            return router.service.front_door.open == 0

        await poll(room)
        assert (await router.client.get("/health/live")).status_code == 200
        assert await router.metric("loraplex_connections_refused_total") == 1


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health/live HTTP/1.1\r\n\r\n",
        b"GET /health/live HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET /health/live HTTP/1.0\r\nhost: a\r\nhost: a\r\n\r\n",
    ],
)
async def test_a_request_says_once_for_whom_it_is(router: Running, head: bytes) -> None:
    answer = await say(router, head)
    assert answer.split()[1] == b"400"
    assert b"x-request-id: " in answer
    assert await router.metric("loraplex_connections_cut_total") == 1


@pytest.mark.parametrize(
    "target",
    [
        *("//health/live", "/health/../health/live", "/health/live/", "/HEALTH/LIVE", "/;/health"),
        *("/v1/../metrics", "/%2e%2e/metrics", "/health%2flive%00", "/health/live?x=/../metrics"),
        *("http://other.example/health/live", "/v1//models", "*", "/v1/models/%2e%2e%2fmetrics"),
    ],
)
async def test_path_and_host_tricks_reach_nothing_else(router: Running, target: str) -> None:
    """The path alone decides, as it was sent: nothing is resolved, nothing is taken from Host."""
    head = f"GET {target} HTTP/1.1\r\nhost: evil/metrics?x#\r\nconnection: close\r\n\r\n"
    answer = await say(router, head.encode())
    assert answer.split()[1] in (b"200", b"400", b"404")
    assert b"loraplex_" not in answer, "these are the metrics"
    assert b"evil" not in answer


async def test_pages_of_other_origins_are_served_if_they_are_listed(tmp_path: Path) -> None:
    page = {"Origin": "https://app.example"}
    asking = {
        **page,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    body = {"model": BASE_NAME, "prompt": "x"}
    async with running_worker(FakeWorker()) as worker:
        async with running_router(tmp_path, worker) as router:
            answer = await router.client.post("/v1/completions", json=body, headers=page)
            assert not [name for name in answer.headers if name.startswith("access-control")]
            preflight = await router.client.options("/v1/completions", headers=asking)
            assert preflight.status_code == 405
        async with running_router(tmp_path, worker, cors_origins=(page["Origin"],)) as router:
            answer = await router.client.post("/v1/completions", json=body, headers=page)
            assert answer.headers["access-control-allow-origin"] == page["Origin"]
            assert "access-control-allow-credentials" not in answer.headers
            assert (await router.client.options("/generate", headers=asking)).status_code == 200
            stranger = asking | {"Origin": "https://evil.example"}
            refused = await router.client.options("/generate", headers=stranger)
            assert refused.status_code == 400
            assert "access-control-allow-origin" not in refused.headers


async def test_https(tmp_path: Path) -> None:
    async with running_router(tmp_path, tls_cert=PEM, tls_key=PEM) as router:
        assert (await router.client.get("/health/live")).status_code == 200


async def test_https_of_a_client_that_is_gone_when_its_connection_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel does not know the peer any more: the connection leaves as it entered."""
    gone = "uvicorn.protocols.http.httptools_impl.get_remote_addr"
    monkeypatch.setattr(gone, lambda transport: None)
    options: dict[str, Any] = {"max_connections": 1, "tls_cert": PEM, "tls_key": PEM}
    async with running_router(tmp_path, **options) as router:
        door, url = router.service.front_door, router.client.base_url

        async def room() -> bool:
            return door.open == 0

        for _ in range(2):
            context = trusting(PEM)
            reader, writer = await asyncio.open_connection(url.host, url.port, ssl=context)
            writer.write(REQUEST)
            assert b"200" in await reader.readline()
            writer.transport.abort()
            await poll(room)


@pytest.mark.parametrize("began", [False, True])
@pytest.mark.parametrize("error", [OSError, ValueError, asyncio.CancelledError])
async def test_a_handshake_frees_its_place_unless_the_connection_will(
    monkeypatch: pytest.MonkeyPatch, began: bool, error: type[BaseException]
) -> None:
    door, metrics = FrontDoor(9), RouterMetrics(CollectorRegistry(), 10)
    protocol: Any = SimpleNamespace(began=False)

    async def shake(*_: object, **__: object) -> None:
        protocol.began = began
        raise error

    loop = asyncio.get_running_loop()
    shaking = SimpleNamespace(connect_accepted_socket=shake, create_task=loop.create_task)
    deadlines, certificate = HttpDeadlines(1.0, 1.0, 1.0), Certificate(PEM, PEM)
    acceptor = TlsAcceptor(certificate, door, deadlines, metrics, lambda: protocol)
    with socket.socket() as accepted, monkeypatch.context() as patched:
        patched.setattr("asyncio.get_running_loop", lambda: shaking)
        acceptor._admit(accepted)
        [ended] = await asyncio.gather(*acceptor._handshakes, return_exceptions=True)
    assert ended is None or isinstance(ended, error)
    assert door.open == int(began)


async def test_it_is_not_ready_and_closes_connections_while_it_drains(router: Running) -> None:
    router.service.dispatcher.draining = True
    answer = await router.client.get("/health/ready")
    assert answer.status_code == 503
    assert "stopped" in answer.json()["error"]
    assert answer.headers["connection"] == "close"
    assert (await router.client.get("/health/live")).status_code == 200
