"""Snapshots of recurrent states: which are kept, under which hash, and which are overwritten. Pure.

A snapshot is free, being written, or kept under the hash of all tokens whose state it holds
(`page_hash`). So nobody owns a kept one, and none is ever read for other tokens, salts or adapters.
"""

from collections.abc import Iterable

from loraplex.server.engine.memory.kept_slots import KeptSlots
from loraplex.server.engine.memory.pages import PageHash


class SnapshotPool(KeptSlots):
    """Snapshots in slots.

    The device saves states of rows that leave before it restores any. So what a plan restores is
    not overwritten until the next plan begins.
    """

    def __init__(self, count: int) -> None:
        self._of_plan = set[int]()
        super().__init__(count, self._of_plan)

    def begin_plan(self) -> None:
        self._of_plan.clear()

    def read(self, digest: PageHash) -> int:
        """Use a kept snapshot in this plan."""
        self._kept.move_to_end(digest)
        self._of_plan.add(self._kept[digest])
        return self._kept[digest]

    def forget(self, digests: Iterable[PageHash]) -> None:
        for digest in digests:
            if digest in self._kept:
                self._free.append(self._kept.pop(digest))

    def clear(self) -> None:
        """Forget all that is kept."""
        self.forget(list(self._kept))
