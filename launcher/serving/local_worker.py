"""The workers of `loraplex serve`: what each has of the machine, its port and its process."""

import asyncio
import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from loraplex.launcher.config import child_environment, document_of
from loraplex.launcher.options import MAX_PORT, OptionError
from loraplex.launcher.serving.plan import LOOPBACK, ServePlan
from loraplex.launcher.serving.processes import Child, ChildSupervisor, Say, say, start_child
from loraplex.launcher.worker_groups import WorkerGroups
from loraplex.server.config import WorkerConfig
from loraplex.server.engine.messages import StartProgress
from loraplex.server.worker.address import open_listener

POLL_INTERVAL_S = 0.1
STOP_MARGIN_S = 10.0
VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


class LocalWorker:
    """A worker, whose port outlives its processes: a restarted one is found there again."""

    def __init__(
        self,
        name: str,
        config: WorkerConfig,
        environ: Mapping[str, str],
        watched: socket.socket | None = None,
    ) -> None:
        """Opens a worker's socket; its process is not started yet. watched: where it answers
        /metrics and /health alone.
        """
        self.config = config
        self.environ = environ
        self._listener = open_listener(LOOPBACK, 0)
        self._watched = watched
        self.address = f"{LOOPBACK}:{self._listener.getsockname()[1]}"
        self.service = ChildSupervisor(name, self._start, say)
        self.progress = StartProgress("preparing the model")

    def _start(self, on_line: Say) -> Child:
        fds = {"listen": self._listener.fileno()}
        if self._watched is not None:
            fds["metrics"] = self._watched.fileno()
        given = [f"--{name}-fd={fd}" for name, fd in fds.items()]
        arguments = ["worker", f"--started-as={self.service.name}", *given]
        environ, document = child_environment(self.environ), document_of(self.config)
        return start_child(arguments, environ, on_line, tuple(fds.values()), document)

    async def until_ready(self, http: httpx.AsyncClient) -> None:
        await until_ready(http, f"http://{self.address}", self._heard)
        self.service.was_ready.set()

    def _heard(self, facts: dict[str, Any]) -> None:
        """Notes a worker's progress. facts: its answer while it is not ready."""
        if "stage" in facts:
            fields = (facts[name] for name in StartProgress.__struct_fields__)
            self.progress = StartProgress(*fields)

    async def stop(self) -> None:
        await self.service.stop(self.config.drain_timeout_s + STOP_MARGIN_S)

    def close(self) -> None:
        self._listener.close()
        if self._watched is not None:
            self._watched.close()


async def until_ready(
    http: httpx.AsyncClient, url: str, heard: Callable[[dict[str, Any]], None] | None = None
) -> None:
    """Wait until a worker is ready. heard: is called with each answer before."""
    while True:
        with contextlib.suppress(httpx.TransportError, ValueError):
            answer = await http.get(f"{url}/health/ready")
            if answer.status_code == 200:
                return
            if heard is not None:
                heard(answer.json())
        await asyncio.sleep(POLL_INTERVAL_S)


def local_workers(
    bases: Sequence[tuple[WorkerGroups, WorkerConfig]],
    environ: Mapping[str, str],
    watched: Sequence[socket.socket] = (),
) -> list[LocalWorker]:
    """Makes the workers that one command starts, one for each group of GPUs. bases: the groups of
    each base, and the config of its workers. environ: the launcher's. watched: of each worker.
    Raises AddressError.
    """
    asked = [
        (dataclasses.replace(config, tp=groups.tp), groups, number)
        for groups, config in bases
        for number in range(groups.workers)
    ]
    processes = sum(groups.workers * groups.tp for groups, _ in bases)
    places: Sequence[socket.socket | None] = watched or [None] * len(asked)
    are_several, made = len(asked) > 1, []
    for place, (config, groups, number) in enumerate(asked):
        name = f"worker-{place}" if are_several else "worker"
        if are_several:
            config = dataclasses.replace(config, worker_id=name)
        own = dict(environ) | _gpus(groups.gpus[number], environ)
        if are_several and THREADS not in environ:
            own[THREADS] = str(max(1, (len(os.sched_getaffinity(0)) - 1) // processes))
        made.append(LocalWorker(name, config, own, places[place]))
    return made


def watched_ports(plan: ServePlan) -> list[socket.socket]:
    """Ports behind the routers' --metrics-port, one a worker. Raises AddressError, OptionError."""
    router = plan.router
    if not router.metrics_port:
        return []
    first = router.metrics_port + router.router_processes
    ports = range(first, first + plan.num_workers)
    if ports[-1] > MAX_PORT or router.port in ports:
        raise OptionError(
            f"--metrics-port {router.metrics_port}: the workers take the ports {first} to "
            f"{ports[-1]}, of which none may be --port {router.port} or beyond {MAX_PORT}"
        )
    return [open_listener(router.host, port, flag="--metrics-port") for port in ports]


def _gpus(gpus: Sequence[int], environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that gives one worker its GPUs."""
    return {VISIBLE: visible(environ.get(VISIBLE), gpus)} if gpus else {}


def visible(named: str | None, places: Sequence[int]) -> str:
    """GPUs as CUDA names them. named: those that are shown now, by number, UUID or MIG instance;
    None = all. places: of those that are meant."""
    if named is None:
        return ",".join(map(str, places))
    shown = [name.strip() for name in named.split(",")]
    return ",".join(shown[place] for place in places)
