"""A client that leaves takes its work with it, at every stage, streamed or not."""

import asyncio
import json
import logging
import socket
from pathlib import Path

import httpx
import pytest

from loraplex.adapters.manifest import AdapterManifest
from loraplex.server.protocol import AdapterLoad, ErrorCode, GenerateRequest
from tests.router.fake_worker import (
    BASE_NAME,
    EOS,
    FakeWorker,
    ids_of,
    make_manifest,
    running_worker,
)
from tests.router.serving import Running, poll, running_router


class Gate:
    """Holds a worker's sequences at a token until it is opened."""

    def __init__(self, worker: FakeWorker, index: int) -> None:
        self.opened = asyncio.Event()
        self._index = index
        worker.script = lambda request: [*ids_of("a long answer"), EOS]
        worker.before_token = self._wait

    async def _wait(
        self, worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        if index == self._index:
            await self.opened.wait()
        return None


BODY = {"model": BASE_NAME, "prompt": "x", "max_tokens": 99}


def ask(router: Running, *, stream: bool) -> asyncio.Task[httpx.Response]:
    body = {**BODY, "stream": stream}
    return asyncio.create_task(router.client.post("/v1/completions", json=body))


async def leave(asking: asyncio.Task[httpx.Response]) -> None:
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("index", [0, 5])
async def test_leaving_aborts_the_worker(
    router: Running, worker: FakeWorker, index: int, stream: bool
) -> None:
    """index 0: before the first token (prefill); 5: while it decodes."""
    Gate(worker, index)
    asking = ask(router, stream=stream)
    await worker.until(lambda: len(worker.requests) == 1)
    await leave(asking)
    await worker.until(lambda: len(worker.aborts) == 1)
    sent = worker.requests[0]
    assert worker.aborts[0].request_id == sent.request_id
    await worker.until(lambda: worker.finished == [(sent.request_id, 0, 0)])
    await router.until_idle()
    assert await router.metric("loraplex_generations_given_up_total") == 1


async def test_leaving_in_the_middle_of_a_stream(router: Running, worker: FakeWorker) -> None:
    Gate(worker, 3)
    body = {**BODY, "stream": True}
    async with router.client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line:
                break
    await worker.until(lambda: len(worker.aborts) == 1)
    await router.until_idle()


async def test_leaving_with_another_request_behind_a_stream(
    router: Running, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a departure like others: nothing is logged as a fault."""
    left = asyncio.Event()
    worker.script = lambda request: [*ids_of("a long answer" * 30), EOS]

    async def before_token(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        """A few tokens after it has left show that; the rest never comes."""
        if index == 3:
            await left.wait()
        if index > 300:
            await asyncio.Event().wait()
        return None

    worker.before_token = before_token
    body = json.dumps({**BODY, "max_tokens": 400, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    url = router.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(head + body + b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(240):
        await reader.readuntil(b"data: ")
    writer.transport.abort()
    left.set()
    await worker.until(lambda: len(worker.aborts) == 1)
    await router.until_idle()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_leaving_aborts_every_choice(router: Running, worker: FakeWorker) -> None:
    Gate(worker, 0)
    body = {**BODY, "n": 3, "stream": True}
    asking = asyncio.create_task(router.client.post("/v1/completions", json=body))
    await worker.until(lambda: len(worker.requests) == 3)
    await leave(asking)
    await worker.until(lambda: len(worker.aborts) == 3)
    assert {abort.choice for abort in worker.aborts} == {0, 1, 2}
    await router.until_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_the_queue(tmp_path: Path, stream: bool) -> None:
    worker = FakeWorker()
    worker.credits = 1
    gate = Gate(worker, 0)
    async with running_worker(worker), running_router(tmp_path, worker) as router:
        running = ask(router, stream=False)
        await worker.until(lambda: len(worker.requests) == 1)
        queued = ask(router, stream=stream)
        await until_queued(router, 1)
        await leave(queued)
        await until_queued(router, 0)
        gate.opened.set()
        assert (await running).status_code == 200
        assert len(worker.requests) == 1
        assert not worker.aborts
        await router.until_idle()


async def until_queued(router: Running, count: int) -> None:
    async def reached() -> bool:
        return len(router.service.bases.first.fleet.queue) == count

    await poll(reached)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_the_adapter_loads(
    router: Running, worker: FakeWorker, stream: bool
) -> None:
    release = asyncio.Event()

    async def load(load: AdapterLoad) -> AdapterManifest:
        await release.wait()
        return make_manifest(load.ref.name)

    worker.loader = load
    body = {"model": "org/slow", "prompt": "x", "stream": stream}
    asking = asyncio.create_task(router.client.post("/v1/completions", json=body))
    await worker.until(lambda: len(worker.loads) == 1)
    await leave(asking)
    await router.until_idle()
    release.set()
    # Who comes later finds the adapter loaded, and nothing of the one who left.
    answer = await router.client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert len(worker.loads) == 1
    assert len(worker.requests) == 1


async def test_leaving_while_a_lost_worker_is_awaited(router: Running, worker: FakeWorker) -> None:
    Gate(worker, 4)
    asking = ask(router, stream=True)
    await worker.until(lambda: len(worker.requests) == 1)
    worker.ready = False  # it comes back, but takes no work
    worker.drop_connections()
    await until_queued(router, 1)
    await leave(asking)
    await until_queued(router, 0)
    await router.until_idle()


async def test_a_freed_credit_is_used_again(tmp_path: Path) -> None:
    worker = FakeWorker()
    worker.credits = 1
    gate = Gate(worker, 0)
    async with running_worker(worker), running_router(tmp_path, worker) as router:
        for round_number in range(3):
            asking = ask(router, stream=True)
            await worker.until(lambda n=round_number: len(worker.requests) == n + 1)  # type: ignore[misc]
            await leave(asking)
        gate.opened.set()
        assert (await ask(router, stream=False)).status_code == 200


async def test_a_reader_that_stops_reading_is_given_up(tmp_path: Path) -> None:
    """Its sequence is aborted; another's stream beside it is whole."""
    worker = FakeWorker()
    worker.script = lambda request: [*ids_of("x" * 450), EOS]
    async with (
        running_worker(worker),
        running_router(tmp_path, worker, max_stream_buffer=128) as router,
    ):
        stalled = await open_and_stall(router)
        try:
            await worker.until(lambda: len(worker.requests) == 1)
            whole = await router.client.post(
                "/v1/completions", json={**BODY, "max_tokens": 450, "stream": True}
            )
            assert whole.text.endswith("data: [DONE]\n\n")
            await worker.until(lambda: len(worker.aborts) >= 1)
            assert worker.aborts[0].request_id == worker.requests[0].request_id
        finally:
            stalled.close()
        await router.until_idle()


async def open_and_stall(router: Running) -> socket.socket:
    """Sends a request over a socket with small buffers, and reads nothing."""
    url = router.client.base_url
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    stalled.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(stalled, (url.host, url.port))
    # Alternatives make events large, so that buffers fill soon.
    parameters = '{"max_new_tokens": 450, "return_k_alternatives": 20}'
    body = f'{{"inputs": "x", "parameters": {parameters}}}'
    head = (
        "POST /generate_stream HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    await loop.sock_sendall(stalled, (head + body).encode())
    return stalled
