"""Pages that host memory or the disk keeps: which, under which hash, and which give way. Pure."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from loraplex.server.engine.memory.pages import PageHash


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
