"""Bytes that a peer has not taken are counted, and those that this process has not read."""

import asyncio
import socket
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

from websockets.asyncio.client import ClientConnection

from loraplex.router.workers.session import WorkerSession, unread_bytes, unsent_bytes
from loraplex.server.protocol import WorkerHello
from tests.router.serving import poll


async def test_it_counts_down_as_the_peer_reads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        _, writer = await asyncio.open_connection(*server.getsockname())
        peer, _ = server.accept()
        with peer:
            peer.setblocking(False)
            transport = writer.transport
            assert unsent_bytes(transport) == 0
            writer.write(bytes(8 << 20))
            before = unsent_bytes(transport)
            assert before > 4 << 20
            loop, taken = asyncio.get_running_loop(), 0
            while taken < 8 << 20:
                taken += len(await loop.sock_recv(peer, 1 << 20))

            async def all_taken() -> bool:
                return unsent_bytes(transport) == 0

            await poll(all_taken)
            transport.abort()
            await asyncio.sleep(0)
            assert unsent_bytes(transport) == 0


async def test_a_worker_whose_bytes_lie_unread_is_not_judged() -> None:
    """Its answer may lie behind them, as where this process is short of time."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        _, writer = await asyncio.open_connection(*server.getsockname())
        peer, _ = server.accept()
        with peer:
            transport = writer.transport
            connection = cast(ClientConnection, SimpleNamespace(transport=transport))
            hello = WorkerHello("w", 1, "", 4)
            session = WorkerSession(connection, hello, lambda: None, Mock(), Mock())
            later = asyncio.get_running_loop().time() + 60.0
            cast(asyncio.ReadTransport, transport).pause_reading()
            peer.sendall(b"a frame")

            async def has_come() -> bool:
                return unread_bytes(transport) > 0

            await poll(has_come)
            assert session.listen(later, 1.0) == "good"
            cast(asyncio.ReadTransport, transport).resume_reading()

            async def is_read() -> bool:
                return unread_bytes(transport) == 0

            await poll(is_read)
            assert session.listen(later, 1.0) == "silent"
            transport.abort()
            await asyncio.sleep(0)
            assert unread_bytes(transport) == 0
