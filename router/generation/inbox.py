"""Token events of one request on their way to its reader, bounded in number and memory."""

import asyncio
from collections import deque

from loraplex.router.failures import ReaderTooSlow
from loraplex.server.protocol import TokenEvent

# What CPython takes for an event with one token, for each further token, and for an alternative.
_EVENT_BYTES = 512
_TOKEN_BYTES = 36
_ALTERNATIVE_BYTES = 120
# That a reader gets at once: of a thousand choices an event each comes with every step.
_AT_ONCE = 32
# A reader with such a part of what it may have unread is behind.
_BEHIND = 1 / 4


# The slot of a sequence, its event, and when that came.
Arrival = tuple[int, TokenEvent, float]


def memory_of(event: TokenEvent) -> int:
    """Estimates an event's bytes, but for the prompt's logprobs, which come once, if asked for."""
    nbytes = _EVENT_BYTES + _TOKEN_BYTES * len(event.token_ids)
    for token in event.logprobs or ():
        nbytes += _ALTERNATIVE_BYTES * (1 + len(token.top) + len(token.listed))
    return nbytes


class Inbox:
    """Token events of one request's sequences, for its one reader.

    Who falls further behind than `max_events` or `max_bytes` fails with ReaderTooSlow. A single
    event is always taken. gathers: of a reader that has use for the whole answer alone, events for
    which it is woken; the first one and an end wake it, too, and that share of the bytes.
    """

    def __init__(self, max_events: int, max_bytes: int, gathers: int = 1) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._gathers = gathers
        self._has_begun = False
        self._events: deque[Arrival] = deque()
        self._failure: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, slot: int, event: TokenEvent, at: float) -> None:
        """Takes in an event that came at a time, in seconds of `time.monotonic`."""
        if self._failure is not None:
            return
        self._nbytes += memory_of(event)
        if self._events and self._is_full():
            self._events.clear()
            self.fail(ReaderTooSlow())
            return
        self._events.append((slot, event, at))
        if event.finish is not None or not self._has_begun or self._is_due():
            self._has_begun = True
            self._wake()

    def fail(self, error: BaseException) -> None:
        """Ends the request with a failure: the first counts, and earlier events are still read."""
        if self._failure is None:
            self._failure = error
            self._wake()

    async def take(self) -> list[Arrival]:
        """Takes events that are there: at least one, and not too many, so that other requests have
        their turn before the next. A reader that is behind takes all, so that it is not taken for
        too slow where the process is. Raises the failure after the last of them.
        """
        if len(self._events) > _AT_ONCE:
            await asyncio.sleep(0)
        while not self._events:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._is_full(_BEHIND) or len(self._events) <= _AT_ONCE:
            return self.rest()
        events = [self._events.popleft() for _ in range(_AT_ONCE)]
        self._nbytes -= sum(memory_of(event) for _, event, _ in events)
        return events

    def rest(self) -> list[Arrival]:
        """Takes all events that are there, if any."""
        events = list(self._events)
        self._events.clear()
        self._nbytes = 0
        return events

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def _is_full(self, part: float = 1.0) -> bool:
        most = part * self._max_events
        return len(self._events) >= most or self._nbytes > part * self._max_bytes

    def _is_due(self) -> bool:
        most = self._gathers
        return len(self._events) >= most or self._nbytes * most > self._max_bytes

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
