"""Real workers and routers as an operator runs them: started, killed, frozen, drained, replaced."""

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from loraplex.launcher.demo import adapter_paths, model_path
from loraplex.server.worker import tether
from tests.certifying.factory import certify
from tests.chaos.posts import Transport
from tests.engines import engines_below
from tests.network import Link
from tests.ports import free_port
from tests.router.shared.redis_server import RedisServer

READY_TIMEOUT_S = 240.0
POLL_S = 0.02


async def until(condition: Callable[[], bool]) -> None:
    """Polls what nobody tells of. Raises TimeoutError."""
    async with asyncio.timeout(READY_TIMEOUT_S):
        while True:
            if condition():
                return
            await asyncio.sleep(POLL_S)


class Process:
    """A program that keeps its port over its lives.

    lives: how often it was started. dying: it is about to be killed.
    """

    def __init__(self, name: str, arguments: Sequence[str], port: int, folder: Path) -> None:
        self.name = name
        self.port = port
        self.lives = 0
        self.dying = False
        self._arguments = [*arguments, "--port", str(port)]
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def start(self, environment: dict[str, str]) -> None:
        assert not self.alive
        self.lives += 1
        self.dying = False
        with self._log.open("ab") as out:
            self._process = tether.spawn(
                "loraplex", self._arguments, environment, output=out.fileno()
            )

    def signal(self, number: signal.Signals) -> None:
        if self.alive:
            os.kill(self.pid, number)

    async def exited(self) -> int:
        """Waits for the end; the exit code."""
        assert self._process is not None
        await until(lambda: not self.alive)
        return self._process.returncode

    def end(self) -> None:
        """Leaves nothing behind, whatever state it is in."""
        if self._process is not None and self.alive:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Served:
    """A base and its adapters, for a fleet to serve. adapters: names of folders in `roots`.
    options, kv_memory: of workers.
    """

    model: Path
    roots: Path
    adapters: tuple[str, ...]
    options: tuple[str, ...] = ()
    kv_memory: str = "16MiB"


def demo(step_s: float = 0.0) -> Served:
    """The demo's names, and tokens that certify their origin. step_s: seconds that a step takes."""
    paths, executor = adapter_paths(), certify(step_s=step_s, eos_percent=1)
    roots = next(iter(paths.values())).parent
    return Served(model_path(), roots, tuple(paths), ("--executor", executor))


@dataclass(frozen=True)
class Shape:
    """The parts of a fleet. step_s: seconds that a step of an engine takes. served: None = the
    demo.
    """

    workers: int = 3
    routers: int = 2
    step_s: float = 0.03
    served: Served | None = None


class Fleet:
    """`workers` x `routers`, every router with every worker; a Redis between the routers.

    links: what lies between them, in no order.
    """

    def __init__(
        self, folder: Path, shape: "Shape", redis: RedisServer, *router_options: str
    ) -> None:
        self.redis = redis
        self.secret = secrets.token_urlsafe(16)
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")},
            "LORAPLEX_SECRET": self.secret,
            "OMP_NUM_THREADS": "1",
        }
        self.links: list[Link] = []
        self._served = shape.served or demo(shape.step_s)
        self.workers = [self._worker(folder, i) for i in range(shape.workers)]
        self.routers = [self._router(folder, i, router_options) for i in range(shape.routers)]
        self._http = httpx.AsyncClient(timeout=2.0, transport=Transport())

    def _worker(self, folder: Path, number: int) -> Process:
        served = self._served
        arguments = [
            *("worker", str(served.model), *served.options),
            *("--worker-id", f"worker-{number}", "--model-name", "base"),
            *("--kv-memory", served.kv_memory),
            *("--adapter-root", str(served.roots), "--cache-dir", str(folder / f"cache-{number}")),
        ]
        return Process(f"worker-{number}", arguments, free_port(), folder)

    def _router(self, folder: Path, number: int, options: Sequence[str]) -> Process:
        arguments = ["router", "--cache-dir", str(folder / f"router-{number}")]
        arguments += ["--redis", self.redis.url, *options]
        for worker in self.workers:
            link = Link(worker.port, free_port())
            self.links.append(link)
            arguments += ["--worker", link.url]
        for name in self._served.adapters:
            arguments += ["--adapter", f"{name}=local:{name}"]
        return Process(f"router-{number}", arguments, free_port(), folder)

    @property
    def processes(self) -> list[Process]:
        return [*self.workers, *self.routers]

    def start(self, process: Process) -> None:
        process.start(self._environment)

    async def start_all(self) -> None:
        for link in self.links:
            await link.start()
        for process in self.processes:
            self.start(process)
        await self.until_whole()

    async def until_whole(self) -> None:
        """Every router has every worker ready. Raises AssertionError with the last log lines."""
        for router in self.routers:
            await self._until(router, len(self.workers))

    async def _until(self, router: Process, ready: int) -> None:
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while True:
                    if await self.ready_workers(router) >= ready:
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            tails = "\n".join(f"{p.name}: {p.log[-2000:]}" for p in self.processes)
            raise AssertionError(f"{router.name} has not all workers\n{tails}") from error

    async def ready_workers(self, router: Process) -> int:
        """As this router sees it; -1 when it does not answer."""
        try:
            answer = await self._http.get(f"{router.url}/info")
        except httpx.TransportError:
            return -1
        ready: int = answer.json()["workers_ready"] if answer.status_code == 200 else -1
        return ready

    async def until_up(self, process: Process) -> None:
        """Waits until a process that was started answers; routers may not know of its death yet."""
        async with asyncio.timeout(READY_TIMEOUT_S):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await self._http.get(f"{process.url}/health/ready")).status_code == 200:
                        return
                await asyncio.sleep(POLL_S)

    async def until_orphans_are_gone(self) -> None:
        """Every worker has seen that a router is gone, and has freed all that it ran for it."""

        async def one(worker: Process) -> None:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while True:
                    with contextlib.suppress(httpx.TransportError):  # late, as things are
                        routers = await self.metric(worker, "loraplex_worker_routers")
                        orphans = await self.metric(worker, "loraplex_worker_orphaned_sequences")
                        if routers < len(self.routers) and not orphans:
                            return
                    await asyncio.sleep(POLL_S)

        await asyncio.gather(*map(one, self.workers))

    async def metric(self, process: Process, name: str) -> float:
        """The sum of a metric's series."""
        text = (await self._http.get(f"{process.url}/metrics", timeout=240)).text
        lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    async def close(self) -> None:
        await self._http.aclose()
        for process in self.processes:
            process.end()
        for link in self.links:
            await link.close()


def engine_of(worker: Process) -> int | None:
    """The engine's process id, or None while there is none."""
    return next((int(engine.pid) for engine in engines_below(worker.pid)), None)
