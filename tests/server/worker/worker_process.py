"""A real worker process on the certifying engine, and a router's end of its WebSocket."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from websockets.asyncio.client import ClientConnection, connect

from loraplex.adapters.base import BaseSpec
from loraplex.server import protocol
from tests.adapter_folders import safetensors_bytes, small_base
from tests.certifying.factory import certify
from tests.engines import engines_below
from tests.tethered import tethered

ROOT = Path(__file__).parents[3]
SECRET = "for-tests-only"
BASE_NAME = "org/base"
VOCAB = 64
TIMEOUT_S = 240.0
LONG = 50_000  # output tokens of a sequence that outlives its test
CERTIFY = certify(step_s=0.002)


def base() -> BaseSpec:
    """The model that `write_model` writes, as adapters see it."""
    return small_base(vocab=VOCAB, names=(BASE_NAME,))


# A tokenizer that can be read, and knows no text.
NO_WORDS = json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}})


def write_model(folder: Path) -> Path:
    """A Llama folder with everything but useful weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2 * LONG,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(NO_WORDS)
    tensors = {"model.embed_tokens.weight": np.zeros((VOCAB, 32), np.float32)}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, "F32"))
    return folder


@dataclass
class Worker:
    """A worker process. port: where it listens."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_pid(self) -> int:
        (engine,) = engines_below(self.process.pid)
        return int(engine.pid)

    def get(self, path: str, secret: str | None = SECRET) -> httpx.Response:
        headers = {"Authorization": f"Bearer {secret}"} if secret is not None else {}
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=TIMEOUT_S, trust_env=False)

    def wait_ready(self) -> None:
        """Polls the real state, bounded in time."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            try:
                if self.get("/health/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.02)

    def metric(self, name: str) -> float:
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(f"loraplex_worker_{name} "):
                return float(line.split()[-1])
        raise AssertionError(f"no metric {name}")


def start(
    folder: Path,
    *options: str,
    secret: str | None = SECRET,
    executor: str = CERTIFY,
    inside: Sequence[str] = (),
) -> Worker:
    """Starts it and returns at once; the test's process holds the bound socket.

    inside: a command that becomes the one which follows it.
    """
    model = write_model(folder / "model")
    log = folder / "worker.log"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
    if secret is not None:
        environ["LORAPLEX_SECRET"] = secret
    with socket.socket() as listener, log.open("ab") as out:
        listener.bind(("127.0.0.1", 0))
        process = subprocess.Popen(
            tethered(
                *(*inside, sys.executable, "-m", "loraplex", "worker", str(model)),
                *("--executor", executor, "--model-name", BASE_NAME),
                *("--cache-dir", str(folder / "cache"), "--listen-fd", str(listener.fileno())),
                *("--drain-timeout-s", "0.2", *options),
            ),
            cwd=ROOT,
            env=environ,
            stdout=out,
            stderr=subprocess.STDOUT,
            pass_fds=(listener.fileno(),),
        )
        return Worker(process, listener.getsockname()[1], log)


@contextmanager
def running(
    folder: Path,
    *options: str,
    secret: str | None = SECRET,
    executor: str = CERTIFY,
    inside: Sequence[str] = (),
) -> Iterator[Worker]:
    """A ready worker; it and its engine are gone at the end, and it left with code 0."""
    worker = start(folder, *options, secret=secret, executor=executor, inside=inside)
    try:
        worker.wait_ready()
        yield worker
        family = psutil.Process(worker.process.pid).children(recursive=True)
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(TIMEOUT_S) == 0, worker.log.read_text()
        _, alive = psutil.wait_procs(family, TIMEOUT_S)
        assert not alive
    finally:
        worker.process.kill()
        worker.process.wait(TIMEOUT_S)


@dataclass
class Router:
    """A router's end: frames are sorted as they arrive; `until` waits for a condition on them."""

    socket: ClientConnection
    hello: protocol.WorkerHello
    events: list[protocol.TokenEvent] = field(default_factory=list)
    frames: list[protocol.StepEvents] = field(default_factory=list)
    loads: list[protocol.AdapterState] = field(default_factory=list)
    statuses: list[protocol.WorkerStatus] = field(default_factory=list)
    reports: dict[str, protocol.AdapterReport] = field(default_factory=dict)
    pictures: list[protocol.WorkerPicture] = field(default_factory=list)

    async def send(self, *frames: protocol.RouterFrame) -> None:
        for frame in frames:
            await self.socket.send(protocol.encode(frame))

    async def receive(self) -> None:
        frame = protocol.decode_worker_frame(await self.socket.recv(decode=False))
        if isinstance(frame, protocol.StepEvents):
            self.frames.append(frame)
            self.events.extend(frame.events)
        elif isinstance(frame, protocol.AdapterState):
            self.loads.append(frame)
        elif isinstance(frame, protocol.WorkerStatus):
            self.statuses.append(frame)
        elif isinstance(frame, protocol.AdapterReport):
            self.reports[frame.order_id] = frame
        elif isinstance(frame, protocol.WorkerPicture):
            self.pictures.append(frame)

    async def until_finished(self, *names: str) -> dict[str, protocol.TokenEvent]:
        async with asyncio.timeout(TIMEOUT_S):
            while not set(names) <= self.finished.keys():
                await self.receive()
        return self.finished

    async def until_started(self, *names: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not set(names) <= {event.request_id for event in self.events}:
                await self.receive()

    async def until_status(self, **expected: Any) -> protocol.WorkerStatus:
        """The next status from now on that has these values."""
        seen = len(self.statuses)
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                for status in self.statuses[seen:]:
                    if all(getattr(status, k) == v for k, v in expected.items()):
                        return status
                seen = len(self.statuses)
                await self.receive()

    async def until_loaded(self, count: int) -> list[protocol.AdapterState]:
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.final_loads) < count:
                await self.receive()
        return self.final_loads

    async def order(
        self, name: str, action: protocol.OrderAction, *digests: str
    ) -> protocol.AdapterReport:
        await self.send(protocol.AdapterOrder(name, action, digests))
        return await self.until_report(name)

    async def until_report(self, name: str) -> protocol.AdapterReport:
        async with asyncio.timeout(TIMEOUT_S):
            while name not in self.reports:
                await self.receive()
        return self.reports[name]

    async def inspect(self, known: int = 0) -> protocol.WorkerPicture:
        seen = len(self.pictures)
        await self.send(protocol.Inspect(f"picture-{seen}", known))
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.pictures) == seen:
                await self.receive()
        return self.pictures[seen]

    async def until_closed(self) -> str:
        """The reason that the worker gives for closing."""
        async with asyncio.timeout(TIMEOUT_S):
            await self.socket.wait_closed()
        return self.socket.close_reason or ""

    @property
    def finished(self) -> dict[str, protocol.TokenEvent]:
        terminal = [event for event in self.events if event.finish is not None]
        by_name = {event.request_id: event for event in terminal}
        assert len(by_name) == len(terminal), "a sequence ended twice"
        return by_name

    @property
    def final_loads(self) -> list[protocol.AdapterState]:
        return [state for state in self.loads if state.stage in ("ready", "failed")]

    def tokens_of(self, name: str) -> list[int]:
        return [t for event in self.events if event.request_id == name for t in event.token_ids]


def dial(worker: Worker, secret: str | None = SECRET, **options: Any) -> connect:
    headers = {"Authorization": f"Bearer {secret}"} if secret is not None else {}
    return connect(
        f"ws://127.0.0.1:{worker.port}/connect",
        additional_headers=headers,
        compression=None,
        max_size=protocol.MAX_FRAME_BYTES,
        proxy=None,
        **options,
    )


@asynccontextmanager
async def connected(worker: Worker, name: str = "router") -> AsyncIterator[Router]:
    async with dial(worker) as client:
        await client.send(protocol.encode(protocol.RouterHello(name)))
        hello = protocol.decode_worker_frame(await client.recv(decode=False))
        assert isinstance(hello, protocol.WorkerHello)
        yield Router(client, hello)


def request(
    name: str,
    max_tokens: int = 4,
    adapter: str | None = None,
    prompt: tuple[int, ...] = (1, 5, 9),
    accepted: tuple[int, ...] = (),
) -> protocol.GenerateRequest:
    sampling = protocol.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return protocol.GenerateRequest(
        name, 0, 0, adapter, list(prompt), list(accepted), sampling, seed=1
    )
