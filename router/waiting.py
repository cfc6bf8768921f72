"""The bounded queue in front of the workers: who waits, and who is next. Pure.

Start-time fair queueing between adapters inside a priority: a flood for one adapter delays itself
first. It knows neither workers nor tasks; the fleet carries out what it decides.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

# Virtual finish times of flows that ran dry are kept while they lie ahead, and at most so many.
MAX_REMEMBERED_FLOWS = 4096


class QueueFull(Exception):
    """The queue is at its limit, in sequences or in bytes. retry_after_s: a hint for the caller."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class Waiting(msgspec.Struct, Generic[T], frozen=True, eq=False):
    """One sequence that wants a worker.

    flow: what turns are kept by, the adapter's digest or None for the base.
    cost: work it asks for, in tokens (at least 1). nbytes: memory that it holds while it waits.
    priority: lower goes first. deadline: on the clock of `now`, or None.
    """

    payload: T
    flow: str | None
    cost: int
    nbytes: int
    priority: int = 0
    deadline: float | None = None


class _Flow(Generic[T]):
    """The waiting sequences of one flow at one priority, oldest first."""

    __slots__ = ("entries", "start")

    def __init__(self, start: float) -> None:
        self.entries: OrderedDict[int, Waiting[T]] = OrderedDict()
        self.start = start


class _Band(Generic[T]):
    """One priority: flows by virtual start time (Goyal et al., Start-time Fair Queueing, 1996)."""

    __slots__ = ("finish", "flows", "virtual")

    def __init__(self) -> None:
        self.flows: dict[str | None, _Flow[T]] = {}
        self.finish: OrderedDict[str | None, float] = OrderedDict()
        self.virtual = 0.0

    def add(self, ticket: int, entry: Waiting[T]) -> None:
        flow = self.flows.get(entry.flow)
        if flow is None:
            start = max(self.virtual, self.finish.pop(entry.flow, 0.0))
            flow = self.flows[entry.flow] = _Flow(start)
        flow.entries[ticket] = entry

    def remove(self, ticket: int, entry: Waiting[T]) -> None:
        flow = self.flows[entry.flow]
        del flow.entries[ticket]
        if not flow.entries:
            self._retire(entry.flow, flow)

    def pop(self) -> tuple[int, Waiting[T]]:
        flow = min(self.flows.values(), key=_turn)
        ticket, entry = flow.entries.popitem(last=False)
        self.virtual = flow.start
        flow.start += max(1, entry.cost)
        if not flow.entries:
            self._retire(entry.flow, flow)
        return ticket, entry

    def _retire(self, name: str | None, flow: _Flow[T]) -> None:
        del self.flows[name]
        if flow.start > self.virtual:
            self.finish[name] = flow.start
        while self.finish and (
            len(self.finish) > MAX_REMEMBERED_FLOWS
            or next(iter(self.finish.values())) <= self.virtual
        ):
            self.finish.popitem(last=False)


def _turn(flow: _Flow[T]) -> tuple[float, int]:
    return flow.start, next(iter(flow.entries))


class WaitingQueue(Generic[T]):
    """Bounded in count and bytes; fair between flows; strict between priorities."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count = max_count
        self._max_bytes = max_bytes
        self._bands: dict[int, _Band[T]] = {}
        self._entries: dict[int, Waiting[T]] = {}
        self._nbytes = 0
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Waiting[T]]:
        return iter(self._entries.values())

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def check_room(self, count: int, nbytes: int) -> None:
        """Raises QueueFull unless `count` more sequences of `nbytes` in all would fit now."""
        if len(self._entries) + count > self.max_count:
            raise QueueFull(f"the queue is full: {len(self._entries)} sequences are waiting", 1.0)
        if self._nbytes + nbytes > self._max_bytes:
            raise QueueFull(f"the queue is full: {self._nbytes} bytes of prompts are waiting", 1.0)

    def push(self, entry: Waiting[T]) -> int:
        """Adds at the end of its flow. Returns a ticket for `cancel`. Raises QueueFull."""
        self.check_room(1, entry.nbytes)
        ticket = self._next_ticket
        self._next_ticket += 1
        self._entries[ticket] = entry
        self._nbytes += entry.nbytes
        self._bands.setdefault(entry.priority, _Band()).add(ticket, entry)
        return ticket

    def pop(self) -> Waiting[T] | None:
        """Takes the next: lowest `priority`, then the flow whose turn it is, then the oldest."""
        if not self._entries:
            return None
        priority = min(priority for priority, band in self._bands.items() if band.flows)
        ticket, entry = self._bands[priority].pop()
        self._forget(ticket, entry)
        return entry

    def cancel(self, ticket: int) -> bool:
        """Takes this one out; False when it is no longer waiting."""
        entry = self._entries.get(ticket)
        if entry is None:
            return False
        self._bands[entry.priority].remove(ticket, entry)
        self._forget(ticket, entry)
        return True

    def expire(self, now: float) -> list[Waiting[T]]:
        """Takes out all whose deadline has come, oldest first."""
        late = [
            (ticket, entry)
            for ticket, entry in self._entries.items()
            if entry.deadline is not None and entry.deadline <= now
        ]
        for ticket, _ in late:
            self.cancel(ticket)
        return [entry for _, entry in late]

    def _forget(self, ticket: int, entry: Waiting[T]) -> None:
        del self._entries[ticket]
        self._nbytes -= entry.nbytes
        # The last band keeps its virtual times: who had a turn still counts when the queue was dry.
        if not self._bands[entry.priority].flows and len(self._bands) > 1:
            del self._bands[entry.priority]
