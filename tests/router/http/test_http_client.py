"""What callers of HTTP must expect."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import httpx
import pytest

from loraplex.router.http.client import http_client

RESET_AT_ONCE = struct.pack("ii", 1, 0)  # lingering: on, for 0 s


@contextlib.contextmanager
def resetting_listener() -> Iterator[str]:
    """Its URL. Every connection is reset as soon as it is accepted."""

    def accept() -> None:
        with contextlib.suppress(OSError):  # the listener was shut down
            while True:
                connection, _ = listener.accept()
                linger = (socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_ONCE)
                connection.setsockopt(*linger)
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


async def test_connections_that_end_as_soon_as_they_are_made() -> None:
    """Hundreds, for the end comes now before the client has looked at its socket, now after."""
    with resetting_listener() as url:
        async with http_client(20.0) as client:
            for _ in range(400):
                with pytest.raises(httpx.TransportError):
                    await client.get(url)
