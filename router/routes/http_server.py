"""The HTTP server around the application: its limits, and how it stops."""

import asyncio
import select
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from loraplex.router.config import RouterConfig
from loraplex.router.http.intake import Intake
from loraplex.router.http.listeners import limit_unread
from loraplex.router.http.protocol import BoundedHttpProtocol
from loraplex.router.http.tls import Certificate, TlsAcceptor
from loraplex.router.policy.front_door import HttpDeadlines
from loraplex.router.service import Service

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# For the last words of answers that did not end in time.
_LAST_WORDS_S = 5
# So long connections are taken that the system accepted before the stop. Some may be left where the
# loop was held up: then in further turns of the loop.
_LAST_ACCEPTS_S, _LAST_TURNS = 0.05, 1000
# Connections that parse what came, in an iteration of the event loop: each takes at most two
# milliseconds, for many small requests in one piece.
_PARSE_AT_ONCE = 32


class RouterServer(uvicorn.Server):
    """Stops on SIGINT and SIGTERM by returning, and when what it needs in the background has
    failed; a second signal cuts running answers off.

    After a signal to stop, the server is not ready any more, but accepts for `drain_delay_s`. Then
    running requests have `drain_timeout_s` to finish; the rest end in an error that their clients
    get. on_listening: called once every socket accepts.
    """

    def __init__(
        self, app: ASGIApp, service: Service, on_listening: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(_server_config(app, service))
        self._on_listening = on_listening
        self._dispatcher = service.dispatcher
        self._watch = service.watch
        self._delay_s = service.config.drain_delay_s
        self._limit_s = service.config.drain_timeout_s
        self._service = service
        self._background = service.background
        self._tasks: list[asyncio.Task[None]] = []

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._dispatcher.draining:
            self.force_exit = self.should_exit = True
            return
        self._dispatcher.draining = True
        asyncio.get_running_loop().call_later(self._delay_s, self._exit)

    def _exit(self) -> None:
        self.should_exit = True

    async def _stop_on_failure(self) -> None:
        await self._background.failed.wait()
        self.handle_exit(signal.SIGTERM, None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or ():
            limit_unread(listener, self._service.config.reader_timeout_s)
        acceptor = self._tls_acceptor()
        await super().startup(sockets if acceptor is None else [])
        if acceptor is not None and self.started:
            for listener in sockets or ():
                listener.listen(self.config.backlog)
                self._tasks.append(self._background.start(acceptor.accept(listener)))
            self._tasks.append(self._background.start(acceptor.certificate.follow()))
        if self.started:
            self._tasks.append(asyncio.create_task(self._stop_on_failure()))
            self._on_listening()

    def _tls_acceptor(self) -> TlsAcceptor | None:
        service, config = self._service, self._service.config
        if config.tls_cert is None or config.tls_key is None:
            return None
        make: Any = self.config.http_protocol_class
        return TlsAcceptor(
            Certificate(config.tls_cert, config.tls_key),
            service.front_door,
            _deadlines(config),
            service.metrics,
            lambda: make(
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                is_inside=True,
            ),
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._dispatcher.draining = True
        for listener in sockets or ():
            listener.listen(0)  # others wait, and are refused once the socket is closed
        await asyncio.sleep(_LAST_ACCEPTS_S)
        for _ in range(_LAST_TURNS):
            await asyncio.sleep(0)
            if not _has_accepted(sockets or ()):
                break
        for task in self._tasks:
            task.cancel()
        self._watch.close()  # what would never end by itself
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._limit_s, self._dispatcher.give_up)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

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


def _has_accepted(listeners: Iterable[socket.socket]) -> bool:
    """Whether the system has accepted a connection that the loop has not taken yet."""
    waiting = select.poll()
    for listener in listeners:
        waiting.register(listener, select.POLLIN)
    return bool(waiting.poll(0))


def _server_config(app: ASGIApp, service: Service) -> uvicorn.Config:
    config = service.config
    protocol: Any = partial(
        BoundedHttpProtocol,
        service.front_door,
        _deadlines(config),
        service.metrics,
        Intake(_PARSE_AT_ONCE),
    )
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        loop="uvloop",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=config.idle_timeout_s,  # type: ignore[arg-type]  # any number will do
        timeout_graceful_shutdown=max(1, round(config.drain_timeout_s)) + _LAST_WORDS_S,
    )


def _deadlines(config: RouterConfig) -> HttpDeadlines:
    return HttpDeadlines(config.head_timeout_s, config.body_timeout_s, config.reader_timeout_s)
