"""Requests of names with a rollout, remembered for as long as callers may say how good their
answers were.
"""

import asyncio
from collections import deque
from hashlib import blake2b

import msgspec

from loraplex.router.names.served import OwnedName, ServedAdapter
from loraplex.router.policy.queue.queue_limits import QueueCapacity, QueueLimits

KEPT_S = 3600.0
# A router remembers so many requests in any such time. A store in memory has room for twice as
# many, as answers to repeated requests lie there, too.
MOST_KEPT = 1 << 15
_MAX_UNWRITTEN = 1 << 12


class JudgedRequest(msgspec.Struct, frozen=True):
    """A request of a name with a rollout. at: Unix seconds. base: see HeldContent."""

    name: OwnedName
    rollout: str
    digest: str
    at: float
    base: str = ""
    score: float | None = None


class JudgedRequests:
    """Requests that are not in the store yet. What is too much is forgotten, and counted: tenants
    share the room as they share the queue.

    waiting: set while there are some.
    """

    def __init__(self) -> None:
        self.waiting = asyncio.Event()
        self.forgotten = 0
        self._unwritten: deque[tuple[str, str, JudgedRequest]] = deque()  # first: the tenant
        self._kept: deque[tuple[str, float]] = deque()  # whose, and since when
        self._unwritten_room = QueueCapacity(QueueLimits(_MAX_UNWRITTEN, 0))
        self._room = QueueCapacity(QueueLimits(MOST_KEPT, 0))

    def note(self, tenant: str, request_id: str, adapter: ServedAdapter, now: float) -> None:
        """Notes a request that was admitted, if its name has a rollout. now: Unix seconds."""
        if not adapter.rollout or adapter.alias is None:
            return
        rooms = (self._unwritten_room, self._room)
        while self._kept and self._kept[0][1] <= now - KEPT_S:
            self._room.book(self._kept.popleft()[0], -1, 0)
        if any(room.refusal(tenant, 1, 0) for room in rooms):
            self.forgotten += 1
            return
        for room in rooms:
            room.book(tenant, 1, 0)
        self._kept.append((tenant, now))
        request = JudgedRequest(adapter.alias, adapter.rollout, adapter.digest, now, adapter.base)
        self._unwritten.append((tenant, key_of(tenant, request_id), request))
        self.waiting.set()

    def oldest(self) -> tuple[str, JudgedRequest] | None:
        """The key and the request that are to be written next."""
        if not self._unwritten:
            self.waiting.clear()
            return None
        return self._unwritten[0][1:]

    def written(self) -> None:
        """Notes that the oldest is in the store."""
        tenant, *_ = self._unwritten.popleft()
        self._unwritten_room.book(tenant, -1, 0)


def key_of(tenant: str, request_id: str) -> str:
    """The key of a request's value, among its tenant's. It is of a hash: callers choose ids."""
    text = f"{tenant}\0{request_id}".encode("utf-8", "surrogatepass")
    return f"judged:{tenant}:{blake2b(text, digest_size=16).hexdigest()}"
