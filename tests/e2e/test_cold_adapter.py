"""A cold adapter is fetched, checked and loaded beside running streams without holding one back."""

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect

from loraplex.adapters.ref import AdapterRef
from loraplex.launcher.demo import adapter_paths, model_path
from loraplex.server import protocol
from tests.e2e.serving import ROOT
from tests.ports import free_port
from tests.tethered import tethered

SECRET = "for-this-test-only"
STREAMS = 16
CALLERS = 50


@dataclass(frozen=True)
class Worker:
    port: int
    process: subprocess.Popen[bytes]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    port = free_port()
    log = tmp_path / "log"
    options = ["--port", str(port), "--cache-dir", str(tmp_path / "cache")]
    roots = ["--adapter-root", str(next(iter(adapter_paths().values())).parent)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            tethered(
                *(sys.executable, "-m", "loraplex", "worker", str(model_path()), *options, *roots)
            ),
            cwd=ROOT,
            env=os.environ | {"LORAPLEX_SECRET": SECRET},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Worker(port, process)
    finally:
        process.terminate()
        assert process.wait(timeout=240) == 0, log.read_text()[-4000:]


@asynccontextmanager
async def connected(worker: Worker) -> AsyncIterator[ClientConnection]:
    deadline = time.monotonic() + 120
    url = f"http://127.0.0.1:{worker.port}/health/ready"
    async with httpx.AsyncClient() as http:
        while not await answers(http, url):
            assert time.monotonic() < deadline
            assert worker.process.poll() is None
            await asyncio.sleep(0.1)  # polls a condition, bounded by the deadline
    headers = {"Authorization": f"Bearer {SECRET}"}
    address = f"ws://127.0.0.1:{worker.port}/connect"
    async with connect(
        address, additional_headers=headers, compression=None, max_size=protocol.MAX_FRAME_BYTES
    ) as socket:
        await socket.send(protocol.encode(protocol.RouterHello("test")))
        yield socket


async def answers(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(url)).status_code == 200
    except httpx.TransportError:
        return False


def request(name: str, adapter: str | None, max_tokens: int) -> protocol.GenerateRequest:
    sampling = protocol.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return protocol.GenerateRequest(name, 0, 0, adapter, [1, 5, 9], [], sampling, seed=1)


@dataclass
class Trace:
    """What one connection saw. steps: the streams that got a token, by engine step."""

    socket: ClientConnection
    steps: dict[int, list[str]]
    times: dict[int, float]
    ready: list[protocol.AdapterState]

    async def until(self, *, cold: str, live: int) -> None:
        """Reads frames until the cold request has a token and `live` streams have one."""
        seen: set[str] = set()
        while cold not in seen or len(seen) < live:
            frame = protocol.decode_worker_frame(await self.socket.recv(decode=False))
            if isinstance(frame, protocol.StepEvents):
                names = [event.request_id for event in frame.events]
                assert all(event.error is None for event in frame.events), frame
                self.steps[frame.step] += names
                self.times[frame.step] = time.perf_counter()
                seen.update(names)
            elif isinstance(frame, protocol.AdapterState) and frame.stage in ("ready", "failed"):
                self.ready.append(frame)
                if len(self.ready) == CALLERS:
                    assert frame.manifest is not None, frame
                    cold_request = request("cold", frame.manifest.digest, 4)
                    await self.socket.send(protocol.encode(cold_request))


async def test_streams_get_a_token_in_every_step_while_an_adapter_loads(worker: Worker) -> None:
    async with connected(worker) as socket:
        trace = Trace(socket, defaultdict(list), {}, [])
        for number in range(STREAMS):
            await socket.send(protocol.encode(request(f"stream {number}", None, 400)))
        await trace.until(cold="stream 0", live=STREAMS)
        first = max(trace.steps)
        ref = AdapterRef("local", str(adapter_paths()["sql"]))
        for number in range(CALLERS):
            await socket.send(protocol.encode(protocol.AdapterLoad(f"load {number}", ref)))
        await trace.until(cold="cold", live=1)
    assert all(state.manifest == trace.ready[0].manifest for state in trace.ready)
    during = {step: names for step, names in trace.steps.items() if step > first}
    assert sorted(during) == list(range(first + 1, max(during) + 1)), "a step without any stream"
    streams = {f"stream {number}" for number in range(STREAMS)}
    for step, names in during.items():
        assert streams <= set(names), f"step {step} left out {streams - set(names)}"
    times = [trace.times[step] for step in sorted(trace.times)]
    gaps = sorted(after - before for before, after in zip(times, times[1:], strict=False))
    print(
        f"{len(during)} steps while cold; gap between steps: "
        f"median {statistics.median(gaps) * 1e3:.1f} ms, longest {gaps[-1] * 1e3:.1f} ms"
    )


async def test_fifty_requests_for_a_cold_adapter_cause_one_fetch(worker: Worker) -> None:
    async with connected(worker) as socket, httpx.AsyncClient() as http:
        trace = Trace(socket, defaultdict(list), {}, [])
        ref = AdapterRef("local", str(adapter_paths()["pirate"]))
        for number in range(CALLERS):
            await socket.send(protocol.encode(protocol.AdapterLoad(f"load {number}", ref)))
        await trace.until(cold="cold", live=1)
        metrics = (await http.get(f"http://127.0.0.1:{worker.port}/metrics")).text
    assert 'loraplex_worker_adapter_fetches_total{source="local"} 1.0' in metrics, metrics
