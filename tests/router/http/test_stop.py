"""A stop of the server: connections that the system had accepted are answered."""

import asyncio
import socket
import time
from pathlib import Path

import pytest
import uvloop

from loraplex.router.http import protocol
from loraplex.router.routes import http_server
from loraplex.router.routes.http_server import RouterServer
from tests.router import serving
from tests.router.serving import running_router

REQUEST = b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def everything(connection: socket.socket) -> bytes:
    found = b""
    while piece := connection.recv(1 << 16):
        found += piece
    return found


async def test_what_came_before_the_stop_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections: list[socket.socket] = []

    class Busy(RouterServer):
        """Its loop has not looked at its socket when it is to stop."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            assert sockets
            for _ in range(20):
                connections.append(socket.create_connection(sockets[0].getsockname()))
                connections[-1].sendall(REQUEST)
            await super().shutdown(sockets)

    monkeypatch.setattr(serving, "RouterServer", Busy)
    monkeypatch.setattr(http_server, "_LAST_ACCEPTS_S", 0.0)
    async with running_router(tmp_path, drain_timeout_s=240.0):
        pass
    for connection in connections:
        with connection:
            assert everything(connection).startswith(b"HTTP/1.1 200 ")


def test_what_comes_on_idle_connections_while_the_loop_is_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop runs what is due before it reads what has come meanwhile."""
    connections: list[socket.socket] = []
    waker, wakes = socket.socketpair()

    def hold_up() -> None:
        """As a long piece of work does, until idle connections would have ended."""
        asyncio.get_running_loop().remove_reader(waker)
        for connection in connections:
            connection.sendall(REQUEST)
        until = time.monotonic() + 2 * protocol.LINGER_S
        while time.monotonic() < until:
            pass

    class Held(RouterServer):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            loop = asyncio.get_running_loop()
            loop.add_reader(waker, hold_up)
            loop.call_later(http_server._LAST_ACCEPTS_S + protocol.LINGER_S / 2, wakes.send, b"x")
            await super().shutdown(sockets)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        async with running_router(tmp_path) as running:
            port = running.client.base_url.port
            assert port is not None
            for _ in range(20):
                connections.append(await loop.run_in_executor(None, kept_connection, port))

    monkeypatch.setattr(protocol, "LINGER_S", 0.2)
    monkeypatch.setattr(serving, "RouterServer", Held)
    uvloop.run(serve())
    for connection in connections:
        with connection:
            assert everything(connection).startswith(b"HTTP/1.1 200 ")
    waker.close()
    wakes.close()


def kept_connection(port: int) -> socket.socket:
    """A connection on which one request was answered, and others may follow."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(REQUEST.replace(b"close", b"keep-alive"))
    found = b""
    while not found.endswith(b'{"status":"live"}'):
        found += connection.recv(1 << 16)
    return connection
