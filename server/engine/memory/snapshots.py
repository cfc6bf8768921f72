"""Snapshots of recurrent states: which are kept, under which hash, and which are overwritten. Pure.

A snapshot is free, being written, or kept under the hash of all tokens whose state it holds
(`page_hash`). So nobody owns a kept one, and none is ever read for other tokens, salts or adapters.
"""

from collections import OrderedDict
from collections.abc import Iterable

from loraplex.server.engine.memory.pages import PageHash


class SnapshotPool:
    """Kept snapshots are overwritten, the least recently used first, when none is free.

    The device saves states of rows that leave before it restores any. So what a plan restores is
    not overwritten until the next plan begins.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._kept: OrderedDict[PageHash, int] = OrderedDict()  # the least recently used first
        self._read = set[int]()

    def begin_plan(self) -> None:
        self._read.clear()

    def knows(self, digest: PageHash) -> bool:
        return digest in self._kept

    def read(self, digest: PageHash) -> int:
        """Use a kept snapshot in this plan."""
        self._kept.move_to_end(digest)
        self._read.add(self._kept[digest])
        return self._kept[digest]

    def take(self) -> int | None:
        """A snapshot to write, which comes back by `keep` or `give_back`; None = there is none."""
        if self._free:
            return self._free.pop()
        for digest, snapshot in self._kept.items():
            if snapshot not in self._read:
                del self._kept[digest]
                return snapshot
        return None

    def keep(self, snapshot: int, digest: PageHash) -> None:
        """A taken snapshot holds the state of these tokens. The first one of them is kept."""
        if digest in self._kept:
            self.give_back(snapshot)
        else:
            self._kept[digest] = snapshot

    def give_back(self, snapshot: int) -> None:
        """A taken snapshot is of no use."""
        self._free.append(snapshot)

    def forget(self, digests: Iterable[PageHash]) -> None:
        for digest in digests:
            if digest in self._kept:
                self._free.append(self._kept.pop(digest))

    def clear(self) -> None:
        """Forget all that is kept."""
        self.forget(list(self._kept))
