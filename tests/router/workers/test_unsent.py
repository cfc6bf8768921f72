"""What a peer has not taken is counted, wherever it lies."""

import asyncio
import socket

from loraplex.router.workers.session import unsent_bytes
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
