"""Limits of client connections: their number, deadlines. Pure."""

from dataclasses import dataclass
from typing import Literal

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
    """Counts the connections of one process."""

    def __init__(self, most: int) -> None:
        self.open = 0
        self._most = most

    def enter(self) -> bool:
        """Counts a new connection, and says whether it may stay. `leave` follows anyway."""
        self.open += 1
        return self.open <= self._most

    def leave(self) -> None:
        self.open -= 1
