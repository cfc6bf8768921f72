"""How pictures come to the device: who waits, which are asked for, which the tower computes. Pure.

A sequence has a lease on all of its pictures' results at once, or on none, in order of precedence.
So sequences never wait for each other's pictures. It holds the lease until its prompt is computed.
Before it runs, one that comes before it may take its lease away.
"""

from bisect import insort
from collections import deque
from typing import NamedTuple

from loraplex.server.engine.executor import PictureCopy, PictureIn, PictureLimits
from loraplex.server.engine.memory.picture_cache import PictureCache, PictureKey, blocks_of
from loraplex.server.engine.messages import EncodePicture, PicturesWanted, PictureTaken
from loraplex.server.engine.plan import PlacedPicture
from loraplex.server.engine.scheduling.sequence import (
    BY_PRECEDENCE,
    Precedence,
    Sequence,
    State,
    discard,
)

# Pictures whose patches are on the device, or on their way: one passes the tower, the next comes.
_MOST_STARTED = 2
# Layers that are launched at once, however few patches there are: the host is as long at each.
_MOST_LAYERS = 8
_OTHER_SIZE = "the picture has {} patches, and its place in the prompt is for {}"
_LOST = "the device failed while it computed the picture"


class PictureOrders(NamedTuple):
    """Copies to start, and messages for the worker."""

    copies: list[PictureCopy]
    wanted: list[PicturesWanted]
    taken: list[PictureTaken]


class LostPicture(NamedTuple):
    """A picture that does not come: the sequences that wait for it, and why."""

    sequences: list[Sequence]
    message: str


class _Lease(NamedTuple):
    sequence: Sequence
    keys: set[PictureKey]


class _Started(NamedTuple):
    key: PictureKey
    segment: int


class PictureLoads:
    """Wanted -> placed and asked for -> patches come -> started -> encoded -> ready.

    limits: None = the base reads no pictures, and nothing ever happens here.
    """

    def __init__(self, limits: PictureLimits | None) -> None:
        self._limits = limits
        self.cache = PictureCache(0 if limits is None else limits.num_blocks)
        self._wanting: list[Sequence] = []  # without a place, in order of precedence
        self._held: dict[int, _Lease] = {}  # by the sequence's key
        self._parked: dict[int, Sequence] = {}
        self._has_news = False  # some that are parked may be ready
        self._copies: deque[PictureCopy] = deque()  # not started yet
        self._started: deque[_Started] = deque()
        self._here = 0  # of them, whose patches are on the device
        self._layers_done = 0  # of the first
        self._orders = PictureOrders([], [], [])

    def __len__(self) -> int:
        """How many sequences are in state NEEDS_PICTURES."""
        return len(self._parked)

    @property
    def busy(self) -> bool:
        """Whether pictures are on their way through the device."""
        return bool(self._started)

    # ---- sequences

    def want(self, sequence: Sequence) -> None:
        """The sequence will read its pictures. To say so again changes nothing."""
        if not sequence.request.pictures:
            return
        if sequence.key not in self._held and sequence not in self._wanting:
            insort(self._wanting, sequence, key=BY_PRECEDENCE)
            self._place()

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether a step may read all of the sequence's pictures."""
        if not sequence.request.pictures:
            return True
        lease = self._held.get(sequence.key)
        return lease is not None and all(self.cache[key].is_ready for key in lease.keys)

    def park(self, sequence: Sequence) -> None:
        self._parked[sequence.key] = sequence

    def take_ready(self) -> list[Sequence]:
        """Remove and return parked sequences that need not wait any more."""
        if not self._has_news:
            return []
        self._has_news = False
        ready = [sequence for sequence in self._parked.values() if self.is_ready(sequence)]
        for sequence in ready:
            del self._parked[sequence.key]
        return ready

    def release(self, sequence: Sequence) -> None:
        """The sequence reads no picture any more, unless it wants them again."""
        self._parked.pop(sequence.key, None)
        lease = self._held.pop(sequence.key, None)
        if lease is not None:
            self.cache.release(lease.keys)
        elif self._wanting:
            discard(self._wanting, sequence)  # others may have room now
        else:
            return
        self._place()

    def computed(self, sequence: Sequence, end: int) -> None:
        """The sequence's first `end` tokens are computed."""
        if end >= sequence.pictures_end:
            self.release(sequence)

    def placed(self, sequence: Sequence) -> tuple[PlacedPicture, ...]:
        """The places of the results, for the row of a sequence that holds its lease."""
        spans = sequence.request.pictures
        return tuple(
            PlacedPicture(span.start, span.grid, self.cache[PictureKey.of(span)].blocks)
            for span in spans
        )

    def _place(self) -> None:
        """Give leases to sequences in order. A small one does not overtake a large one for ever."""
        assert self._limits is not None
        while self._wanting:
            sequence = self._wanting[0]
            wanted = blocks_of(sequence.request.pictures, self._limits)
            while not self.cache.take(wanted):
                if not self._take_lease_behind(sequence.precedence):
                    return
            del self._wanting[0]
            self._held[sequence.key] = _Lease(sequence, {*wanted})
            self._has_news = True
            # Others may have asked for the same ones; but they may end, and their pictures' bytes
            # go with them.
            missing = tuple(key.picture for key in wanted if not self.cache[key].has_patches)
            if missing:
                self._orders.wanted.append(PicturesWanted(sequence.key, missing))

    def _take_lease_behind(self, precedence: Precedence) -> bool:
        """Take the lease of the last sequence that comes behind and does not run. False: there is
        none."""
        found = [lease.sequence for lease in self._held.values()]
        behind = [s for s in found if s.precedence > precedence and s.state is not State.RUNNING]
        if not behind:
            return False
        last = max(behind, key=BY_PRECEDENCE)
        self.cache.release(self._held.pop(last.key).keys)
        insort(self._wanting, last, key=BY_PRECEDENCE)
        return True

    # ---- answers of the worker and the executor

    def came(self, message: EncodePicture) -> list[LostPicture]:
        """Patches are in host memory. Returns what waits for the picture in another size."""
        key = PictureKey(message.picture, message.grid)
        entry, problem = self.cache.get(key), self._problem(message)
        if entry is None or entry.has_patches or problem is not None:
            self._take_back(message.picture, message.segment, problem)
        else:
            entry.has_patches = True
            shape = (message.segment, message.rows, message.columns)
            self._copies.append(PictureCopy(message.picture, message.grid, *shape, entry.blocks))
            self._start()
        return [
            self._fail(other, problem or _OTHER_SIZE.format(message.grid, other.grid))
            for other in self.cache.of(message.picture)
        ]

    def missing(self, picture: str, message: str) -> list[LostPicture]:
        """The worker has no patches of a picture."""
        return [self._fail(key, message) for key in self.cache.of(picture)]

    def is_in(self, news: PictureIn) -> list[LostPicture]:
        """The patches of the oldest picture on its way are on the device, or not to be had."""
        started = self._started[self._here]
        self._take_back(started.key.picture, started.segment, news.error)
        if news.error is None:
            self._here += 1
            return []
        del self._started[self._here]
        self._start()
        return [self._fail(started.key, news.error)]

    def next_layers(self) -> int:
        """Layers that are to be launched now; 0 = there is nothing to compute."""
        if not self._here or self._limits is None:
            return 0
        patches = self._limits.form.patches(self._started[0].key.grid)
        most = min(_MOST_LAYERS, max(1, self._limits.chunk // patches))
        return min(most, self._limits.layers - self._layers_done)

    def launched(self, layers: int) -> None:
        """So many layers of the oldest picture were launched."""
        assert self._limits is not None
        self._layers_done += layers
        if self._layers_done == self._limits.layers:
            self.cache.finish(self._started.popleft().key)
            self._has_news = True
            self._here, self._layers_done = self._here - 1, 0
            self._place()
            self._start()

    def lost(self) -> list[LostPicture]:
        """The device has forgotten all pictures on their way."""
        for each in [*self._started][self._here :]:
            self._take_back(each.key.picture, each.segment, _LOST)
        failed = [self._fail(each.key, _LOST) for each in self._started]
        self._orders.copies.clear()
        self._started.clear()
        self._here = self._layers_done = 0
        self._start()
        return failed

    def take(self) -> PictureOrders:
        """Everything decided since the last call."""
        orders, self._orders = self._orders, PictureOrders([], [], [])
        return orders

    def _problem(self, message: EncodePicture) -> str | None:
        """Why the patches cannot be read, or None."""
        assert self._limits is not None
        expected = (self._limits.form.patches(message.grid), self._limits.columns)
        if (message.rows, message.columns) == expected:
            return None
        return f"{message.rows} patches of {message.columns} numbers are not those of its size"

    def _start(self) -> None:
        while self._copies and len(self._started) < _MOST_STARTED:
            copy = self._copies.popleft()
            self._started.append(_Started(PictureKey(copy.picture, copy.grid), copy.segment))
            self._orders.copies.append(copy)

    def _take_back(self, picture: str, segment: int, error: str | None) -> None:
        self._orders.taken.append(PictureTaken(picture, segment, error))

    def _fail(self, key: PictureKey, message: str) -> LostPicture:
        """Forget a picture. Those that need it cannot go on."""
        self.cache.drop(key)
        holding = [lease for lease in self._held.values() if key in lease.keys]
        for lease in holding:
            lease.keys.remove(key)
        return LostPicture([lease.sequence for lease in holding], message)
