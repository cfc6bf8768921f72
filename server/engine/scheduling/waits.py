"""Rows and all else that sequences wait for, and their deadlines. Pure."""

import heapq

from loraplex.server.constraints.wishes import ConstraintWish
from loraplex.server.engine.scheduling.loading import AdapterLoads
from loraplex.server.engine.scheduling.picture_loads import PictureLoads
from loraplex.server.engine.scheduling.sequence import BY_PRECEDENCE, Precedence, Sequence, State
from loraplex.server.engine.swapping.swaps import AllSwaps

# Most sequences end before their deadline. The heap keeps at most this many of them.
_LEFTOVERS = 1000


class SequenceRows:
    """Rows that sequences take and give back. free: nobody's. freed: given back since the last
    step, which still has to learn of it.
    """

    def __init__(self, count: int) -> None:
        self.free = list(range(count - 1, -1, -1))
        self.freed: list[int] = []

    def give_back(self, row: int) -> None:
        self.free.append(row)
        self.freed.append(row)


class GrammarWaits:
    """The sequences in state NEEDS_GRAMMAR."""

    def __init__(self) -> None:
        self._wishes: list[ConstraintWish] = []
        self._parked: dict[int, Sequence] = {}
        self._abandoned: list[int] = []

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, sequence: Sequence) -> None:
        sequence.move(State.NEEDS_GRAMMAR)
        request = sequence.request
        self._parked[sequence.key] = sequence
        wish = ConstraintWish(
            sequence.key,
            request.sampling,
            request.accepted_ids,
            request.vocab_size,
            request.tenant,
            sequence.is_background,
        )
        self._wishes.append(wish)

    def unpark(self, key: int) -> Sequence | None:
        """Remove and return the sequence; None if it has ended."""
        return self._parked.pop(key, None)

    def abandon(self, key: int) -> None:
        """The sequence ends; its constraint may not have been made."""
        if self._parked.pop(key, None) is not None:
            self._abandoned.append(key)

    def take_abandoned(self) -> list[int]:
        """Keys of sequences that ended before their constraint was made; each comes once."""
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    def take_wishes(self) -> list[ConstraintWish]:
        """Wishes since the last call, without those of sequences that have ended."""
        wishes, self._wishes = self._wishes, []
        return [wish for wish in wishes if wish.key in self._parked]


class PageWaits:
    """The sequences in state NEEDS_PAGES. Each holds pages of the device, and is the first to give
    them up."""

    def __init__(self, all_swaps: AllSwaps) -> None:
        self._swaps = all_swaps
        self._parked: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, sequence: Sequence) -> None:
        sequence.move(State.NEEDS_PAGES)
        self._parked[sequence.key] = sequence

    def take_served(self) -> list[Sequence]:
        """The sequences whose pages have come, or turned out not to be there; they are parked no
        longer."""
        return [self._parked.pop(key) for key in self._swaps.take_recalled()]

    def last(self, after: Precedence | None = None) -> Sequence | None:
        """The parked sequence that comes last, if it comes after this place."""
        last = max(self._parked.values(), key=BY_PRECEDENCE, default=None)
        return last if last is not None and (after is None or last.precedence > after) else None

    def give_up(self, sequence: Sequence) -> None:
        """The sequence waits no more, and its pages go."""
        if self._parked.pop(sequence.key, None) is not None:
            self._swaps.abandon(sequence.key)


class Waits:
    """Everything that sequences wait for before they can take a row. A parked one waits for one
    thing at a time; its state says for which."""

    def __init__(
        self, loads: AdapterLoads, grammars: GrammarWaits, pictures: PictureLoads, pages: PageWaits
    ) -> None:
        self._loads, self._grammars = loads, grammars
        self._pictures, self._pages = pictures, pages

    def __len__(self) -> int:
        """How many sequences are parked."""
        others = len(self._grammars) + len(self._pictures) + len(self._pages)
        return self._loads.num_parked + others

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether its adapter and its pictures are on the device."""
        return self._has_adapter(sequence) and self._pictures.is_ready(sequence)

    def park(self, sequence: Sequence, now: float) -> bool:
        """Park a waiting sequence with what it lacks. False: it lacks nothing but a row and
        pages."""
        if self._has_adapter(sequence):
            self._pictures.want(sequence)
        if sequence.constraint is None and sequence.request.sampling.is_constrained:
            self._grammars.park(sequence)
        elif not self._has_adapter(sequence):
            sequence.move(State.NEEDS_ADAPTER)
            sequence.parked_at = now
            self._loads.park(sequence)
        elif not self._pictures.is_ready(sequence):
            sequence.move(State.NEEDS_PICTURES)
            self._pictures.park(sequence)
        else:
            return False
        return True

    def give_up(self, sequence: Sequence) -> bool:
        """The sequence ends, and waits for nothing. Whether it was parked."""
        self._pictures.release(sequence)
        if sequence.state is State.NEEDS_ADAPTER:
            self._loads.unpark(sequence)
        elif sequence.state is State.NEEDS_GRAMMAR:
            self._grammars.abandon(sequence.key)
        elif sequence.state is State.NEEDS_PAGES:
            self._pages.give_up(sequence)
        else:
            return sequence.state is State.NEEDS_PICTURES
        return True

    def _has_adapter(self, sequence: Sequence) -> bool:
        arena = self._loads.arena
        return sequence.adapter is None or arena.stage(sequence.adapter) == "ready"


class Deadlines:
    def __init__(self) -> None:
        self._by_key: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []  # some sequences in it have ended

    def add(self, key: int, deadline: float) -> None:
        self._by_key[key] = deadline
        heapq.heappush(self._heap, (deadline, key))
        if len(self._heap) > 2 * len(self._by_key) + _LEFTOVERS:
            self._heap = [(at, key) for key, at in self._by_key.items()]
            heapq.heapify(self._heap)

    def discard(self, key: int) -> None:
        """The sequence is over. It need not have a deadline."""
        self._by_key.pop(key, None)

    def next(self) -> tuple[float, int] | None:
        """The earliest deadline and the key of its sequence."""
        while self._heap and self._by_key.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None
