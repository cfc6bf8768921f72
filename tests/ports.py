"""Ports for servers that are told theirs before they start.

They lie below those that the system gives to connections, and each is given once: nobody takes one
between its choice and the server's start.
"""

import itertools
import os
import socket
from contextlib import ExitStack
from pathlib import Path

_FIRST = 10_240
_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Processes of one test run, at most, that choose beside each other.
_PROCESSES = 16


def _own_ports() -> list[int]:
    """A part of the range for each process of a run; runs begin at different places of it."""
    end = int(_CONNECTIONS.read_text().split()[0]) if _CONNECTIONS.exists() else 0
    if end - _FIRST < 1000 * _PROCESSES:
        end = 32_768
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PROCESSES
    size = (end - _FIRST) // _PROCESSES
    begin, offset = _FIRST + number * size, os.getpid() * 37 % size
    return [begin + (offset + i) % size for i in range(size)]


_PORTS = itertools.cycle(_own_ports())


def free_port(count: int = 1) -> int:
    """The first of so many neighbours."""
    while True:
        ports = [next(_PORTS) for _ in range(count)]
        if ports[-1] - ports[0] == count - 1 and _can_listen(ports):
            return ports[0]


def _can_listen(ports: list[int]) -> bool:
    with ExitStack() as stack:
        try:
            for port in ports:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            return False
    return True
