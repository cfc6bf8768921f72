"""Where a process may listen, and the socket for it."""

import socket

from adapters.loopback import is_loopback

# A peer that takes no byte for so long is cut off by TCP itself.
PEER_TIMEOUT_MS = 30_000


class AddressError(Exception):
    """The address cannot be served on; str() says why and what to do."""


def check_exposure(host: str, secret: str) -> None:
    """Anyone who reaches an open worker may use it: only this machine may, without a secret."""
    if secret or is_loopback(host):
        return
    raise AddressError(
        f"host {host} can be reached from other machines: set a secret "
        "(LORAPLEX_SECRET or --secret-file), or listen on 127.0.0.1"
    )


def open_listener(host: str, port: int, listen_fd: int | None = None) -> socket.socket:
    """A bound socket: a port in use shows before a model is loaded. Raises AddressError."""
    if listen_fd is not None:
        return socket.socket(fileno=listen_fd)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PEER_TIMEOUT_MS)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise AddressError(
            f"port {port} of {host} cannot be used: {error.strerror}; choose another with --port"
        ) from error
    return listener
