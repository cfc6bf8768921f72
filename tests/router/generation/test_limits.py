"""Everything is bounded: bodies, heads, queues, time; full means a clear answer."""

import asyncio
import codecs
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.router.text.stops import StopStrings
from loraplex.server.protocol import ErrorCode, GenerateRequest
from tests.router.fake_worker import BASE_NAME, FakeWorker, running_worker
from tests.router.serving import Running, poll, running_router

BODY = {"model": BASE_NAME, "prompt": "x"}


def hold(worker: FakeWorker) -> asyncio.Event:
    """No sequence gets a token before this is set."""
    gate = asyncio.Event()

    async def before_token(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        await gate.wait()
        return None

    worker.before_token = before_token
    return gate


async def complete(router: Running, **fields: Any) -> httpx.Response:
    return await router.client.post("/v1/completions", json={**BODY, **fields})


async def test_a_full_queue(tmp_path: Path) -> None:
    worker = FakeWorker()
    worker.credits = 2
    gate = hold(worker)
    async with (
        running_worker(worker),
        running_router(tmp_path, worker, max_queue=3) as router,
    ):
        asking = [asyncio.create_task(complete(router)) for _ in range(5)]

        async def full() -> bool:
            return len(router.service.bases.first.fleet.queue) == 3 and len(worker.requests) == 2

        await poll(full)
        for stream in (False, True):
            refused = await complete(router, stream=stream)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
        lorax = await router.client.post("/generate", json={"inputs": "x"})
        assert (lorax.status_code, lorax.json()["error_type"]) == (429, "overloaded")
        hopeless = await complete(router, n=4)
        assert hopeless.status_code == 400  # more than could ever wait: no use in a retry
        gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
        assert len(worker.requests) == 5
        await router.until_idle()


async def test_a_queue_full_of_bytes(tmp_path: Path) -> None:
    worker = FakeWorker()
    worker.credits = 1
    gate = hold(worker)
    async with (
        running_worker(worker),
        running_router(tmp_path, worker, max_queue_bytes=36 * 100) as router,
    ):
        asking = [asyncio.create_task(complete(router, prompt="y" * 80)) for _ in range(2)]

        async def queued() -> bool:
            return len(router.service.bases.first.fleet.queue) == 1

        await poll(queued)
        assert (await complete(router, prompt="y" * 80)).status_code == 429
        gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}


async def test_choices_share_the_search_for_stop_strings_which_counts_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, made, init = FakeWorker(), list[tuple[str, ...]](), StopStrings.__init__

    def counted(self: StopStrings, stops: tuple[str, ...]) -> None:
        made.append(stops)
        init(self, stops)

    monkeypatch.setattr(StopStrings, "__init__", counted)
    async with (
        running_worker(worker),
        running_router(tmp_path, worker, max_queue_bytes=1 << 16) as router,
    ):
        answer = await complete(router, prompt=["x", "y"], n=4, stop=["END", "."])
        assert len(answer.json()["choices"]) == 8
        assert made == [("END", ".")]
        assert (await complete(router, stop=["." * 1000])).status_code == 400


async def test_more_requests_than_allowed(tmp_path: Path) -> None:
    worker = FakeWorker()
    gate = hold(worker)
    async with running_worker(worker), running_router(tmp_path, worker, max_requests=1) as router:
        asking = asyncio.create_task(complete(router))
        await worker.until(lambda: len(worker.requests) == 1)
        assert (await complete(router)).status_code == 429
        gate.set()
        assert (await asking).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline(tmp_path: Path, stream: bool) -> None:
    """In the queue and on the worker alike: 504, and the worker is told."""
    worker = FakeWorker()
    worker.credits = 1
    hold(worker)
    async with (
        running_worker(worker),
        running_router(tmp_path, worker, request_timeout_s=0.5) as router,
    ):
        answers = await asyncio.gather(*(complete(router, stream=stream) for _ in range(2)))
        assert [answer.status_code for answer in answers] == [504, 504]
        await worker.until(lambda: len(worker.aborts) >= 1)
        await router.until_idle()


async def test_no_worker(tmp_path: Path) -> None:
    async with running_router(tmp_path) as router:
        for answer in (
            await complete(router),
            await complete(router, stream=True),
            await router.client.get("/health/ready"),
            await router.client.get("/health"),
            await router.client.get("/v1/models"),
            await router.client.get("/info"),
        ):
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert answer.json()["error"]
        assert (await router.client.get("/health/live")).status_code == 200
        assert (await router.client.get("/metrics")).status_code == 200


async def test_a_worker_that_is_not_ready(router: Running, worker: FakeWorker) -> None:
    await worker.announce(ready=False)

    async def unready() -> bool:
        return (await router.client.get("/health/ready")).status_code == 503

    await poll(unready)
    assert (await complete(router)).status_code == 503
    await worker.announce(ready=True)
    await router.until_ready()
    assert (await complete(router)).status_code == 200


async def complete_later(router: Running, **fields: Any) -> "asyncio.Task[httpx.Response]":
    asking = asyncio.create_task(complete(router, **fields))
    await asyncio.sleep(0)
    return asking


async def waiting_room(router: Running, count: int) -> None:
    async def waits() -> bool:
        return router.service.bases.first.fleet.without_worker.count == count

    await poll(waits)


@pytest.mark.parametrize("known", [True, False])
async def test_requests_wait_for_the_first_worker(tmp_path: Path, known: bool) -> None:
    """Scale from zero: of a known base or not, as many as the queue may hold."""
    worker = FakeWorker()
    async with running_router(
        tmp_path,
        worker,
        wait=False,
        worker_wait_s=30.0,
        max_queue=2,
    ) as router:
        if known:
            assert await router.service.bases.first.adopt(worker.card) is None
        asking = [await complete_later(router, stream=stream) for stream in (False, True)]
        await waiting_room(router, 2)
        refused = await complete(router)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "30")
        gone = asking.pop()
        gone.cancel()
        await waiting_room(router, 1)
        asking.append(await complete_later(router))
        async with running_worker(worker):
            assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}


async def test_what_waits_when_the_last_worker_leaves_is_told_so(tmp_path: Path) -> None:
    worker = FakeWorker()
    worker.credits = 1
    hold(worker)
    async with (
        running_worker(worker),
        running_router(tmp_path, worker, worker_wait_s=0.1) as router,
    ):
        asking = [await complete_later(router) for _ in range(3)]

        async def queued() -> bool:
            return len(router.service.bases.first.fleet.queue) == 2

        await poll(queued)
        await worker.announce(ready=False)
        done, running = await asyncio.wait(asking, timeout=240, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 2:
            more, running = await asyncio.wait(
                running, timeout=240, return_when=asyncio.FIRST_COMPLETED
            )
            done |= more
        for answer in (task.result() for task in done):
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
        assert len(running) == 1  # it runs on, and so does its worker
        for task in running:
            task.cancel()


# Bodies


async def test_a_body_too_large(tmp_path: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * 300

    async with (
        running_worker(FakeWorker()) as worker,
        running_router(tmp_path, worker, max_body_bytes=1000) as router,
    ):
        headers = {"content-type": "application/json"}
        for content in (b"x" * 1001, chunks()):
            answer = await router.client.post("/generate", content=content, headers=headers)
            assert answer.status_code == 413
            assert answer.json()["error_type"] == "body_too_large"
        assert (await complete(router)).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": 'application/json; Charset="UTF-8"'}, 200),
        ({"content-type": "application/json;charset=us-ascii"}, 200),
        ({"content-type": "application/json; charset=latin-1"}, 415),
        ({"content-type": 'application/json; x=";"; CHARSET="UTF-16"'}, 415),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({}, 200),
        ({"origin": "https://page.example"}, 415),  # as its script may send without asking
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
    ],
)
async def test_content_types(router: Running, headers: dict[str, str], status: int) -> None:
    content = json.dumps(BODY).encode()
    for path in ("/v1/completions", "/tokenize"):
        answer = await router.client.post(path, content=content, headers=headers)
        assert answer.status_code == status
        assert answer.json()


async def test_a_byte_order_mark_before_a_body(router: Running) -> None:
    content = codecs.BOM_UTF8 + json.dumps(BODY).encode()
    for path in ("/v1/completions", "/tokenize"):
        assert (await router.client.post(path, content=content)).status_code == 200
        twice = await router.client.post(path, content=codecs.BOM_UTF8 + content)
        assert twice.is_client_error


# Heads


async def raw(router: Running, data: bytes) -> bytes:
    """The server's answer to these bytes, until it closes."""
    url = router.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(240):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET /health/live HTTP/1.1\r\nhost: x\r\nx-big: " + b"a" * 70_000, 431),
        (b"GET /health/live HTTP/1.1\r\n" + b"a: b\r\n" * 200, 431),
        (b"GET /" + b"a" * 70_000, 431),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
        (b"GET /health/live HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
        (b"GET /health/live HTTP/1.1\r\nx-big: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400),
    ],
)
async def test_bad_heads(router: Running, data: bytes, status: int) -> None:
    answer = await raw(router, data)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert json.loads(body)["error"]
    assert b"content-type: application/json" in head


@pytest.mark.parametrize("apart", [False, True])
async def test_what_follows_a_request_costs_it_no_answer(
    router: Running, worker: FakeWorker, apart: bool
) -> None:
    """Such as the rest of a body whose client counted characters for bytes."""
    gate = hold(worker)
    url = router.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    request = post(json.dumps(BODY).encode())
    writer.write(request if apart else request + b"\xa4}")
    await worker.until(lambda: len(worker.requests) == 1)
    if apart:
        writer.write(b"\xa4}")
        await writer.drain()
    gate.set()
    async with asyncio.timeout(240):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1") == 1
    writer.close()


async def test_a_body_that_is_no_http_is_answered(router: Running, worker: FakeWorker) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    for body in (b"nonsense\r\n", b"2\r\n{}\r\nnonsense\r\n"):
        answer = await raw(router, head + body)
        assert answer.startswith(b"HTTP/1.1 400 ")
    assert not worker.requests


async def test_a_head_that_begins_behind_a_request_is_timed(tmp_path: Path) -> None:
    async with running_router(tmp_path, head_timeout_s=0.5) as router:
        answer = await raw(router, b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\nGET /v1/mo")
        statuses = [part.split()[0] for part in answer.split(b"HTTP/1.1 ")[1:]]
        assert statuses == [b"200", b"408"]


async def test_one_connection_serves_many_requests(router: Running) -> None:
    head = "HTTP/1.1\r\nhost: x\r\n"
    first = f"GET /health/live {head}\r\nGET /v1/models {head}connection: close\r\n\r\n"
    answer = await raw(router, first.encode())
    assert answer.count(b"HTTP/1.1 200") == 2


def post(body: bytes, *fields: str) -> bytes:
    head = ["POST /v1/completions HTTP/1.1", "host: x", f"content-length: {len(body)}", *fields]
    return "\r\n".join([*head, "", ""]).encode() + body


async def test_a_line_end_behind_a_body_costs_no_answer(tmp_path: Path) -> None:
    worker = FakeWorker()
    gate = hold(worker)
    async with (
        running_worker(worker),
        running_router(tmp_path, worker, head_timeout_s=0.5) as router,
    ):
        url = router.client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(post(json.dumps(BODY).encode()))
        await worker.until(lambda: len(worker.requests) == 1)
        writer.write(b"\r\n")
        with pytest.raises(TimeoutError):  # several times as long as a head may take
            await asyncio.wait_for(reader.read(1), 2.0)
        gate.set()
        async with asyncio.timeout(240):
            answer = await reader.read()  # then the connection is closed: no head has come
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.count(b"HTTP/1.1") == 1
        writer.close()


@pytest.mark.parametrize(
    ("version", "offer", "status"),
    [
        ("HTTP/1.1", "expect: 100-continue", b"HTTP/1.1 100 "),
        ("HTTP/1.0", "expect: 100-continue", b"HTTP/1.1 200 "),  # it knows no 1xx
        ("HTTP/1.1", "transfer-encoding: gzip, chunked", b"HTTP/1.1 415 "),
        ("HTTP/1.1", "transfer-encoding: chunked", b"HTTP/1.1 200 "),
    ],
)
async def test_what_is_answered_first(
    router: Running, version: str, offer: str, status: bytes
) -> None:
    body = json.dumps(BODY).encode()
    head = f"POST /v1/completions {version}\r\nhost: x\r\nconnection: close\r\n{offer}\r\n"
    if "chunked" in offer:
        data = f"{head}\r\n{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    else:
        data = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:1]
    url = router.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(data)
    if version == "HTTP/1.0":
        writer.write(body[1:])
    async with asyncio.timeout(240):
        assert (await reader.readline()).startswith(status)
    writer.close()


@pytest.mark.parametrize("cut", [0, 40, 120, 170])
async def test_an_offer_of_http2_is_ignored(router: Running, cut: int) -> None:
    """As Java's HttpClient makes it with every request to a plain address."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    body = json.dumps(BODY).encode()
    data = post(body, *offer) + post(body, "connection: close")
    url = router.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(data[:cut])
    await asyncio.sleep(0)
    writer.write(data[cut:])
    async with asyncio.timeout(240):
        assert (await reader.read()).count(b"HTTP/1.1 200 ") == 2
    writer.close()
