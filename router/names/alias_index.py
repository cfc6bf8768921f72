"""Answers about all registered names together, kept up to date as they change. Pure.

A million names are too many to look at one by one: every question here costs what its answer is.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Literal

from loraplex.router.names.registration import Registration
from loraplex.router.policy.rollout import HeldContent

# A few changes are put in place one by one; more are sorted together.
_FEW = 64
_MIXED = "::"  # between tenant and name, see OwnedName

Mark = Literal["pinned", "rollout", "unloading", "file", "folder", "broken option"]


class SortedKeys:
    """Keys in order. Changes are put in place when somebody looks."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._fresh: dict[str, None] = {}
        self._gone: set[str] = set()
        self._text: str | None = None

    def add(self, key: str) -> None:
        if key in self._gone:
            self._gone.discard(key)
        else:
            self._fresh[key] = None
            self._text = None

    def remove(self, key: str) -> None:
        if key in self._fresh:
            del self._fresh[key]
        else:
            self._gone.add(key)
            self._text = None

    def settle(self) -> None:
        """Sorts after many changes, so that nobody who looks waits for that."""
        if len(self._fresh) + len(self._gone) > _FEW:
            self.keys()

    def keys(self) -> list[str]:
        """All keys, not to be changed by the caller."""
        if len(self._fresh) + len(self._gone) > _FEW:
            self._keys = sorted(chain((k for k in self._keys if k not in self._gone), self._fresh))
        else:
            for key in self._gone:
                del self._keys[bisect_left(self._keys, key)]
            for key in self._fresh:
                insort(self._keys, key)
        self._fresh, self._gone = {}, set()
        return self._keys

    def after(self, key: str, below: str = "") -> Iterator[str]:
        """Keys behind one, which need not be there. below: how they all begin."""
        keys = self.keys()
        start = max(bisect_right(keys, key) if key else 0, bisect_left(keys, below))
        for place in range(start, len(keys)):
            if not keys[place].startswith(below):
                return
            yield keys[place]

    def found(self, words: str, key: str) -> Iterator[str]:
        """Keys behind one that contain these words. No key has a line's end."""
        keys = self.keys()
        if self._text is None:
            self._text = "\n".join(("", *keys, ""))
        place = bisect_right(keys, key) if key else 0
        if place >= len(keys):
            return
        start = self._text.index(f"\n{keys[place]}\n") if place else 0
        while (hit := self._text.find(words, start)) >= 0:
            end = self._text.index("\n", hit)
            yield self._text[self._text.rindex("\n", 0, hit) + 1 : end]
            start = end


class AliasIndex:
    """Facts about all registrations that are not deleted. Keys are names as `OwnedName` spells
    them. in_service: names that are served. changes: how often something changed.
    """

    def __init__(self) -> None:
        self.in_service = 0
        self.changes = 0
        self._size = 0
        self._marked: dict[Mark, dict[str, None]] = {}
        self._fleet, self._owned = SortedKeys(), SortedKeys()
        # A content's hash -> the key of the name that means it, or several.
        self._meant: dict[int, str | tuple[str, ...]] = {}
        self._uploads: Counter[bytes] = Counter()
        self._kept_bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._size

    def add(self, key: str, one: Registration | None) -> None:
        """Adds a registration's facts."""
        if one is None or one.state == "deleted":
            return
        self._count(one, 1)
        (self._owned if one.tenant else self._fleet).add(key)
        for mark in _marks(one):
            self._marked.setdefault(mark, {})[key] = None
        for held in one.held:
            there = self._meant.get(hash(held))
            keys = () if there is None else (there,) if isinstance(there, str) else there
            self._meant[hash(held)] = (*keys, key) if keys else key

    def remove(self, key: str, one: Registration | None) -> None:
        """Takes away what `add` added for the same registration."""
        if one is None or one.state == "deleted":
            return
        self._count(one, -1)
        (self._owned if one.tenant else self._fleet).remove(key)
        for mark in _marks(one):
            self._marked[mark].pop(key, None)
        for held in one.held:
            there = self._meant.pop(hash(held), ())
            left = () if isinstance(there, str) else tuple(other for other in there if other != key)
            if left:
                self._meant[hash(held)] = left if len(left) > 1 else left[0]

    def _count(self, one: Registration, sign: int) -> None:
        self.changes += 1
        self._size += sign
        self.in_service += sign * (one.in_service and not one.is_broken)
        if kept := one.kept_bytes:
            self._kept_bytes[one.tenant] += sign * kept
        for digest in one.uploads:
            self._uploads[bytes.fromhex(digest)] += sign

    def settle(self) -> None:
        """Is called after many changes, see `SortedKeys`."""
        self._fleet.settle()
        self._owned.settle()

    def marked(self, mark: Mark) -> list[str]:
        """Keys of registrations with a mark."""
        return list(self._marked.get(mark, ()))

    def meaning(self, held: HeldContent) -> tuple[str, ...]:
        """Keys of names that mean a content, now or soon."""
        there = self._meant.get(hash(held), ())
        return (there,) if isinstance(there, str) else there

    def uploads(self) -> set[str]:
        """Digests of uploads that names need."""
        return {digest.hex() for digest, count in self._uploads.items() if count}

    def kept_bytes(self, tenant: str) -> int:
        """Bytes of the versions that a tenant keeps."""
        return self._kept_bytes[tenant]

    def keys(self, tenant: str | None, search: str = "", after: str = "") -> Iterator[str]:
        """Keys in order, the fleet's first. tenant: whose; None = everybody's. search: a part of
        the name. after: the key behind which to begin.
        """
        below = f"{tenant}{_MIXED}" if tenant else ""
        begun = _MIXED in after  # in the second part already
        parts: list[Iterator[str]] = []
        if not tenant and not begun:
            parts.append(_of(self._fleet, search, after, ""))
        if tenant != "":
            parts.append(_of(self._owned, search, after if begun else "", below))
        return chain.from_iterable(parts)


def _of(keys: SortedKeys, search: str, after: str, below: str) -> Iterator[str]:
    if not search:
        return keys.after(after, below)
    if below:
        return (key for key in keys.after(after, below) if search in _name(key))
    return (key for key in keys.found(search, after) if search in _name(key))


def _name(key: str) -> str:
    return key.rpartition(_MIXED)[2]


def _marks(one: Registration) -> Iterator[Mark]:
    if one.pinned:
        yield "pinned"
    if one.rollout is not None:
        yield "rollout"
    if one.state == "unloading":
        yield "unloading"
    if one.origin in ("file", "folder"):
        yield one.origin
    if one.is_broken and one.origin == "option":
        yield "broken option"
