"""How pictures come to the device: who waits, which are asked for, which the tower computes. Pure.

A sequence has a lease on all of its pictures' results at once, or on none, in order of precedence.
So sequences never wait for each other's pictures. It holds the lease until its prompt is computed.
Before it runs, one that comes before it may take its lease away.

Results depend on the adapter where that changes the tower. Such a picture has a lease on the
adapter until its results are computed.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable
from itertools import accumulate, chain, islice
from typing import NamedTuple

import msgspec

from loraplex.server.engine.executor import PictureCopy, PictureIn, PictureLimits
from loraplex.server.engine.memory.picture_cache import PictureCache, PictureKey, blocks_of
from loraplex.server.engine.messages import (
    EncodePicture,
    PictureFailed,
    PicturesWanted,
    PictureTaken,
)
from loraplex.server.engine.plan import PlacedPicture
from loraplex.server.engine.scheduling.loading import AdapterLoads
from loraplex.server.engine.scheduling.sequence import (
    BY_PRECEDENCE,
    Precedence,
    Sequence,
    State,
    discard,
)

# Pictures whose patches are on the device, or on their way: some pass the tower, the next come.
_MOST_STARTED = 8
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


class PictureBill(NamedTuple):
    """Launched work of the tower. shares: who pays for it, and what part of it. digests: adapters
    whose lease ends with it, once for each picture."""

    shares: list[tuple[Sequence, float]]
    digests: list[str]


class _Lease(NamedTuple):
    sequence: Sequence
    keys: set[PictureKey]
    acting: str


class _Started(NamedTuple):
    key: PictureKey
    copy: PictureCopy


class _Lock(NamedTuple):
    """A lease on an adapter that changes the tower. scale: multiplies what it adds."""

    digest: str
    scale: float


class PictureLoads:
    """Wanted -> placed and asked for -> patches come -> started -> encoded -> ready.

    limits: None = the base reads no pictures, and nothing ever happens here. loads: of adapters.
    """

    def __init__(self, limits: PictureLimits | None, loads: AdapterLoads) -> None:
        self._limits, self._loads = limits, loads
        self.cache = PictureCache(0 if limits is None else limits.num_blocks)
        self._wanting: list[Sequence] = []  # without a place, in order of precedence
        self._held: dict[int, _Lease] = {}  # by the sequence's key
        self._parked: dict[int, Sequence] = {}
        self._has_news = False  # some that are parked may be ready
        self._copies: deque[_Started] = deque()  # not started yet
        self._started: deque[_Started] = deque()
        self._here = 0  # of them, whose patches are on the device
        self._passing = 0  # of these, which pass the tower together
        self._locks: dict[PictureKey, _Lock] = {}  # of those whose last work is not launched
        self._bills: deque[PictureBill] = deque()  # of work that may not be over
        self._orders = PictureOrders([], [], [])

    def __len__(self) -> int:
        """How many sequences are in state NEEDS_PICTURES."""
        return len(self._parked)

    @property
    def busy(self) -> bool:
        """Whether pictures are on their way through the device."""
        return bool(self._started or self._bills)

    # ---- sequences

    def want(self, sequence: Sequence) -> None:
        """The sequence will read its pictures. To say so again changes nothing. Its adapter, if it
        has one, is on the device."""
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
        ready = [s for s in self._parked.values() if self.is_ready(s) or self._has_lost_adapter(s)]
        for sequence in ready:
            del self._parked[sequence.key]
        return ready

    def _has_lost_adapter(self, sequence: Sequence) -> bool:
        """Whether a parked sequence could have no lease, since its adapter had gone."""
        return sequence.key not in self._held and sequence not in self._wanting

    def release(self, sequence: Sequence) -> None:
        """The sequence reads no picture any more, unless it wants them again."""
        self._parked.pop(sequence.key, None)
        lease = self._held.pop(sequence.key, None)
        if lease is not None:
            self.cache.release(lease.keys)
            self._unlock()
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
        if not sequence.request.pictures:
            return ()
        acting = self._held[sequence.key].acting
        return tuple(
            PlacedPicture(span.start, span.grid, self.cache[PictureKey.of(span, acting)].blocks)
            for span in sequence.request.pictures
        )

    def _place(self) -> None:
        """Give leases to sequences in order. A small one does not overtake a large one for ever."""
        assert self._limits is not None
        while self._wanting:
            sequence = self._wanting[0]
            adapter, acting = sequence.adapter, ""
            if adapter is not None and self._loads.arena.stage(adapter) != "ready":
                del self._wanting[0]  # only its slab says whether it changes the tower
                self._has_news = True
                continue
            if adapter is not None and self._loads.changes_tower(adapter):
                acting = sequence.acting or ""
            wanted = blocks_of(sequence.request.pictures, self._limits, acting)
            while not self.cache.take(wanted):
                if not self._take_lease_behind(sequence.precedence):
                    return
            del self._wanting[0]
            self._held[sequence.key] = _Lease(sequence, {*wanted}, acting)
            self._has_news = True
            if acting and adapter is not None:
                self._lock(wanted, _Lock(adapter, sequence.request.adapter_scale))
            # Others may have asked for the same ones; but they may end, and their pictures' bytes
            # go with them.
            spans = {PictureKey.of(span, acting): span for span in sequence.request.pictures}
            missing = tuple(s for key, s in spans.items() if not self.cache[key].has_patches)
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
        self._unlock()
        insort(self._wanting, last, key=BY_PRECEDENCE)
        return True

    def _lock(self, keys: Iterable[PictureKey], lock: _Lock) -> None:
        """Take a lease on the adapter of pictures for each whose work is not launched."""
        for key in keys:
            if not self.cache[key].is_ready and key not in self._locks:
                self._loads.arena.acquire(lock.digest)
                self._locks[key] = lock

    def _unlock(self) -> None:
        """Give up the leases of pictures that are forgotten."""
        for key in [key for key in self._locks if self.cache.get(key) is None]:
            self._loads.arena.release(self._locks.pop(key).digest)

    # ---- answers of the worker and the executor

    def came(self, message: EncodePicture) -> list[LostPicture]:
        """Patches are in host memory. Returns what waits for them, if they cannot be read."""
        keys, problem = self.cache.of(message.picture, message.grid), self._problem(message)
        for key in keys if problem is None else ():
            entry, lock = self.cache[key], self._locks.get(key)
            entry.has_patches = True
            place = (key.picture, key.grid, message.segment, message.rows, message.columns)
            copy = PictureCopy(*place, entry.blocks)
            if lock is not None:
                slot = self._loads.arena.slot(lock.digest)
                copy = msgspec.structs.replace(copy, adapter_slot=slot, scale=lock.scale)
            self._copies.append(_Started(key, copy))
        self._take_back(message.picture, message.segment, problem)
        self._start()
        return [] if problem is None else [self._fail(key, problem) for key in keys]

    def missing(self, failed: PictureFailed) -> list[LostPicture]:
        """The worker has no patches of a picture."""
        keys, message = self.cache.of(failed.picture, failed.grid), failed.message
        return [self._fail(key, f"{failed.picture}: {message}") for key in keys]

    def is_in(self, news: PictureIn) -> list[LostPicture]:
        """The patches of the oldest picture on its way are on the device, or not to be had."""
        key, copy = self._started[self._here]
        if news.error is None:
            self._here += 1
        else:
            del self._started[self._here]
        self._take_back(key.picture, copy.segment, news.error)
        self._start()
        return [] if news.error is None else [self._fail(key, news.error)]

    def next_work(self) -> int:
        """Pictures whose work is to be launched now, as `Executor.encode` takes them; 0 = there are
        none."""
        if self._passing or not self._here or self._limits is None:
            return self._passing
        rows = accumulate(copy.rows for _, copy in islice(self._started, self._here))
        return max(1, sum(count <= self._limits.chunk for count in rows))

    def launched(self, pictures: int, *, is_last: bool) -> None:
        """Work of the oldest pictures was launched, for those who wait for them. is_last: and it
        was their last."""
        self._passing = 0 if is_last else pictures
        passing = [*islice(self._started, pictures)]
        total = sum(copy.rows for _, copy in passing)
        bill = PictureBill([], [])
        for key, copy in passing:
            waiting = [lease.sequence for lease in self._held.values() if key in lease.keys]
            share = copy.rows / total / max(len(waiting), 1)
            bill.shares.extend((sequence, share) for sequence in waiting)
        self._bills.append(bill)
        if not is_last:
            return
        for key, _ in passing:
            if key in self._locks:
                bill.digests.append(self._locks.pop(key).digest)
            self._started.popleft()
            self.cache.finish(key)
        self._has_news = True
        self._here -= pictures
        self._place()
        self._start()

    def settle(self) -> PictureBill:
        """The oldest launched work is over. Returns who pays."""
        bill = self._bills.popleft()
        for digest in bill.digests:
            self._loads.arena.release(digest)
        return bill

    def lost(self) -> list[LostPicture]:
        """The device has forgotten all pictures on their way."""
        while self._bills:
            self.settle()
        coming = [*self._started][self._here :]
        failed = [self._fail(key, _LOST) for key, _ in self._started]
        self._orders.copies.clear()
        self._started.clear()
        self._here = self._passing = 0
        for key, copy in coming:
            self._take_back(key.picture, copy.segment, _LOST)
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
        if self._limits is None:
            return
        form = self._limits.form
        room = 2 * form.patches(form.largest(self._limits.most_tokens))
        room -= sum(copy.rows for _, copy in self._started)
        while self._copies and len(self._started) < _MOST_STARTED:
            room -= self._copies[0].copy.rows
            if room < 0 and self._started:
                return
            self._started.append(self._copies.popleft())
            self._orders.copies.append(self._started[-1].copy)

    def _take_back(self, picture: str, segment: int, error: str | None) -> None:
        """Give a segment back, unless another copy is to read it."""
        coming = chain(self._copies, islice(self._started, self._here, None))
        if all(copy.segment != segment for _, copy in coming):
            self._orders.taken.append(PictureTaken(picture, segment, error))

    def _fail(self, key: PictureKey, message: str) -> LostPicture:
        """Forget a picture. Those that need it cannot go on."""
        self.cache.drop(key)
        self._unlock()
        holding = [lease for lease in self._held.values() if key in lease.keys]
        for lease in holding:
            lease.keys.remove(key)
        return LostPicture([lease.sequence for lease in holding], message)
