"""A stop of the server: connections that the system had accepted are answered."""

import socket
from pathlib import Path

import pytest

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
    async with running_router(tmp_path):
        pass
    for connection in connections:
        with connection:
            assert everything(connection).startswith(b"HTTP/1.1 200 ")
