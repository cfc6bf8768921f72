"""Requests of names with a rollout, remembered for as long as callers may say how good their
answers were.
"""

import asyncio
from collections import deque
from hashlib import blake2b

import msgspec

from loraplex.router.names.owned_name import OwnedName
from loraplex.router.names.served import ServedAdapter

KEPT_S = 3600.0
# A router remembers so many requests at once, and twice as many in any such time. A store in
# memory has room for twice as many again, as answers to repeated requests lie there, too.
MOST_AT_ONCE = 1 << 14
_MAX_UNWRITTEN = 1 << 12


class JudgedRequest(msgspec.Struct, frozen=True):
    """A request of a name with a rollout. at: Unix seconds. base: see HeldContent. score: once it
    has one.
    """

    name: OwnedName
    rollout: str
    digest: str
    at: float
    base: str = ""
    score: float | None = None


class JudgedRequests:
    """Requests that are not in the store yet. What is too much is forgotten, and counted.

    waiting: set while there are some.
    """

    def __init__(self) -> None:
        self.waiting = asyncio.Event()
        self.forgotten = 0
        self._unwritten: deque[tuple[str, JudgedRequest]] = deque()
        self._room, self._filled_at = float(MOST_AT_ONCE), 0.0

    def note(self, tenant: str, request_id: str, adapter: ServedAdapter, now: float) -> None:
        """Notes a request that was admitted, if its name has a rollout. now: Unix seconds."""
        if not adapter.rollout or adapter.alias is None:
            return
        grown = self._room + (now - self._filled_at) * MOST_AT_ONCE / KEPT_S
        self._room, self._filled_at = min(float(MOST_AT_ONCE), grown), now
        if self._room < 1.0 or len(self._unwritten) >= _MAX_UNWRITTEN:
            self.forgotten += 1
            return
        self._room -= 1.0
        request = JudgedRequest(adapter.alias, adapter.rollout, adapter.digest, now, adapter.base)
        self._unwritten.append((key_of(tenant, request_id), request))
        self.waiting.set()

    def oldest(self) -> tuple[str, JudgedRequest] | None:
        """The key and the request that are to be written next."""
        if not self._unwritten:
            self.waiting.clear()
            return None
        return self._unwritten[0]

    def written(self) -> None:
        """Notes that the oldest is in the store."""
        self._unwritten.popleft()


def key_of(tenant: str, request_id: str) -> str:
    """The key of a request's value in the store. Callers choose ids, so it is of their hash."""
    text = f"{tenant}\0{request_id}".encode("utf-8", "surrogatepass")
    return f"judged:{blake2b(text, digest_size=16).hexdigest()}"
