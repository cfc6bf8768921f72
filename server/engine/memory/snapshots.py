"""Snapshots of recurrent states: which are kept, under which hash, and which are overwritten. Pure.

A snapshot is free, being written, or kept under the hash of all tokens whose state it holds
(`page_hash`). So nobody owns a kept one, and none is ever read for other tokens, salts or adapters.
"""

from collections.abc import Iterable

from loraplex.server.engine.memory.pages import PageHash, PagePool


class SnapshotPool:
    """Snapshots in slots, each of which is like one page.

    The device saves states of rows that leave before it restores any. So what a plan restores is
    not overwritten until the next plan begins.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.slots = PagePool(count, 1)
        self._of_plan: list[int] = []

    def begin_plan(self) -> None:
        self.slots.release(self._of_plan)
        self._of_plan = []

    def knows(self, digest: PageHash) -> bool:
        return self.slots.knows(digest)

    def read(self, digest: PageHash) -> int:
        """Use a kept snapshot in this plan."""
        (slot,) = self.slots.match([digest])
        self._of_plan.append(slot)
        return slot

    def take(self) -> int | None:
        """A slot to write, which comes back by `keep` or `give_back`. The least recently used
        content gives way; None = all slots are in use."""
        slots = self.slots.allocate(1)
        return None if slots is None else slots[0]

    def publish(self, slot: int, digest: PageHash) -> None:
        """A taken slot will hold this content before any plan reads it."""
        self.slots.publish(slot, digest)

    def keep(self, slot: int, digest: PageHash) -> None:
        """A taken slot holds this content. The first one of them is kept."""
        self.publish(slot, digest)
        self.give_back(slot)

    def give_back(self, slot: int) -> None:
        """A taken slot is written no more."""
        self.slots.release([slot])

    def forget(self, digests: Iterable[PageHash]) -> None:
        for digest in digests:
            slots = self.slots.match([digest])
            self.slots.forget(slots)
            self.slots.release(slots)

    def known(self) -> list[PageHash]:
        """The hashes of all that is kept."""
        return self.slots.known()
