"""Pages that host memory or the disk keeps: which, under which hash, and which give way. Pure."""

from collections.abc import Iterator
from itertools import islice

from loraplex.server.engine.memory.kept_slots import KeptSlots
from loraplex.server.engine.memory.pages import PageHash


class PageStore(KeptSlots):
    """Pages in slots. Several may read a slot at once. One that is forgotten meanwhile is free once
    they are done."""

    def __init__(self, count: int) -> None:
        self._reads: dict[int, int] = {}  # of slots that are read, by how many
        self._forgotten: set[int] = set()
        super().__init__(count, self._reads)

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
