"""The HTTP server around the application: its limits, and how it stops."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from router.config import RouterConfig
from router.http_protocol import BoundedHttpProtocol

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
# Of each connection: what the kernel keeps for a client that does not read, and how soon the
# router notices that it does not.
_SEND_BUFFER_BYTES = 128 << 10
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RouterServer(uvicorn.Server):
    """Stops on SIGINT and SIGTERM by returning; a second one cuts running answers off.

    on_exit: ends what would never end by itself.
    """

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._on_exit()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)


def server_config(app: ASGIApp, config: RouterConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        ws="none",
        loop="uvloop",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(config.drain_timeout_s)),
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts from now on. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return listener
