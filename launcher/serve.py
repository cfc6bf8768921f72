"""`loraplex serve`: a worker and a router on this machine, started, joined, watched and stopped."""

import asyncio
import contextlib
import dataclasses
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import httpx

from adapters.common.loopback import is_loopback
from launcher.config import (
    ROUTER_OPTIONS,
    WORKER_OPTIONS,
    check_router,
    check_worker,
    child_environment,
)
from launcher.options import Option, Values, render, values_of
from launcher.plan import LOOPBACK, ServePlan, plan
from launcher.processes import Child, ChildSupervisor, Say, say, start_child
from launcher.until_signal import Supervised, run_services
from router.config import RouterConfig
from router.tenancy.tenancy import needs_keys
from server.worker.address import open_listener
from server.worker.process.model_source import check_model

POLL_INTERVAL_S = 0.1
STOP_MARGIN_S = 10.0


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
    """One run of `loraplex serve`."""

    def __init__(self, plan: ServePlan, environ: Mapping[str, str]) -> None:
        port = free_port(plan.router.host, plan.router.port)
        # Kept open here, so that a restarted worker is found where the first one was.
        self._listener = open_listener(LOOPBACK, 0)
        self._worker_url = f"http://{LOOPBACK}:{self._listener.getsockname()[1]}"
        secret = secrets.token_urlsafe(32)
        self._plan = dataclasses.replace(
            plan,
            worker=dataclasses.replace(plan.worker, secret=secret),
            router=dataclasses.replace(
                plan.router,
                port=port,
                secret=secret,
                workers=(self._worker_url.replace("http", "ws"),),
            ),
        )
        self._environ = environ
        self.worker = ChildSupervisor("worker", self._start_worker, say)
        self.router = ChildSupervisor("router", self._start_router, say)

    @property
    def url(self) -> str:
        host = self._plan.router.host
        shown = {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        scheme = "http" if self._plan.router.tls_cert is None else "https"
        return f"{scheme}://{shown}:{self._plan.router.port}"

    def _start_worker(self, on_line: Say) -> Child:
        values = values_of(self._plan.worker)
        options = [option for option in WORKER_OPTIONS if option.field not in ("model", "port")]
        fd = self._listener.fileno()
        arguments = ["worker", self._plan.worker.model, f"--listen-fd={fd}"]
        return self._start_child(arguments, options, values, on_line, (fd,))

    def _start_router(self, on_line: Say) -> Child:
        values = values_of(self._plan.router)
        return self._start_child(["router"], ROUTER_OPTIONS, values, on_line)

    def _start_child(
        self,
        command: list[str],
        options: Sequence[Option],
        values: Mapping[str, Values],
        on_line: Say,
        pass_fds: tuple[int, ...] = (),
    ) -> Child:
        environ = child_environment(self._environ, options, values)
        return start_child([*command, *render(options, values)], environ, on_line, pass_fds)

    async def run(self, client: ServeClient | None = None) -> bool:
        """Until a signal, or the client's end. False when it was stopped at once. Raises
        ChildFailed."""

        async def announce() -> None:
            await self._until_ready()
            if client is None:
                console = f"{self.url}/console"
                say(f"ready at {self.url}, console at {console}. Try:\n\n{self.example()}\n")
            else:
                client.server_ready(self.url)

        async def stop_all() -> None:
            if client is not None:
                await client.stop()
            await self._stop_all()

        clients = () if client is None else (client,)
        with self._listener:
            return await run_services((self.worker, self.router, *clients), announce, stop_all)

    async def _stop_all(self) -> None:
        """The router first: it finishes its answers while the worker still computes."""
        router = self._plan.router
        await self.router.stop(router.drain_delay_s + router.drain_timeout_s + STOP_MARGIN_S)
        await self.worker.stop(self._plan.worker.drain_timeout_s + STOP_MARGIN_S)

    async def _until_ready(self) -> None:
        # It asks its own children, and sends no secret: whose names a certificate has is no matter.
        async with httpx.AsyncClient(trust_env=False, timeout=5.0, verify=False) as http:
            await _until_ready(http, self._worker_url)
            self.worker.was_ready.set()
            await _until_ready(http, self.url)
            self.router.was_ready.set()

    def example(self) -> str:
        """A curl line that can be pasted; where callers have keys, into a shell with one in KEY."""
        parameters: dict[str, object] = {"max_new_tokens": 64}
        if self._plan.aliases:
            parameters["adapter_id"] = self._plan.aliases[0]
        body = json.dumps({"inputs": self._plan.example, "parameters": parameters})
        quoted = body.replace("'", "'\\''")
        key = ' -H "Authorization: Bearer $KEY"' if needs_keys(self._plan.router) else ""
        return (
            f"    curl {self.url}/generate{key} -H 'Content-Type: application/json' -d '{quoted}'"
        )


async def _until_ready(http: httpx.AsyncClient, url: str) -> None:
    while True:
        with contextlib.suppress(httpx.TransportError):
            if (await http.get(f"{url}/health/ready")).status_code == 200:
                return
        await asyncio.sleep(POLL_INTERVAL_S)


def warn_if_open(config: RouterConfig, say: Callable[[str], None]) -> None:
    if not is_loopback(config.host) and not needs_keys(config):
        say(f"anyone who reaches {config.host}:{config.port} may use this server")


def checked_plan(values: Mapping[str, Values]) -> ServePlan:
    """Raises OptionError; of a model that cannot be served ModelError or CheckpointError."""
    chosen = plan(values)
    check_router(chosen.router)
    check_worker(chosen.worker)
    with_tensors = chosen.worker.executor == "torch"
    check_model(chosen.worker.model, chosen.worker.revision, with_tensors=with_tensors)
    return chosen


def serve(values: Mapping[str, Values], environ: Mapping[str, str]) -> None:
    """Blocks until stopped. Raises AddressError, ChildFailed, KeyboardInterrupt, and what
    `checked_plan` raises, before anything is started."""
    chosen = checked_plan(values)
    warn_if_open(chosen.router, say)
    if not asyncio.run(_run(chosen, environ)):
        raise KeyboardInterrupt


async def _run(chosen: ServePlan, environ: Mapping[str, str]) -> bool:
    return await Serve(chosen, environ).run()
