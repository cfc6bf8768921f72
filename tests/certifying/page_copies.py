"""Pages below the device, for the certifying executor: copies that take a while, and may fail."""

from collections.abc import Callable
from typing import Any

from loraplex.server.engine.executor import PageCopies, PagesCopied

# What lies in its places, in order. It is never changed, but replaced.
Page = tuple[Any, ...]
Check = Callable[[bool, str], None]
IsRead = Callable[[int], bool]


class FakePages:
    """Copies of pages in Python. A page is read when its copy ends, and what is written holds
    nothing before. So a page or slot that is used too early, or overwritten too soon, shows."""

    def __init__(
        self, pages: list[Page], is_read: IsRead, sizes: tuple[int, int], check: Check
    ) -> None:
        """is_read: whether a step in flight reads a page. sizes: pages of host memory, and files of
        the disk."""
        self._pages, self._is_read, self._check = pages, is_read, check
        self._slots: list[Page | None] = [None] * sizes[0]
        self._most_files = sizes[1]
        self._files: dict[bytes, Page] = {}
        self._moving: list[tuple[int, PageCopies]] = []
        self.polls = 1
        self.bad_percent = 0  # of pages that the disk does not take, or give back
        self._asked = 0

    def start(self, copies: PageCopies) -> None:
        self._check(all(0 <= slot < len(self._slots) for slot in copies.slots), "no such slot")
        self._check(copies.way in ("drop", "out", "in") or bool(copies.keys), "pages without keys")
        for page in copies.pages:
            if copies.way == "in":
                self._check(not self._is_read(page), f"page {page} is overwritten under a step")
                self._pages[page] = (None,) * len(self._pages[page])
        if copies.way in ("out", "read"):
            for slot in copies.slots:
                self._slots[slot] = None
        self._moving.append((self.polls, copies))

    def poll(self) -> list[PagesCopied]:
        due = [copies for polls, copies in self._moving if polls <= 1]
        self._moving = [(polls - 1, copies) for polls, copies in self._moving if polls > 1]
        return [self._end(copies) for copies in due]

    def _end(self, copies: PageCopies) -> PagesCopied:
        failed = []
        for place in range(max(len(copies.slots), len(copies.keys))):
            if not self._copy(copies, place):
                failed.append(place)
        return PagesCopied(copies.number, tuple(failed))

    def _copy(self, copies: PageCopies, place: int) -> bool:
        if copies.way == "drop":
            self._files.pop(copies.keys[place], None)
            return True
        slot = copies.slots[place]
        if copies.way == "out":
            self._slots[slot] = self._pages[copies.pages[place]]
            return True
        if copies.way == "in":
            found = self._slots[slot]
            self._check(found is not None, f"slot {slot} is empty")
            self._pages[copies.pages[place]] = found or ()
            return True
        self._asked += 1
        if (self._asked * 37) % 100 < self.bad_percent:
            return False
        key = copies.keys[place]
        if copies.way == "write":
            written = self._slots[slot]
            self._check(written is not None, f"slot {slot} is empty")
            self._files[key] = written or ()
            self._check(len(self._files) <= self._most_files, "more files than there may be")
            return True
        self._slots[slot] = self._files.get(key)
        return key in self._files
