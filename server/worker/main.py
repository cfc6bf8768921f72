"""A worker process from its configuration to its end."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import uvicorn
import uvloop

from loraplex.adapters.common.pauses import shorten_pauses
from loraplex.server.config import WorkerConfig
from loraplex.server.protocol import MAX_FRAME_BYTES
from loraplex.server.worker.address import advertised, check_exposure, open_listener
from loraplex.server.worker.app import WorkerApp
from loraplex.server.worker.process.engine_supervisor import EngineStartError
from loraplex.server.worker.setup import Prepared, WorkerStartError, prepare

log = logging.getLogger(__name__)

PING_INTERVAL_S = 5.0
PING_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5
MAX_CONNECTIONS = 1024


def run(config: WorkerConfig, listen_fd: int | None = None, metrics_fd: int | None = None) -> None:
    """Serve until SIGTERM or SIGINT. listen_fd: an already bound socket to listen on instead.
    metrics_fd: another, for /metrics and /health alone.

    Raises WorkerStartError, AddressError.
    """
    check_exposure(config.host, config.secret)
    with ExitStack() as opened:
        listener = opened.enter_context(open_listener(config.host, config.port, listen_fd))
        sockets = [listener]
        if metrics_fd is not None:
            sockets.append(opened.enter_context(socket.socket(fileno=metrics_fd)))
        url = advertised(config, listener.getsockname()[1]) if config.redis else None
        prepared = prepare(config)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, prepared, sockets, url))


class _Server(uvicorn.Server):
    """Signals are the worker's own business: it drains before the server stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _not_a_denial(record: logging.LogRecord) -> bool:
    """uvicorn takes every refused WebSocket for a fault of the application."""
    return record.msg != "ASGI callable returned without completing handshake."


def _server(prepared: Prepared, secret: str, sockets: Sequence[socket.socket]) -> _Server:
    logging.getLogger("uvicorn.error").addFilter(_not_a_denial)
    return _Server(
        uvicorn.Config(
            WorkerApp(prepared.worker, secret, prepared.uploads).build(
                *(s.getsockname()[1] for s in sockets[1:])
            ),
            http="httptools",
            ws="websockets-sansio",
            ws_max_size=MAX_FRAME_BYTES,
            ws_per_message_deflate=False,
            ws_ping_interval=PING_INTERVAL_S,
            ws_ping_timeout=PING_TIMEOUT_S,
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
    )


async def _serve(
    config: WorkerConfig, prepared: Prepared, sockets: list[socket.socket], url: str | None
) -> None:
    """Serve until a signal, or until the engine or the server ends. sockets: the first is for
    routers, the others for /metrics and /health alone.
    """
    worker, supervisor = prepared.worker, prepared.supervisor
    server = _server(prepared, config.secret, sockets)
    shorten_pauses()
    stop = _stop_on_signals()
    tasks = {
        "engine": asyncio.create_task(supervisor.run(worker)),
        "http": asyncio.create_task(server.serve(sockets=sockets)),
        "status": asyncio.create_task(worker.report_status()),
        "lag": asyncio.create_task(worker.watch_loop()),
        "announce": asyncio.create_task(_announce(prepared, sockets[0])),
        "stop": asyncio.create_task(stop.wait()),
    }
    if url is not None:
        # The client library takes its time to load, and is needed only where there is a Redis.
        from loraplex.server.worker.adapters.registry import Registry

        registry = Registry(config, url, prepared.worker_id)
        listed = registry.run(
            lambda: worker.epoch, lambda: worker.state in ("ready", "engine_lost")
        )
        tasks["registry"] = asyncio.create_task(listed)
    vital = [tasks[name] for name in ("engine", "http", "stop")]
    try:
        await asyncio.wait(vital, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            log.info("draining: finishing what runs, for at most %g s", config.drain_timeout_s)
            await worker.drain(config.drain_timeout_s)
    finally:
        server.should_exit = True
        prepared.merger.close()
        prepared.syncing.shutdown(wait=False, cancel_futures=True)
        await supervisor.close()
        if worker.pictures is not None:
            await worker.pictures.close()
        await asyncio.wait([tasks["http"]])
        for task in tasks.values():
            task.cancel()
        ended = await asyncio.gather(*tasks.values(), return_exceptions=True)
    _raise_first(ended)


def _raise_first(ended: Sequence[object]) -> None:
    for result in ended:
        if isinstance(result, EngineStartError):
            raise WorkerStartError(f"the engine cannot start: {result}") from result
        if isinstance(result, Exception):
            raise result


def _stop_on_signals() -> asyncio.Event:
    """Return an event that the first signal sets, to drain. The second signal ends the process at
    once (and the kernel its engine).
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def received() -> None:
        if stop.is_set():
            sys.stderr.flush()
            signal.raise_signal(signal.SIGKILL)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, received)
    return stop


async def _announce(prepared: Prepared, listener: socket.socket) -> None:
    await prepared.worker.became_ready.wait()
    host, port = listener.getsockname()[:2]
    name, engine = prepared.name, prepared.engine
    log.info(
        "ready: %s serves %s (%s, %s) to routers at ws://%s:%d",
        prepared.worker_id,
        name,
        engine.device,
        engine.dtype,
        f"[{host}]" if ":" in host else host,
        port,
    )
