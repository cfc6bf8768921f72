"""The sockets that a router accepts on, alone or with others; not what it answers there."""

import errno
import logging
import os
import resource
import socket
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

# How a process begins the line that says where it is reached.
LISTENING = "router: listening on"

_BACKLOG = 2048
# Of each connection: what the kernel keeps for a client that does not read.
_SEND_BUFFER_BYTES = 128 << 10
# Beside those of clients: workers, stores, downloads, logs, and clients who are refused.
_OTHER_FILES = 1024


def allow_connections(most: int) -> None:
    """Lets this process open as many files as that takes: without, clients are reset silently."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with suppress(OSError, ValueError):  # what a sandbox or the kernel forbids
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft < wanted:
        log.warning(
            "this process may open %d files, %d connections want %d: raise the hard limit",
            soft,
            most,
            wanted,
        )


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts from now on. Raises OSError."""
    listener = socket.create_server((host, port), family=_family(host), backlog=_BACKLOG)
    return _bounded(listener)


def listen_unix(path: Path) -> socket.socket:
    """A Unix socket that accepts from now on. A socket there that nobody accepts on is replaced.
    Raises OSError."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and _is_deserted(path):
            path.unlink()
        listener.bind(os.fspath(path))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return _bounded(listener)


def _is_deserted(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED


def share(host: str, port: int) -> socket.socket:
    """A socket that holds the port with others, and gets its share only once it listens.

    The kernel spreads connections over those that listen (socket(7), SO_REUSEPORT). Raises OSError.
    """
    family = _family(host)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:  # as `listen` has it
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return _bounded(listener)


def limit_unread(listener: socket.socket, timeout_s: float) -> None:
    """Sets a socket's connections to end when what was sent lies unread for so long, also after the
    last answer. The kernel does it, so that nobody who reads nothing keeps a socket that is
    being closed. Unix sockets have no such limit.
    """
    if listener.family == socket.AF_UNIX:
        return
    milliseconds = max(1, round(timeout_s * 1000))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _bounded(listener: socket.socket) -> socket.socket:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return listener
