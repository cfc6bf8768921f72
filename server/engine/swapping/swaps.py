"""Copies of pages and snapshots between the device, host memory and the disk: of which, and when.
Pure.

Pages are copied to host memory before the device needs their room, and from there to the disk
before host memory needs it: those that would be overwritten next. So a page that is overwritten is
mostly one of two. What is copied holds its page and its slot until the copy is over.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import NamedTuple

from loraplex.server.engine.executor import ExecutorLimits, PageCopies, PagesCopied, PageWay
from loraplex.server.engine.memory.pages import PageHash, PagePool
from loraplex.server.engine.messages import SwapStats

# Tokens whose pages are copied together. Two such copies of each way are under way at most, so
# that the bus is never idle and a copy that is wanted soon waits for little.
_TOKENS_TOGETHER = 1024
_AT_ONCE = 2
# A prompt takes all its pages at once. Those of longer ones than so many push pages out that are
# not saved: looking at these takes some 0.3 ms. It is done again after so long.
_AHEAD = 1024
_LOOK_S = 0.02
# A disk that took no page is left alone for so long.
_DISK_REST_S = 10.0
_NONE = SwapStats()


class Taken(NamedTuple):
    """A slot to write. evicted: whose content was kept there."""

    slot: int
    evicted: PageHash | None


class PageStore:
    """A slot is free, being written, or kept under the hash of what it holds.

    A kept one gives way when none is free, the least recently used first. What is being read gives
    way to nothing. Several may read a slot at once. One that is forgotten meanwhile is free once
    they are done.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._kept: OrderedDict[PageHash, int] = OrderedDict()  # the least recently used first
        self._reads: dict[int, int] = {}  # of slots that are read, by how many
        self._forgotten: set[int] = set()

    def knows(self, digest: PageHash) -> bool:
        return digest in self._kept

    def take(self) -> Taken | None:
        """A slot to write, which comes back by `keep` or `give_back`; None = all are in use."""
        if self._free:
            return Taken(self._free.pop(), None)
        for digest, slot in self._kept.items():
            if slot not in self._reads:
                del self._kept[digest]
                return Taken(slot, digest)
        return None

    def keep(self, slot: int, digest: PageHash) -> None:
        """A taken slot holds this content. The first one of them is kept."""
        if digest in self._kept:
            self.give_back(slot)
        else:
            self._kept[digest] = slot

    def give_back(self, slot: int) -> None:
        """A taken slot holds nothing."""
        self._free.append(slot)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def use(self, digest: PageHash) -> int:
        """As `hold`, of a page that a sequence wants."""
        self._kept.move_to_end(digest)
        return self.hold(digest)

    def hold(self, digest: PageHash) -> int:
        """The slot of a kept page, to read it until `let_go`."""
        slot = self._kept[digest]
        self._reads[slot] = self._reads.get(slot, 0) + 1
        return slot

    def let_go(self, slot: int) -> None:
        """One reader of the slot is done."""
        self._reads[slot] -= 1
        if self._reads[slot]:
            return
        del self._reads[slot]
        if slot in self._forgotten:
            self._forgotten.discard(slot)
            self._free.append(slot)

    def forget(self, digest: PageHash) -> bool:
        """No further reader gets this page. Whether it was kept."""
        slot = self._kept.pop(digest, None)
        if slot is None:
            return False
        if slot in self._reads:
            self._forgotten.add(slot)
        else:
            self._free.append(slot)
        return True

    def at_risk(self, count: int) -> Iterator[PageHash]:
        """Pages that give way to the next `count` others, as far as nobody reads them."""
        return islice(self._kept, max(0, count - len(self._free)))


@dataclass(slots=True, eq=False)
class Recall:
    """Pages that a parked sequence waits for. held: pages that it holds meanwhile: those that were
    on the device, and those that come. left: copies that are not over."""

    key: int
    held: list[int]
    left: int = 0
    is_over: bool = False  # or given up


@dataclass(slots=True, eq=False)
class _Move:
    """A page on its way. page: of the device. slot: in host memory. stored: its slot on disk.
    is_void: its content is forgotten meanwhile."""

    digest: PageHash
    page: int = -1
    slot: int = -1
    stored: int = -1
    recall: Recall | None = None
    is_void: bool = False

    @property
    def is_wanted(self) -> bool:
        return self.recall is None or not self.recall.is_over


class PageSwaps:
    """Host memory and the disk below a pool of pages.

    `go_on` begins copies, and `over` takes their ends. The caller takes `take_copies` to the
    executor, and the recalls that are over from `take_recalled`.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        pool: PagePool,
        stored: Iterable[PageHash] = (),
        numbers: Iterator[int] | None = None,
        *,
        of_states: bool = False,
    ) -> None:
        """stored: pages on disk, no more than there may be, those that give way first at the
        front. numbers: of copies; others take from them, too. of_states: the pool is of snapshots
        of states, each like a page."""
        self._pool, self._of_states = pool, of_states
        self.host, self.disk = PageStore(limits.host_pages), PageStore(limits.disk_pages)
        self._together = max(1, _TOKENS_TOGETHER // limits.page_size)
        groups = max(1, len(limits.page_windows))
        of_step, of_prompt = (
            -(-tokens // limits.page_size) * groups
            for tokens in (limits.max_step_tokens, limits.max_context)
        )
        # Pages that may be overwritten before a copy that begins now is over.
        soon = max(of_step + _AT_ONCE * self._together, min(of_prompt, _AHEAD))
        # No more than a half of what keeps them, so that saved pages do not push each other out.
        self._to_save = max(1, min(soon, limits.host_pages // 2))
        # Host memory takes what leaves the device, and what is read for a prompt.
        self._to_write = max(1, min(2 * soon, limits.disk_pages // 2))
        self._batches: dict[int, tuple[PageWay, list[_Move]]] = {}
        self._queues: dict[PageWay, deque[_Move]] = {"in": deque(), "read": deque()}
        self._moving: dict[PageWay, set[PageHash]] = {"out": set(), "write": set()}
        self._recalls: dict[int, Recall] = {}
        self.coming: dict[PageHash, Recall] = {}  # pages on their way to the device
        self._copies: list[PageCopies] = []
        self._recalled: list[Recall] = []
        self._numbers = numbers or count(1)
        self._looks_at = self._writes_at = 0.0  # not before
        self._seen_moves = 0
        self._recalled_pages = 0
        self._copied, self._failed = Counter[PageWay](), Counter[PageWay]()
        for digest in stored:
            if (taken := self.disk.take()) is not None:
                self.disk.keep(taken.slot, digest)

    def __bool__(self) -> bool:
        return self.host.count > 0

    @property
    def is_copying(self) -> bool:
        return bool(self._batches)

    @property
    def next_look(self) -> float | None:
        """When `go_on` should look for pages to save, whatever else happens; None = there are no
        new ones."""
        return self._looks_at if self and self._pool.num_moves != self._seen_moves else None

    @property
    def holds_pages(self) -> bool:
        """Whether pages of the device come free when copies are over."""
        return any(way in ("out", "in") for way, _ in self._batches.values())

    def knows(self, digest: PageHash) -> bool:
        """Whether a page with this content lies below the device."""
        return self.host.knows(digest) or self.disk.knows(digest)

    def stats(self) -> SwapStats:
        if not self:
            return _NONE
        host, disk = self.host.num_kept, self.disk.num_kept
        return SwapStats(host, disk, self._recalled_pages, dict(self._copied), dict(self._failed))

    # ---- recalls

    def recall(
        self, key: int, missing: Sequence[PageHash], pages: Sequence[int], held: Sequence[int]
    ) -> None:
        """Bring pages that are known here to the device, for a sequence that waits for them.

        pages: held ones of the device, for those that are missing. held: others that the sequence
        holds meanwhile.
        """
        recall = self._recalls[key] = Recall(key, [*held, *pages], len(missing))
        self._recalled_pages += len(missing)
        for digest, page in zip(missing, pages, strict=True):
            self.coming.setdefault(digest, recall)
            move = _Move(digest, page, recall=recall)
            if self.host.knows(digest):
                move.slot = self.host.use(digest)
                self._queues["in"].append(move)
            else:
                move.stored = self.disk.use(digest)
                self._queues["read"].append(move)

    def abandon(self, key: int) -> None:
        """The sequence waits no more. Copies that have begun go on for whoever comes next."""
        if (recall := self._recalls.get(key)) is not None:
            self._end(recall)

    def take_recalled(self) -> list[int]:
        """Keys of sequences whose recalls are over since the last call; some pages may have turned
        out not to be there."""
        recalled, self._recalled = self._recalled, []
        return [recall.key for recall in recalled]

    def _end(self, recall: Recall) -> None:
        recall.is_over = True
        del self._recalls[recall.key]
        self.coming = {key: of for key, of in self.coming.items() if of is not recall}
        self._pool.release(recall.held)

    def _arrived(self, move: _Move) -> None:
        recall = move.recall
        if recall is None or recall.is_over:
            return
        recall.left -= 1
        if not recall.left:
            self._end(recall)
            self._recalled.append(recall)

    # ---- copies

    def go_on(self, now: float) -> None:
        """Begin the copies that there is reason and room for."""
        if not self:
            return
        self._begin_queued("in")
        self._begin_queued("read")
        if now < self._looks_at or self.next_look is None:
            return
        moves = self._pool.num_moves
        full = self._copy_out() == self._together
        if self.disk.count and now >= self._writes_at:
            full |= self._write() == self._together
        if not full:
            self._looks_at, self._seen_moves = now + _LOOK_S, moves

    def take_copies(self) -> list[PageCopies]:
        """Copies that begin now, in this order."""
        copies, self._copies = self._copies, []
        return copies

    def has_begun(self, number: int) -> bool:
        """Whether copies of this number are under way."""
        return number in self._batches

    def over(self, news: PagesCopied, now: float) -> None:
        """Note the end of copies."""
        way, moves = self._batches.pop(news.number)
        failed = set(news.failed)
        self._copied[way] += len(moves) - len(failed)
        self._failed[way] += len(failed)
        if way == "write" and failed:
            self._writes_at = now + _DISK_REST_S
        end = {"out": self._is_out, "in": self._is_in, "write": self._is_written}
        for place, move in enumerate(moves):
            if way == "read":
                self._is_read(move, is_there=place not in failed)
            elif way in end:
                end[way](move, place not in failed and not move.is_void)
        if way == "out":
            self._pool.saved(move.page for move in moves)
        if way in ("out", "write"):
            self._seen_moves = -1  # there may be more

    def forget(self, digests: Iterable[PageHash]) -> None:
        """No sequence may read these pages any more, wherever they are."""
        if not self:
            return
        gone = set(digests)
        for digest in gone:
            self.host.forget(digest)
            self._drop(digest)
        for _, moves in self._batches.values():
            for move in moves:
                move.is_void |= move.digest in gone
        for queue in self._queues.values():
            for move in queue:
                move.is_void |= move.digest in gone

    def _copy_out(self) -> int:
        """Copy pages to host memory that the device overwrites soon; how many."""
        moving = self._moving["out"]
        room = min(self._room("out"), max(1, self._pool.available // 2))
        moves = list[_Move]()
        for page, digest in self._pool.at_risk(self._to_save):
            if len(moves) >= room:
                break
            if digest in moving or self.host.knows(digest):
                continue
            taken = self.host.take()
            if taken is None:
                break
            moves.append(_Move(digest, page, taken.slot))
        self._pool.save(move.page for move in moves)
        moving.update(move.digest for move in moves)
        self._begin("out", moves)
        return len(moves)

    def _is_out(self, move: _Move, is_there: bool) -> None:
        self._moving["out"].discard(move.digest)
        if is_there:
            self.host.keep(move.slot, move.digest)
        else:
            self.host.give_back(move.slot)

    def _is_in(self, move: _Move, is_there: bool) -> None:
        self.host.let_go(move.slot)
        if is_there:
            self._pool.publish(move.page, move.digest)
        self._pool.release([move.page])
        self._arrived(move)

    def _write(self) -> int:
        """Copy pages to disk that host memory gives up soon; how many."""
        moving, room = self._moving["write"], self._room("write")
        moves = list[_Move]()
        for digest in self.host.at_risk(self._to_write):
            if len(moves) >= room:
                break
            if digest in moving or self.disk.knows(digest):
                continue
            taken = self.disk.take()
            if taken is None:
                break
            if taken.evicted is not None:
                self._remove(taken.evicted)
            moves.append(_Move(digest, slot=self.host.hold(digest), stored=taken.slot))
        moving.update(move.digest for move in moves)
        self._begin("write", moves)
        return len(moves)

    def _is_written(self, move: _Move, is_there: bool) -> None:
        self._moving["write"].discard(move.digest)
        self.host.let_go(move.slot)
        if is_there:
            self.disk.keep(move.stored, move.digest)
            return
        self.disk.give_back(move.stored)
        self._remove(move.digest)  # other processes may have written theirs

    def _is_read(self, move: _Move, *, is_there: bool) -> None:
        self.disk.let_go(move.stored)
        if not is_there:
            self._drop(move.digest)
        if move.is_void or not is_there:
            self.host.give_back(move.slot)
            self._arrived(move)
            return
        self.host.keep(move.slot, move.digest)
        if move.is_wanted:
            move.slot = self.host.hold(move.digest)
            self._queues["in"].append(move)

    def _drop(self, digest: PageHash) -> None:
        if self.disk.forget(digest):
            self._remove(digest)

    def _remove(self, digest: PageHash) -> None:
        """Remove a page's file, in the order of what is written."""
        number = next(self._numbers)
        self._batches[number] = ("drop", [])
        self._copies.append(PageCopies(number, "drop", keys=(digest,), of_states=self._of_states))

    def _begin_queued(self, way: PageWay) -> None:
        queue, moves = self._queues[way], list[_Move]()
        while queue and len(moves) < self._room(way):
            move = queue[0]
            if not move.is_wanted or move.is_void:
                self._withdraw(way, queue.popleft())
                continue
            if way == "read":
                taken = self.host.take()
                if taken is None:
                    break
                move.slot = taken.slot
            moves.append(queue.popleft())
        if way == "in":
            self._pool.hold(move.page for move in moves)
        self._begin(way, moves)

    def _withdraw(self, way: PageWay, move: _Move) -> None:
        if way == "in":
            self.host.let_go(move.slot)
        else:
            self.disk.let_go(move.stored)
        self._arrived(move)

    def _room(self, way: PageWay) -> int:
        """Pages that may begin now, in one copy."""
        under_way = sum(each == way for each, _ in self._batches.values())
        return self._together if under_way < _AT_ONCE else 0

    def _begin(self, way: PageWay, moves: list[_Move]) -> None:
        if not moves:
            return
        number = next(self._numbers)
        self._batches[number] = (way, moves)
        on_device = way in ("out", "in")
        copies = PageCopies(
            number,
            way,
            tuple(move.page for move in moves) if on_device else (),
            tuple(move.slot for move in moves),
            () if on_device else tuple(move.digest for move in moves),
            self._of_states,
        )
        self._copies.append(copies)


class AllSwaps:
    """Passes on what concerns both. A sequence waits for pages or for a snapshot, one at a time."""

    def __init__(self, *swaps: PageSwaps) -> None:
        self._swaps = [each for each in swaps if each]

    @property
    def is_copying(self) -> bool:
        return any(each.is_copying for each in self._swaps)

    @property
    def next_look(self) -> float | None:
        """As of `PageSwaps.next_look`."""
        looks = (each.next_look for each in self._swaps)
        return min((look for look in looks if look is not None), default=None)

    def go_on(self, now: float) -> None:
        """Begin the copies that there is reason and room for."""
        for each in self._swaps:
            each.go_on(now)

    def take_copies(self) -> list[PageCopies]:
        """Copies that begin now, in this order."""
        return [*chain.from_iterable(each.take_copies() for each in self._swaps)]

    def over(self, news: PagesCopied, now: float) -> None:
        """Note the end of copies."""
        next(each for each in self._swaps if each.has_begun(news.number)).over(news, now)

    def take_recalled(self) -> list[int]:
        """Keys of sequences whose recalls are over, as of `PageSwaps.take_recalled`."""
        return [*chain.from_iterable(each.take_recalled() for each in self._swaps)]

    def abandon(self, key: int) -> None:
        """The sequence waits no more."""
        for each in self._swaps:
            each.abandon(key)
