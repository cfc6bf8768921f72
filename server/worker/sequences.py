"""Maps the worker's keys to routers' sequences, and counts those in flight. Pure.

It knows nothing of sockets or the engine; `worker.py` carries out what it decides.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from loraplex.server.engine.messages import SequenceEvent
from loraplex.server.protocol import ErrorCode, Evidence, GenerateRequest, TokenEvent

# More sequences than these, begun and without a token, are a crowd: each of them may be innocent.
_FEW = 4
# Of an equal share: what a router without work keeps, so that its next burst starts at once.
_IDLE_SHARE = 4


def share_credits(capacity: int, in_flight: Mapping[int, int]) -> dict[int, int]:
    """Sequences each router may have here, by connection; together at most `capacity`.

    Max-min fair: each router wants twice what it has in flight, and at least a part of an equal
    share. What nobody wants is divided equally. With more routers than capacity, some get none.
    """
    if not in_flight:
        return {}
    floor = max(1, capacity // (_IDLE_SHARE * len(in_flight)))
    wanted = {router: 2 * count + floor for router, count in in_flight.items()}
    shares: dict[int, int] = {}
    left = capacity
    by_wanted = sorted(wanted, key=lambda router: (wanted[router], router))
    for i, router in enumerate(by_wanted):
        shares[router] = min(wanted[router], left // (len(by_wanted) - i))
        left -= shares[router]
    for i, router in enumerate(by_wanted):
        extra = left // (len(by_wanted) - i)
        shares[router] += extra
        left -= extra
    return shares


def weigh(
    begun: AbstractSet[int] | None, fresh: AbstractSet[int], is_telling: bool
) -> dict[int, Evidence]:
    """Weigh what an engine's end says of each sequence that has no token of that engine.

    begun: keys, as of `BegunSequences`. fresh: keys of those without a token. is_telling: the
    engine worked before, and nobody ended it from outside.
    """
    suspects = fresh if begun is None else fresh & begun
    evidence: Evidence = "strong" if is_telling and len(suspects) <= _FEW else "weak"
    return {key: evidence if key in suspects else "none" for key in fresh}


class Identity(NamedTuple):
    """Name of a sequence among those of one router connection: its request, the attempt at it, and
    which of the request's choices it is.
    """

    request_id: str
    attempt: int
    choice: int


class _Live:
    """A sequence in the engine. connection None: its router is gone, the abort is on its way."""

    __slots__ = ("adapter", "connection", "first_index", "identity", "next_index", "with_pictures")

    def __init__(self, connection: int | None, request: GenerateRequest) -> None:
        self.adapter = request.adapter
        self.connection = connection
        self.identity = Identity(request.request_id, request.attempt, request.choice)
        self.first_index = self.next_index = len(request.accepted_ids)
        # Kept for its pictures alone.
        self.with_pictures = request if request.pictures else None


class DuplicateSequence(ValueError):
    """A router used the identity of a sequence that is still in flight."""


ByConnection = dict[int, list[TokenEvent]]


class SequenceTable:
    """Live sequences by key; at most `capacity` of them, shared by all routers.

    A sequence leaves only by its terminal event or by `end_all`. So an aborted one holds its credit
    as long as the engine holds its memory.

    orphans: those whose router is gone, and which the engine has not ended yet.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.orphans = 0
        self._live: dict[int, _Live] = {}
        self._choices: dict[int, dict[tuple[str, int], dict[int, int]]] = {}
        self._ended: list[int] = []  # keys of those with pictures
        self._next_key = 0

    def __len__(self) -> int:
        return len(self._live)

    def open(self, connection: int, request: GenerateRequest) -> int | None:
        """A key for a new sequence, or None when all credits are in use.

        Raises DuplicateSequence.
        """
        requests = self._choices.setdefault(connection, {})
        choices = requests.get((request.request_id, request.attempt), {})
        if request.choice in choices:
            raise DuplicateSequence(request.request_id)
        if len(self._live) >= self.capacity:
            return None
        key = self._next_key
        self._next_key += 1
        live = self._live[key] = _Live(connection, request)
        identity = live.identity
        requests.setdefault((identity.request_id, identity.attempt), choices)[identity.choice] = key
        return key

    def asker(self, key: int) -> tuple[int, GenerateRequest] | None:
        """The connection and the request of a sequence with pictures; None = its router is gone, or
        it has ended."""
        live = self._live.get(key)
        if live is None or live.connection is None or live.with_pictures is None:
            return None
        return live.connection, live.with_pictures

    def take_ended(self) -> list[int]:
        """The keys of sequences with pictures that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def by_adapter(self) -> Counter[str]:
        """Live sequences of each adapter that has any."""
        return Counter(live.adapter for live in self._live.values() if live.adapter is not None)

    def credits(self, connections: Iterable[int]) -> dict[int, int]:
        """Sequences that each router may have; at least one."""
        in_flight = {
            number: sum(map(len, self._choices.get(number, {}).values())) for number in connections
        }
        shares = share_credits(self.capacity, in_flight)
        return {number: max(1, share) for number, share in shares.items()}

    def keys_of(
        self, connection: int, request_id: str, attempt: int, choice: int | None
    ) -> list[int]:
        """Live keys that an Abort means; empty when it comes too late."""
        choices = self._choices.get(connection, {}).get((request_id, attempt), {})
        if choice is None:
            return list(choices.values())
        return [choices[choice]] if choice in choices else []

    def disconnect(self, connection: int) -> list[int]:
        """The router is gone: its keys, to be aborted. Their later events go nowhere."""
        requests = self._choices.pop(connection, {})
        keys = [key for choices in requests.values() for key in choices.values()]
        for key in keys:
            self._live[key].connection = None
        self.orphans += len(keys)
        return keys

    def route(self, events: Iterable[SequenceEvent]) -> ByConnection:
        """Sort one step's events by connection; terminal ones end their sequence.

        Events of unknown keys (after the terminal one) are dropped.
        """
        routed: ByConnection = {}
        for key, event in ((item.key, item.event) for item in events):
            live = self._live.get(key)
            if live is None:
                continue
            live.next_index = event.index + len(event.token_ids)
            if live.connection is not None:
                routed.setdefault(live.connection, []).append(event)
            if event.finish is not None:
                self._close(key)
        return routed

    def fresh(self) -> frozenset[int]:
        """Keys of sequences that have got no token here."""
        live = self._live.items()
        return frozenset(key for key, one in live if one.next_index == one.first_index)

    def named(
        self, connection: int, evidence: Mapping[int, Evidence]
    ) -> tuple[tuple[str, int, int, Evidence], ...]:
        """Evidence by key, with the names of those sequences that one router asked for."""
        live = ((self._live[key], found) for key, found in evidence.items())
        return tuple((*one.identity, found) for one, found in live if one.connection == connection)

    def end_all(
        self, error: ErrorCode, message: str, evidence: Mapping[int, Evidence] = {}
    ) -> ByConnection:
        """End every live sequence in this error. evidence: by key; of others it is weak."""
        routed: ByConnection = {}
        for key in list(self._live):
            live = self._live[key]
            if live.connection is not None:
                event = TokenEvent(
                    *live.identity,
                    live.next_index,
                    (),
                    finish="error",
                    error=error,
                    message=message,
                    evidence=evidence.get(key, "weak"),
                )
                routed.setdefault(live.connection, []).append(event)
            self._close(key)
        return routed

    def _close(self, key: int) -> None:
        live = self._live.pop(key)
        if live.with_pictures is not None:
            self._ended.append(key)
        if live.connection is None:
            self.orphans -= 1
            return
        requests = self._choices[live.connection]
        name = (live.identity.request_id, live.identity.attempt)
        del requests[name][live.identity.choice]
        if not requests[name]:
            del requests[name]
        if not requests:
            del self._choices[live.connection]


def refusal(request: GenerateRequest, error: ErrorCode, message: str) -> TokenEvent:
    """The terminal event of a request that never reached the engine."""
    return TokenEvent(
        request.request_id,
        request.attempt,
        request.choice,
        len(request.accepted_ids),
        (),
        finish="error",
        error=error,
        message=message,
    )


def split_events(events: Sequence[TokenEvent]) -> list[Sequence[TokenEvent]]:
    """Two halves of a step's events, for a frame that came out too large; one event stays whole."""
    if len(events) < 2:
        return [events]
    middle = len(events) // 2
    return [events[:middle], events[middle:]]
