"""The workers of `loraplex serve`: what each has of the machine, its port and its process."""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence

import httpx

from launcher.config import WORKER_OPTIONS, child_environment
from launcher.options import render, values_of
from launcher.plan import LOOPBACK
from launcher.processes import Child, ChildSupervisor, Say, say, start_child
from launcher.worker_groups import WorkerGroups
from server.config import WorkerConfig
from server.worker.address import open_listener

POLL_INTERVAL_S = 0.1
STOP_MARGIN_S = 10.0
VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


class LocalWorker:
    """Its port outlives its processes, so that a restarted one is found where the first was."""

    def __init__(self, name: str, config: WorkerConfig, environ: Mapping[str, str]) -> None:
        self.config = config
        self.environ = environ
        self._listener = open_listener(LOOPBACK, 0)
        self.address = f"{LOOPBACK}:{self._listener.getsockname()[1]}"
        self.service = ChildSupervisor(name, self._start, say)

    def _start(self, on_line: Say) -> Child:
        values = values_of(self.config)
        options = [option for option in WORKER_OPTIONS if option.field not in ("model", "port")]
        fd = self._listener.fileno()
        arguments = ["worker", self.config.model, f"--listen-fd={fd}", *render(options, values)]
        environ = child_environment(self.environ, options, values)
        return start_child(arguments, environ, on_line, (fd,))

    async def until_ready(self, http: httpx.AsyncClient) -> None:
        await until_ready(http, f"http://{self.address}")
        self.service.was_ready.set()

    async def stop(self) -> None:
        await self.service.stop(self.config.drain_timeout_s + STOP_MARGIN_S)

    def close(self) -> None:
        self._listener.close()


async def until_ready(http: httpx.AsyncClient, url: str) -> None:
    while True:
        with contextlib.suppress(httpx.TransportError):
            if (await http.get(f"{url}/health/ready")).status_code == 200:
                return
        await asyncio.sleep(POLL_INTERVAL_S)


def local_workers(
    groups: WorkerGroups, config: WorkerConfig, environ: Mapping[str, str]
) -> list[LocalWorker]:
    """config: of all of them. environ: the launcher's. Raises AddressError."""
    config = dataclasses.replace(config, tp=groups.tp)
    if groups.workers == 1:
        return [LocalWorker("worker", config, {**environ, **_share(groups, 0, environ)})]
    names = [f"worker-{number}" for number in range(groups.workers)]
    return [
        LocalWorker(
            name,
            dataclasses.replace(config, worker_id=name),
            {**environ, **_share(groups, number, environ)},
        )
        for number, name in enumerate(names)
    ]


def _share(groups: WorkerGroups, number: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that give one worker its part of the machine."""
    share, gpus = {}, groups.gpus[number]
    if gpus:
        share[VISIBLE] = visible(environ.get(VISIBLE), gpus)
    if groups.workers > 1 and THREADS not in environ:
        cores = len(os.sched_getaffinity(0)) - 1
        share[THREADS] = str(max(1, cores // (groups.workers * groups.tp)))
    return share


def visible(named: str | None, places: Sequence[int]) -> str:
    """GPUs as CUDA names them. named: those that are shown now, by number, UUID or MIG instance;
    None = all. places: of those that are meant."""
    if named is None:
        return ",".join(map(str, places))
    shown = [name.strip() for name in named.split(",")]
    return ",".join(shown[place] for place in places)
