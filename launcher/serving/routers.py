"""`loraplex router --router-processes N`: processes on one port, started, watched and stopped."""

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import replace

from loraplex.launcher.config import child_environment, document_of
from loraplex.launcher.options import MAX_PORT, OptionError
from loraplex.launcher.serving.processes import (
    Child,
    ChildSupervisor,
    Say,
    said_in,
    say,
    start_child,
    write_lines_as,
)
from loraplex.launcher.serving.until_signal import run_services
from loraplex.router.config import RouterConfig
from loraplex.router.http.listeners import LISTENING, listen, share, url_of

# Beyond what a router takes by its own options: its last words, and the end of its process.
STOP_MARGIN_S = 8.0


def check(config: RouterConfig) -> None:
    """Checks the options. Raises OptionError for what several processes cannot have."""
    count, metrics = config.router_processes, config.metrics_port
    if not config.redis:
        raise OptionError(
            f"--router-processes {count} needs --redis: several processes share keys, quotas and "
            "idempotency there"
        )
    if not metrics:
        return
    last = metrics + count - 1
    if last > MAX_PORT or metrics <= config.port <= last:
        raise OptionError(
            f"--metrics-port {metrics}: {count} processes take the ports {metrics} to {last}, of "
            f"which none may be --port {config.port} or beyond {MAX_PORT}"
        )


def reserve(config: RouterConfig) -> socket.socket:
    """Holds the port for as long as the processes come and go. Raises OSError."""
    # Whoever listens there already would get a part of the connections, and nobody an error.
    with listen(config.host, config.port) as probe:
        port: int = probe.getsockname()[1]
    return share(config.host, port)


class Routers:
    """One run of all processes. The socket is not listened on here; it is closed in the end."""

    def __init__(
        self,
        config: RouterConfig,
        held: socket.socket,
        environ: Mapping[str, str],
    ) -> None:
        self._config = replace(config, port=held.getsockname()[1])
        self._held = held
        self._environ = environ
        self._services = [self._service(number) for number in range(config.router_processes)]

    def _service(self, number: int) -> ChildSupervisor:
        def start(on_line: Say) -> Child:
            def heard(line: str) -> None:
                on_line(line)
                if said_in(line).startswith(LISTENING):
                    service.was_ready.set()

            return self._start(number, heard)

        service = ChildSupervisor(f"router-{number}", start, say)
        return service

    def _start(self, number: int, on_line: Say) -> Child:
        first = self._config.metrics_port
        own = replace(self._config, metrics_port=first + number if first else 0)
        arguments = ["router", "--one-of-several", f"--started-as=router-{number}"]
        environ, document = child_environment(self._environ), document_of(own)
        return start_child(arguments, environ, on_line, document=document)

    async def run(self) -> bool:
        """Run until a signal. Returns False when stopped at once. Raises ChildFailed."""
        with self._held:
            return await run_services(self._services, self._announce, self._stop_all)

    async def _stop_all(self) -> None:
        """Stop all together: each finishes its own answers."""
        config = self._config
        limit_s = config.drain_delay_s + config.drain_timeout_s + STOP_MARGIN_S
        await asyncio.gather(*(service.stop(limit_s) for service in self._services))

    async def _announce(self) -> None:
        for service in self._services:
            await service.was_ready.wait()
        scheme = "http" if self._config.tls_cert is None else "https"
        count = self._config.router_processes
        say(f"{count} router processes listen on {url_of(self._held, scheme)}")


def run(config: RouterConfig, environ: Mapping[str, str]) -> None:
    """Runs routers until stopped. Raises OptionError, OSError, ChildFailed, KeyboardInterrupt."""
    write_lines_as(config.log_format)
    check(config)
    if not asyncio.run(_run(config, reserve(config), environ)):
        raise KeyboardInterrupt


async def _run(config: RouterConfig, held: socket.socket, environ: Mapping[str, str]) -> bool:
    return await Routers(config, held, environ).run()
