"""CPU time of a router for tokens and requests, and the latency that it adds."""

import argparse
import asyncio
import contextlib
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from loraplex.launcher.bench.commands import print_points
from loraplex.launcher.bench.errors import BenchError
from loraplex.launcher.bench.load.serve import run_load
from loraplex.launcher.bench.load.target import Target
from loraplex.launcher.bench.load.workload import Lengths, Workload
from loraplex.launcher.bench.report import Outcome, percentile
from loraplex.launcher.command_line import Parser
from loraplex.launcher.option_types import whole
from loraplex.launcher.serving.plan import LOOPBACK
from loraplex.launcher.serving.serve import free_port
from loraplex.router.http.client import http_client

_START_S = 60.0
_PROBE_S = 5.0
_WARM_UP = 64
PROMPT = "A customer writes about an order that has not arrived, and asks what to do now. " * 2


@dataclass(frozen=True, slots=True)
class Cost:
    """us_a_token: CPU time of a streamed token, detokenised, of `streams` at once.

    us_a_request: of a non-streamed request, with one token and with 16. added_*: latency of a
    request at low load, against a worker that answers at once; client and loopback included.
    burst_*: of `burst` streams asked for at once, from the first request to the first stream's
    first token, and to the last stream's; the same.
    """

    streams: int
    us_a_token: float
    us_a_request: float
    us_a_request_of_16: float
    added_p50_ms: float
    added_p99_ms: float
    burst: int
    burst_first_ms: float
    burst_last_ms: float


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class KeptConnection:
    """One kept connection; a whole answer at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, tokens: int) -> float:
        """Returns the seconds from the request to the whole answer."""
        body = msgspec.json.encode({"model": "base", "prompt": PROMPT, "max_tokens": tokens})
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        started = time.perf_counter()
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", answer.lower())
        if not answer.startswith(b"HTTP/1.1 200 ") or length is None:
            raise BenchError(f"the router answered {answer[:200]!r}")
        await self._reader.readexactly(int(length[1]))
        return time.perf_counter() - started

    def close(self) -> None:
        self._writer.close()


async def ask_many(port: int, requests: int, tokens: int, concurrency: int) -> list[float]:
    """Asks from `concurrency` callers, back to back; returns the seconds of each request."""
    pending = iter(range(requests))
    times: list[float] = []

    async def call() -> None:
        caller = KeptConnection(*await asyncio.open_connection(LOOPBACK, port))
        for _ in pending:
            times.append(await caller.ask(tokens))
        caller.close()

    await asyncio.gather(*(call() for _ in range(concurrency)))
    return times


async def stream_many(port: int, streams: int, tokens: int) -> list[Outcome]:
    """Runs streams at once, each to its end. Raises BenchError."""
    lengths = Lengths.parse("64"), Lengths.parse(str(tokens))
    workload = Workload(streams, (None,), 1.0, *lengths)
    outcomes = await run_load(Target(f"http://{LOOPBACK}:{port}", "base"), workload, streams)
    failed = [f"{o.error} {o.message}" for o in outcomes if o.error is not None]
    if failed:
        raise BenchError(f"{len(failed)} of {streams} streams failed: {failed[0]}")
    return outcomes


def first_tokens(outcomes: list[Outcome]) -> tuple[float, float]:
    """Milliseconds from the first request to the first stream's first token, and the last's."""
    asked = min(outcome.sent_s for outcome in outcomes)
    came = [outcome.token_s[0] - asked for outcome in outcomes]
    return 1e3 * min(came), 1e3 * max(came)


@asynccontextmanager
async def running(module: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a Python module as a process of its own, until the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def routed(step_s: float) -> AsyncIterator[tuple[int, int]]:
    """Runs a router before a mock worker of this step time: its pid and port."""
    port = free_port(LOOPBACK, 0)
    async with running("tools.bench.mock_worker", str(step_s)) as worker:
        assert worker.stdout is not None
        line = await asyncio.wait_for(worker.stdout.readline(), _START_S)
        if not line:
            raise BenchError("the worker without an engine did not start")
        url = f"ws://{LOOPBACK}:{int(line)}"
        async with running("loraplex", "router", "--worker", url, "--port", str(port)) as router:
            await until_ready(f"http://{LOOPBACK}:{port}", 1)
            await ask_many(port, _WARM_UP, 4, 4)
            yield router.pid, port


async def until_ready(url: str, workers: int, seconds: float = _START_S) -> None:
    """Waits until the router there has so many workers. Raises BenchError."""
    deadline = time.monotonic() + seconds
    async with http_client(_PROBE_S) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                answer = await client.get(f"{url}/info")
                if answer.status_code == 200 and answer.json()["workers_ready"] >= workers:
                    return
            await asyncio.sleep(0.1)
    raise BenchError(f"the router at {url} was without its workers for {seconds:g} s")


async def measure(streams: int, tokens: int, requests: int, burst: int) -> Cost:
    """Measures all of a `Cost`. tokens: of each stream."""
    async with routed(0.01) as (pid, port):
        before = cpu_seconds(pid)
        streamed = await stream_many(port, streams, tokens)
        a_token = (cpu_seconds(pid) - before) / sum(one.output_tokens for one in streamed)
    async with routed(0.0) as (pid, port):
        a_request = {}
        for count in (1, 16):
            before = cpu_seconds(pid)
            await ask_many(port, requests, count, 32)
            a_request[count] = (cpu_seconds(pid) - before) / requests
        added = await ask_many(port, max(1, requests // 2), 1, 1)
        first_ms, last_ms = first_tokens(await stream_many(port, burst, 1))
    return Cost(
        streams=streams,
        us_a_token=1e6 * a_token,
        us_a_request=1e6 * a_request[1],
        us_a_request_of_16=1e6 * a_request[16],
        added_p50_ms=1e3 * percentile(added, 50),
        added_p99_ms=1e3 * percentile(added, 99),
        burst=burst,
        burst_first_ms=first_ms,
        burst_last_ms=last_ms,
    )


def add_arguments(parser: Parser) -> None:
    """Adds the sizes of the loads."""
    parser.add_argument("--streams", type=whole(1), default=256)
    parser.add_argument("--tokens", type=whole(1), default=128, help="of each stream")
    parser.add_argument("--requests", type=whole(1), default=4000, help="that are not streamed")
    parser.add_argument("--burst", type=whole(1), default=1000, help="streams asked for at once")


def run(arguments: argparse.Namespace) -> None:
    """Raises BenchError."""
    given = arguments
    cost = asyncio.run(measure(given.streams, given.tokens, given.requests, given.burst))
    print_points([cost], arguments.json)
