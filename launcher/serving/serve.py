"""`loraplex serve`: workers and a router on this machine, started, joined, watched and stopped."""

import asyncio
import dataclasses
import json
import os
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import httpx

from loraplex.adapters.common import extras
from loraplex.adapters.common.loopback import is_loopback
from loraplex.launcher.config import check_router, check_worker, child_environment, document_of
from loraplex.launcher.model_needs import ModelNeeds, choose_groups
from loraplex.launcher.options import Values
from loraplex.launcher.serving.local_worker import (
    POLL_INTERVAL_S,
    STOP_MARGIN_S,
    local_workers,
    until_ready,
    watched_ports,
)
from loraplex.launcher.serving.plan import (
    LOOPBACK,
    LocalBase,
    ServePlan,
    asked_of_each,
    check_room,
    plan,
    shifted,
)
from loraplex.launcher.serving.processes import (
    Child,
    ChildSupervisor,
    Say,
    say,
    show_bar,
    start_child,
    write_lines_as,
)
from loraplex.launcher.serving.until_signal import Supervised, run_services
from loraplex.router.config import RouterConfig
from loraplex.router.tenancy.tenancy import needs_keys
from loraplex.server.engine.messages import StartProgress
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.served_as import served_as
from loraplex.server.worker.address import open_listener
from loraplex.server.worker.process.device import (
    ChosenDevice,
    choose_device,
    cuda_devices,
    torch_build,
)
from loraplex.server.worker.process.model_source import check_model
from loraplex.server.worker.process.sizing import choose_sizes
from loraplex.server.worker.setup import host_bytes

_BAR_WIDTH = 20


def free_port(host: str, port: int) -> int:
    """The port to serve on. Raises AddressError when it is taken, before anything is loaded."""
    with open_listener(host, port) as probe:
        chosen: int = probe.getsockname()[1]
        return chosen


class ServeClient(Supervised, Protocol):
    """Uses the server while it runs, and ends it."""

    def server_ready(self, url: str) -> None: ...

    async def stop(self) -> None: ...


class Serve:
    """Runs the router and workers of one `loraplex serve`."""

    def __init__(self, plan: ServePlan, environ: Mapping[str, str]) -> None:
        is_local = plan.router.uds is not None
        port = plan.router.port if is_local else free_port(plan.router.host, plan.router.port)
        secret = secrets.token_urlsafe(32)
        self._plan = plan
        self._environ = environ
        bases = [(g, dataclasses.replace(config, secret=secret)) for g, config in plan.bases]
        self.workers = local_workers(bases, environ, watched_ports(plan))
        addresses = tuple(f"ws://{worker.address}" for worker in self.workers)
        self._router = dataclasses.replace(plan.router, port=port, secret=secret, workers=addresses)
        self.router = ChildSupervisor("router", self._start_router, say)

    @property
    def url(self) -> str:
        """The URL at which the router is reached. On a Unix socket the host's name says nothing."""
        if self._router.uds is not None:
            return "http://localhost"
        host = self._router.host
        shown = {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        scheme = "http" if self._router.tls_cert is None else "https"
        return f"{scheme}://{shown}:{self._router.port}"

    def _start_router(self, on_line: Say) -> Child:
        environ, document = child_environment(self._environ), document_of(self._router)
        return start_child(["router", "--started-as=router"], environ, on_line, document=document)

    async def run(self, client: ServeClient | None = None) -> bool:
        """Runs until a signal, or the client's end. False = stopped at once. Raises ChildFailed."""

        async def announce() -> None:
            await self._until_ready()
            if client is None:
                uds = self._router.uds
                where = uds or f"{self.url}, console at {self.url}/console"
                say(f"ready at {where}. Try:\n\n{self.example()}\n")
            else:
                client.server_ready(self.url)

        async def stop_all() -> None:
            if client is not None:
                await client.stop()
            await self._stop_all()

        clients = () if client is None else (client,)
        services = (*(worker.service for worker in self.workers), self.router, *clients)
        try:
            return await run_services(services, announce, stop_all)
        finally:
            for worker in self.workers:
                worker.close()

    async def _stop_all(self) -> None:
        """Stops the router first: it finishes its answers while workers still compute."""
        router = self._router
        await self.router.stop(router.drain_delay_s + router.drain_timeout_s + STOP_MARGIN_S)
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    async def _until_ready(self) -> None:
        async with self._http_client() as http:
            showing = asyncio.create_task(self._show_start())
            try:
                await asyncio.gather(*(worker.until_ready(http) for worker in self.workers))
            finally:
                showing.cancel()
                show_bar("")
            await until_ready(http, self.url)
            self.router.was_ready.set()

    def _http_client(self) -> httpx.AsyncClient:
        """A client for this command's children. It sends no secret: any certificate will do."""
        uds = self._router.uds
        mounts = {} if uds is None else {self.url: httpx.AsyncHTTPTransport(uds=os.fspath(uds))}
        return httpx.AsyncClient(trust_env=False, timeout=5.0, verify=False, mounts=mounts)

    async def _show_start(self) -> None:
        """Show the slowest worker's start on a terminal. In a log each worker speaks for itself."""
        begun = time.monotonic()
        while self._router.log_format == "text":
            waiting = [worker for worker in self.workers if not worker.service.was_ready.is_set()]
            stages = [worker.progress for worker in waiting]
            line = start_line(stages, len(self.workers), time.monotonic() - begun)
            show_bar(f"loraplex: {line}"[: shutil.get_terminal_size().columns - 1])
            await asyncio.sleep(POLL_INTERVAL_S)

    def example(self) -> str:
        """A curl line that can be pasted; where callers have keys, into a shell with one in KEY."""
        asked: dict[str, object] = {"inputs": self._plan.example}
        if self._plan.route == "/generate":
            parameters: dict[str, object] = {"max_new_tokens": 64}
            if self._plan.aliases and self._plan.all_write:
                parameters["adapter_id"] = self._plan.aliases[0]
            asked["parameters"] = parameters
        body = json.dumps(asked)
        quoted = body.replace("'", "'\\''")
        key = ' -H "Authorization: Bearer $KEY"' if needs_keys(self._router) else ""
        uds = self._router.uds
        way = "" if uds is None else f"--unix-socket {shlex.quote(os.fspath(uds))} "
        where = f"{way}{self.url}{self._plan.route}{key}"
        return f"    curl {where} -H 'Content-Type: application/json' -d '{quoted}'"


def warn_if_open(config: RouterConfig, say: Callable[[str], None]) -> None:
    if not is_loopback(config.host) and not needs_keys(config):
        say(f"anyone who reaches {config.host}:{config.port} may use this server")


def checked_plan(values: Mapping[str, Values]) -> ServePlan:
    """Plans the processes of `serve` and checks the model and options. Raises OptionError,
    DeviceError; of a model that cannot be served ModelError, CheckpointError, ConfigError or
    WorkerStartError.
    """
    chosen = plan(values)
    check_router(chosen.router)
    check_worker(chosen.worker)
    with_tensors = chosen.worker.executor == "torch"
    if with_tensors:
        extras.require("torch")
    models = [
        check_model(config.model, config.revision, with_tensors=with_tensors)
        for _, config in chosen.bases
    ]
    all_write = all(model.writes for model in models)
    chosen = dataclasses.replace(chosen, route=_route(models[0]), all_write=all_write)
    return _divided(chosen, models) if with_tensors else chosen


def _route(model: ModelSpec) -> str:
    """A route of what a model gives."""
    if model.writes:
        return "/generate"
    return "/embed" if model.classes is None else "/classify"


def _divided(chosen: ServePlan, models: Sequence[ModelSpec]) -> ServePlan:
    """Divides GPUs and memory among workers. models: of each base. Raises as `checked_plan`."""
    gpus, asked = cuda_devices(), chosen.asked
    device = choose_device(chosen.worker.device, gpus, torch_build())
    left = list(range(len(gpus)))
    if len(models) > 1:
        asked = asked_of_each(asked)
        if device.kind == "cuda":
            is_divided = chosen.worker.kv_memory is not None
            check_room(len(models), len(gpus), is_divided=is_divided)
    found = []
    for model, (_, config) in zip(models, chosen.bases, strict=True):
        forms = (config.quantize, config.activations, config.picture_memory)
        needs = ModelNeeds(config, served_as(model, *forms), device)
        groups = choose_groups(asked, needs, [gpus[place] for place in left])
        if len(models) > 1 and len(gpus) > 1:
            groups = shifted(groups, left)
            taken = {place for group in groups.gpus for place in group}
            left = [place for place in left if place not in taken]
        found.append(LocalBase(groups, config))
    divided = dataclasses.replace(chosen, bases=tuple(found))
    if divided.num_workers == 1:
        return divided
    host = host_bytes() // divided.num_workers
    bases = tuple(_with_share(base, device, host) for base in found)
    return dataclasses.replace(divided, bases=bases)


def _with_share(base: LocalBase, device: ChosenDevice, host: int) -> LocalBase:
    """The base, whose workers have a share of the host's memory. host: bytes of each worker."""
    each = dataclasses.replace(base.worker, tp=base.groups.tp)
    kept = choose_sizes(each, device.kind, device.memory_bytes, host).host_adapter_memory
    return base._replace(worker=dataclasses.replace(base.worker, host_adapter_memory=kept))


def serve(
    values: Mapping[str, Values], environ: Mapping[str, str], notes: Iterable[str] = ()
) -> None:
    """Runs a router and its workers. Blocks until stopped. notes: are said first. Raises
    AddressError, ChildFailed, KeyboardInterrupt, and what `checked_plan` raises, before anything
    is started.
    """
    chosen = checked_plan(values)
    write_lines_as(chosen.router.log_format)
    for note in notes:
        say(note)
    warn_if_open(chosen.router, say)
    for groups, config in chosen.bases:
        if groups.are_several:
            name = f"{config.model_names[0]}: " if len(chosen.bases) > 1 else ""
            say(f"{name}{groups.written()}")
    if not asyncio.run(_run(chosen, environ)):
        raise KeyboardInterrupt


async def _run(chosen: ServePlan, environ: Mapping[str, str]) -> bool:
    return await Serve(chosen, environ).run()


def start_line(waiting: Sequence[StartProgress], workers: int, seconds: float) -> str:
    """How far the start is, as a line of a terminal. waiting: workers that are not ready, of
    `workers`. seconds: since the start."""
    if not waiting:
        return f"starting the router, {seconds:.0f} s"
    slowest = min(waiting, key=_share)
    filled = round(_BAR_WIDTH * _share(slowest))
    bar = f" [{'#' * filled}{'-' * (_BAR_WIDTH - filled)}]" if slowest.total else ""
    ready = f", {workers - len(waiting)} of {workers} workers ready" if workers > 1 else ""
    return f"{slowest}{bar}, {seconds:.0f} s{ready}"


def _share(progress: StartProgress) -> float:
    return min(progress.done / progress.total, 1.0) if progress.total else 0.0
