"""KV pages and snapshots of recurrent states: which sequences hold them, and which a later prompt
can read. Pure.

Layers are in groups (`ExecutorLimits.page_windows`), and a page is of one group.

A page's content is named by a SHA-256 chain over salt, acting adapter (or base), whether its
sequence is long, and all tokens up to its end, with the pictures that some of them stand for.
Before an activated adapter acts the chain is the base's. Only full pages are shared and nobody
writes to a full page, so nothing is ever copied. A sequence that gives up its row may leave its
last page under a hash of fewer tokens; who takes it has the page alone.

A snapshot is free, being written, or kept under the hash of all tokens whose state it holds
(`page_hash`). So nobody owns a kept one, and none is ever read for other tokens, salts or adapters.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice

PageHash = bytes


def root_hash(salt: str, adapter: str | None, is_long: bool = False) -> PageHash:
    """Start of a chain. The base and an adapter never share a chain, whatever its digest.
    is_long: see `Sequence`."""
    kind = b"base" if adapter is None else b"adapter"
    parts = (salt.encode(), kind, (adapter or "").encode(), b"long" * is_long)
    return sha256(b"".join(len(p).to_bytes(8, "little") + p for p in parts)).digest()


def activated_hash(parent: PageHash, adapter: str, offset: int) -> PageHash:
    """The hash from which a chain of the base goes on where an adapter begins to act.

    The adapter begins at token `offset` of the next page.
    """
    return sha256(parent + adapter.encode() + offset.to_bytes(8, "little")).digest()


def page_hash(parent: PageHash, token_ids: Sequence[int], pictured: bytes = b"") -> PageHash:
    """The hash of a full page of `token_ids` after the pages that `parent` stands for. pictured:
    what its placeholders stand for (`picture_mark`)."""
    return sha256(parent + array("q", token_ids).tobytes() + pictured).digest()


# No token has this id, so that no mark is like tokens.
_MARK = array("q", [-1]).tobytes()


def picture_mark(picture: str, grid: Sequence[int], place: int, first: int) -> bytes:
    """Say of a picture's tokens in a page which they are. place: in the page, of its first token
    there. first: which token of the picture that is."""
    numbers = array("q", (*grid, place, first)).tobytes()
    return _MARK + sha256(picture.encode()).digest() + numbers


def group_key(digest: PageHash, group: int) -> PageHash:
    """The key of a page of a group of layers. digest: of its content."""
    return digest + bytes((group,)) if group else digest


@dataclass(slots=True)
class GroupPages:
    """Pages that a sequence holds in one group: its page number `first`, and those that follow. The
    pages before that lie behind the group's window."""

    first: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


class PagePool:
    """A page is free, held (references > 0), or cached: full, known by hash, without references.

    Cached pages are reused by hash, and overwritten oldest first when no free page is left.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._hash_of: dict[int, PageHash] = {}
        self._page_of: dict[PageHash, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages, oldest first
        # How often pages became cached ones, or were taken: others are overwritten next.
        self.num_moves = 0
        # Pages that are copied, which nobody may overwrite, and how many of them are cached ones.
        self._saving: set[int] = set()
        self._busy = 0

    @property
    def available(self) -> int:
        """Pages that `allocate` could give now."""
        return len(self._free) + len(self._idle) - self._busy

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def knows(self, digest: PageHash) -> bool:
        """Whether a page with this content can be read."""
        return digest in self._page_of

    def known(self) -> list[PageHash]:
        """The hashes of all pages that can be read."""
        return list(self._page_of)

    def match(self, hashes: Iterable[PageHash]) -> list[int]:
        """Hold the longest known prefix of `hashes`; its pages, in order."""
        pages: list[int] = []
        for digest in hashes:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        self.hold(pages)
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Hold cached or held pages once more."""
        for page in pages:
            self._references[page] += 1
            if page in self._idle:
                del self._idle[page]
                self._busy -= page in self._saving

    def page_of(self, digest: PageHash) -> int | None:
        return self._page_of.get(digest)

    def is_idle(self, page: int) -> bool:
        """Whether a page is cached: it is overwritten when no page is free."""
        return page in self._idle

    def save(self, pages: Iterable[int]) -> None:
        """Begin to copy cached pages: nobody overwrites them until `saved`."""
        for page in pages:
            self._saving.add(page)
            self._busy += 1

    def saved(self, pages: Iterable[int]) -> None:
        """The copies of these pages are over."""
        for page in pages:
            self._saving.remove(page)
            if page in self._idle:
                self._busy -= 1
            elif not self._references[page]:  # it was forgotten meanwhile
                self._free.append(page)

    def at_risk(self, count: int) -> Iterator[tuple[int, PageHash]]:
        """The cached pages that the next `count` allocations overwrite, with their content; without
        those that are copied already, perhaps with content that they had before."""
        for page in islice(self._idle, max(0, count - len(self._free))):
            if page not in self._saving:
                yield page, self._hash_of[page]

    def allocate(self, count: int) -> list[int] | None:
        """Hold `count` pages of no defined content, or None if there are not so many."""
        if count > self.available:
            return None
        pages = [self._free.pop() for _ in range(min(count, len(self._free)))]
        pages += self._evict(count - len(pages))
        self.num_moves += count > 0
        for page in pages:
            self._references[page] = 1
        return pages

    def publish(self, page: int, digest: PageHash) -> None:
        """A held page is computed as far as its hash says. Content that is known already keeps its
        page."""
        if digest not in self._page_of and page not in self._hash_of:
            self._page_of[digest] = page
            self._hash_of[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Give up one reference each. A prefix's last pages become the first to be overwritten."""
        for page in reversed(pages):
            if self._references[page] < 1:
                raise ValueError(f"page {page} is not held")
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._hash_of:
                self._idle[page] = None
                self.num_moves += 1
                self._busy += page in self._saving
            elif page not in self._saving:
                self._free.append(page)

    def forget(self, pages: Iterable[int]) -> None:
        """Forget what these held pages contain: no further sequence may read it."""
        for page in pages:
            digest = self._hash_of.pop(page, None)
            if digest is not None:
                del self._page_of[digest]

    def _evict(self, count: int) -> list[int]:
        """Forget the oldest cached pages that may be overwritten."""
        pages = list(islice((page for page in self._idle if page not in self._saving), count))
        for page in pages:
            del self._idle[page]
            del self._page_of[self._hash_of.pop(page)]
        return pages


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
