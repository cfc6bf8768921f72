"""Hosts on the web that an operator lists, and addresses that are judged before a connection."""

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence

from loraplex.adapters.errors import AdapterError

PORT = 443
MAX_ADDRESSES = 4
_HOST = re.compile(r"([a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)(?::([0-9]{1,5}))?")
# All of IPv6 that is assigned to networks. Elsewhere lie addresses that stand for those of IPv4:
# nobody says what is behind them.
_UNICAST = ipaddress.ip_network("2000::/3")

Lookup = Callable[[str, int], Sequence[str]]
Place = tuple[str, int]


def look_up(host: str, port: int) -> Sequence[str]:
    """The addresses of a host. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def listed_host(text: str, option: str) -> tuple[Place, bool]:
    """(host, port) and whether its address may be private, from one item of an option: `host` =
    port 443 at public addresses; `host:port` = that port, at any address. Raises AdapterError.
    """
    match = _HOST.fullmatch(text)
    port = int(match[2] or PORT) if match else 0
    if match is None or not 0 < port < 1 << 16:
        message = f"{option} {text!r}: expected host or host:port, in lower case"
        raise AdapterError("bad_ref", message)
    return (match[1], port), match[2] is not None


def is_public(text: str) -> bool:
    """Whether an address is nobody's private network, nor this machine."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and (
        address not in _UNICAST or address.sixtofour or address.teredo
    ):
        return False
    return address.is_global and not address.is_multicast
