"""Slots of a memory that are kept under hashes, and which of them give way. Pure."""

from collections import OrderedDict
from collections.abc import Container
from typing import NamedTuple

from loraplex.server.engine.memory.pages import PageHash


class Taken(NamedTuple):
    """A slot to write. evicted: whose content was kept there."""

    slot: int
    evicted: PageHash | None


class KeptSlots:
    """A slot is free, being written, or kept under the hash of what it holds.

    A kept one gives way when none is free, the least recently used first. What is being read gives
    way to nothing.
    """

    def __init__(self, count: int, read: Container[int]) -> None:
        """read: slots that are being read, at any time."""
        self.count = count
        self._read = read
        self._free = list(range(count - 1, -1, -1))
        self._kept: OrderedDict[PageHash, int] = OrderedDict()  # the least recently used first

    def knows(self, digest: PageHash) -> bool:
        return digest in self._kept

    def take(self) -> Taken | None:
        """A slot to write, which comes back by `keep` or `give_back`; None = all are in use."""
        if self._free:
            return Taken(self._free.pop(), None)
        for digest, slot in self._kept.items():
            if slot not in self._read:
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
