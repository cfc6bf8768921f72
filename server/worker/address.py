"""The address that a process may listen on, its socket, and where routers reach a worker."""

import errno
import socket

from loraplex.adapters.common.loopback import is_loopback
from loraplex.adapters.common.worker_record import is_worker_url
from loraplex.adapters.errors import CommandError
from loraplex.server.config import WorkerConfig

# A peer that takes no byte for so long is cut off by TCP itself.
PEER_TIMEOUT_MS = 30_000
_WILDCARDS = ("0.0.0.0", "::", "")


class AddressError(CommandError):
    """The address cannot be served on; str() says why and what to do."""


def check_exposure(host: str, secret: str) -> None:
    """Check that other machines can reach the worker only with a secret. Anyone who reaches an open
    worker may use it: only this machine may, without a secret.

    Raises AddressError, also for a secret that no header can carry.
    """
    if not secret.isascii():
        raise AddressError("--secret-file: the key must be ASCII, as it is sent in a header")
    if secret or is_loopback(host):
        return
    raise AddressError(
        f"host {host} can be reached from other machines: set a secret "
        "(LORAPLEX_SECRET or --secret-file), or listen on 127.0.0.1"
    )


def open_listener(
    host: str, port: int, listen_fd: int | None = None, flag: str = "--port"
) -> socket.socket:
    """A bound socket: a port in use shows before a model is loaded. flag: what names the port.
    Raises AddressError."""
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
        raise AddressError(_why_not(host, port, error, flag)) from error
    return listener


def _why_not(host: str, port: int, error: OSError, flag: str) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return (
            f"host {host} is no address of this machine: {error.strerror}; choose another with"
            " --host, such as 127.0.0.1 or 0.0.0.0"
        )
    which = "another of 1024 and more" if error.errno == errno.EACCES else "another"
    return f"port {port} of {host} cannot be used: {error.strerror}; choose {which} with {flag}"


def advertised(config: WorkerConfig, port: int) -> str:
    """Return the URL where routers reach this worker. Raises AddressError where none is known."""
    if config.advertise:
        if not is_worker_url(config.advertise):
            raise AddressError(f"--advertise {config.advertise!r}: expected ws://host:port")
        return config.advertise
    if config.host in _WILDCARDS:
        name = socket.gethostname()
        raise AddressError(
            "routers need an address of this worker: give it as --advertise, "
            f"such as ws://{name}:{port}"
        )
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"ws://{host}:{port}"
