"""HTTPS: connections are accepted and shake hands within the caps and deadlines of all others."""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from router.front_door import Deadlines, FrontDoor
from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ACCEPT_AGAIN_S = 1.0


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """cert: the chain. key: unencrypted. Both in PEM. Raises OSError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key, password="")
    return context


class TlsAcceptor:
    """Counts a connection from its first moment, as `loop.create_server(ssl=…)` does not: it tells
    of one only when its handshake is over.

    make_protocol: of a connection that has shaken hands, and whose place at the door is its own.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        door: FrontDoor,
        deadlines: Deadlines,
        metrics: RouterMetrics,
        make_protocol: Callable[[], asyncio.Protocol],
    ) -> None:
        self._context = context
        self._door = door
        self._deadlines = deadlines
        self._metrics = metrics
        self._make_protocol = make_protocol
        self._handshakes: set[asyncio.Task[None]] = set()

    async def accept(self, listener: socket.socket) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                accepted, peer = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in _NO_MORE_FILES:
                    logger.error("cannot accept connections: %s", error.strerror)
                    await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue  # else this one is gone before it was accepted: accept(2)
            self._admit(accepted, str(peer[0]))

    def _admit(self, accepted: socket.socket, address: str) -> None:
        self._metrics.connections.inc()
        cap = self._door.enter(address)
        if cap is not None:
            self._door.leave(address)
            self._metrics.connections_refused.labels(cap).inc()
            accepted.close()  # without TLS nothing can be said
            return
        task = asyncio.get_running_loop().create_task(self._shake(accepted, address))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _shake(self, accepted: socket.socket, address: str) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._deadlines.head_s,
                ssl_shutdown_timeout=self._deadlines.reader_s,
            )
        except OSError:  # no TLS, too slow, or gone
            self._metrics.connections_cut.labels("handshake_failed").inc()
            self._door.leave(address)
        except asyncio.CancelledError:
            self._door.leave(address)
            raise
