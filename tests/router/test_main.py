"""The router as a process: its first line, its clean stop."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from loraplex.router.config import RouterConfig, RouterConfigError
from loraplex.router.main import run
from loraplex.server.protocol import ErrorCode, GenerateRequest
from tests.router.fake_worker import BASE_NAME, SECRET, FakeWorker
from tests.router.serving import events_of, poll
from tests.tethered import tethered

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path
from loraplex.router.config import RouterConfig
from loraplex.router.main import run
cache, secret, drain_s, *workers = sys.argv[1:]
run(RouterConfig(workers=tuple(workers), secret=secret, port=0, cache_dir=Path(cache),
                 drain_timeout_s=float(drain_s)))
"""
FEW_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 2048))
"""
BREAK_THE_FLEET = """
from loraplex.router.policy.queue.waiting import WaitingQueue
WaitingQueue.age = lambda queue, now: 1 / 0
"""
BODY = {"model": BASE_NAME, "prompt": "x", "max_tokens": 99, "stream": True}


class Process:
    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), 240)


@asynccontextmanager
async def router_process(
    tmp_path: Path, *workers: FakeWorker, drain_s: float = 5.0, program: str = PROGRAM
) -> AsyncIterator[Process]:
    urls = [worker.url for worker in workers]
    process = await asyncio.create_subprocess_exec(
        *tethered(sys.executable, "-c", program, str(tmp_path), SECRET, str(drain_s), *urls),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 240)).decode()
        assert line.startswith("router: listening on http://127.0.0.1:")
        yield Process(process, line.split()[-1])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def hold_at(worker: FakeWorker, at: int) -> asyncio.Event:
    gate = asyncio.Event()

    async def before_token(
        worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        if index == at:
            await gate.wait()
        return None

    worker.before_token = before_token
    return gate


async def until_ready(client: httpx.AsyncClient) -> None:
    async def ready() -> bool:
        return (await client.get("/health/ready")).status_code == 200

    await poll(ready)


async def refused(url: str) -> bool:
    address = httpx.URL(url)
    try:
        _, writer = await asyncio.open_connection(address.host, address.port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


async def test_starts_without_a_worker_and_stops(tmp_path: Path) -> None:
    async with router_process(tmp_path) as router:
        async with httpx.AsyncClient(base_url=router.url) as client:
            assert (await client.get("/health/live")).status_code == 200
            assert (await client.get("/health/ready")).status_code == 503
        assert await router.stop() == 0


async def test_it_may_open_as_many_files_as_connections_want(tmp_path: Path) -> None:
    program = FEW_FILES + PROGRAM.replace("port=0", "port=0, max_connections=600")
    async with router_process(tmp_path, program=program) as router:
        limits = psutil.Process(router.process.pid).rlimit(psutil.RLIMIT_NOFILE)
        assert limits == (1624, 2048)


async def test_running_streams_finish_before_it_stops(tmp_path: Path, worker: FakeWorker) -> None:
    gate = hold_at(worker, 3)
    async with (
        router_process(tmp_path, worker) as router,
        httpx.AsyncClient(base_url=router.url, timeout=240) as client,
    ):
        await until_ready(client)
        async with client.stream("POST", "/v1/completions", json=BODY) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            stopping = asyncio.create_task(router.stop())
            await poll(lambda: refused(router.url))
            gate.set()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        # The client does not know that its connection ends; no other could be made now.
        again = await client.post("/v1/completions", json=BODY)
        assert (again.status_code, again.headers["connection"]) == (200, "close")
        assert await stopping == 0
    assert not worker.aborts


async def test_streams_get_an_error_when_the_time_is_over(
    tmp_path: Path, worker: FakeWorker
) -> None:
    hold_at(worker, 3)
    async with (
        router_process(tmp_path, worker, drain_s=1.0) as router,
        httpx.AsyncClient(base_url=router.url, timeout=240) as client,
    ):
        await until_ready(client)
        asking = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await worker.until(lambda: len(worker.requests) == 1)
        assert await router.stop() == 0
        last = events_of((await asking).text)[-1]
        assert last["error"]["code"] == "unavailable"
        assert "stopped" in last["error"]["message"]
    await worker.until(lambda: not worker.connected)


async def test_without_what_it_does_in_the_background_it_ends(tmp_path: Path) -> None:
    """It would answer that it lives, and find no worker any more."""
    async with router_process(tmp_path, program=BREAK_THE_FLEET + PROGRAM) as router:
        assert await asyncio.wait_for(router.process.wait(), 240) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_stops_at_once(
    tmp_path: Path, worker: FakeWorker, number: signal.Signals
) -> None:
    hold_at(worker, 3)
    async with (
        router_process(tmp_path, worker, drain_s=300.0) as router,
        httpx.AsyncClient(base_url=router.url, timeout=240) as client,
    ):
        await until_ready(client)
        asking = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await worker.until(lambda: len(worker.requests) == 1)
        router.process.send_signal(number)
        await poll(lambda: refused(router.url))
        router.process.send_signal(number)
        assert await asyncio.wait_for(router.process.wait(), 240) == 0
        outcome = (await asyncio.gather(asking, return_exceptions=True))[0]
        assert isinstance(outcome, httpx.HTTPError), outcome


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": ("http://x:1",)}, "--worker"),
        ({"adapters": ("noequals",)}, "--adapter"),
        ({"adapters": ("a b=hub:org/x",)}, "--adapter"),
        ({"adapters": ("a=b",)}, "--adapter"),
        ({"adapters": ("a=hub:org/x",), "hub_owners": ("acme",)}, "--adapter"),
        ({"adapters": ("a=ftp:b",)}, "--adapter"),
        ({"host": "203.0.113.1"}, "203.0.113.1"),
        ({"uds": Path("/nowhere/socket")}, "/nowhere/socket"),
    ],
)
def test_bad_options_are_one_sentence(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    defaults: dict[str, Any] = {"workers": (), "port": 0, "cache_dir": tmp_path}
    with pytest.raises(RouterConfigError, match=words):
        run(RouterConfig(**(defaults | options)))
