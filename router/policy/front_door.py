"""Limits of client connections: caps in all and per address, deadlines. Pure."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

Cap = Literal["total", "address"]
# Why the router ended a connection.
Cut = Literal[
    "handshake_failed",
    "head_late",
    "head_too_large",
    "not_http",
    "not_read",
    "body_late",
    "body_not_wanted",
]


@dataclass(frozen=True, slots=True)
class HttpDeadlines:
    """Limits on the time that a client may take. In seconds. head: of a TLS handshake, and of a
    request's head. body: from there to its end.

    reader: for which an answer may be left unread.
    """

    head_s: float
    body_s: float
    reader_s: float


class FrontDoor:
    """Counts the connections of one process. An address is forgotten with its last connection.

    per_address: 0 = no cap, since all come from one address behind a proxy.
    """

    def __init__(self, most: int, per_address: int) -> None:
        self.open = 0
        self._most = most
        self._per_address = per_address
        self._by_address: Counter[str] = Counter()

    def enter(self, address: str) -> Cap | None:
        """Counts a connection that was opened, and says which cap it is beyond. `leave` follows in
        any case.
        """
        self.open += 1
        self._by_address[address] += 1
        if self.open > self._most:
            return "total"
        if self._per_address and self._by_address[address] > self._per_address:
            return "address"
        return None

    def leave(self, address: str) -> None:
        self.open -= 1
        self._by_address[address] -= 1
        if self._by_address[address] <= 0:
            del self._by_address[address]
