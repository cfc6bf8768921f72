"""The table of registered names: this router's declarations, and the changes that routers share.

A declaration (`--adapter`, the adapters file, a watched folder) is each router's own and says what
a name means. The shared table adds what was done to the name since. Other names are the table's
alone. A name is the fleet's or one tenant's, and a tenant's own comes before the fleet's. A million
names are too many to look at one by one: every question to the index costs what its answer is.
"""

import contextlib
import logging
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Literal, Protocol

import msgspec

from loraplex.adapters.common.newest import NewestKept
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import AdapterRef
from loraplex.router.call import Secret
from loraplex.router.names.registration import Registration, of_bases, of_this_form
from loraplex.router.names.served import OwnedName
from loraplex.router.policy.rollout import HeldContent
from loraplex.router.shared.replica import Conflict, Replica
from loraplex.router.shared.store import MAX_ROWS, Row, Store, StoreDown, TableFull

# A few changes are put in place one by one; more are sorted together.
_FEW = 64
_MIXED = "::"  # between tenant and name, see OwnedName

Mark = Literal["pinned", "rollout", "unloading", "file", "folder", "broken option"]

logger = logging.getLogger(__name__)

TABLE = "adapters"
MAX_DELETED = 4096
MAX_LISTED = 10_000
# Rows that are kept decoded: those that requests name again and again.
MAX_DECODED = 4096
_RETRY_S = 2.0
_decode = msgspec.json.Decoder(Registration).decode


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


class AliasListener(Protocol):
    """Hears of changes."""

    def aliases_changed(self, aliases: "Aliases") -> None:
        """Handles a change: the meaning or the pin of a name may be another."""


class Aliases:
    """Keeps the registered names of adapters. Reads are of this router's own copy and do not wait;
    a write is in the store when it returns.

    is_shared: whether other routers read the table. Credentials of registrations never go there.
    claimed: what the adapters file names, had or not: nobody gets another adapter in its place.
    expected: those of them that are being fetched and judged. bases: names of the router's bases.
    """

    def __init__(
        self,
        store: Store,
        is_shared: bool,
        declared: Iterable[Registration] = (),
        listener: AliasListener | None = None,
        bases: Sequence[str] = ("",),
    ) -> None:
        self.bases = tuple(bases)
        self._listener = listener
        self.is_shared = is_shared
        self.claimed: frozenset[OwnedName] = frozenset()
        self.expected: set[OwnedName] = set()
        self._rows = Replica(
            store, TABLE, self._read, self._changed, _is_deleted, self, MAX_DECODED
        )
        self._index = AliasIndex()
        self._declared: dict[OwnedName, Registration] = {}
        self._dropped = NewestKept[OwnedName, Registration](MAX_DELETED)
        self._tokens: dict[OwnedName, tuple[AdapterRef, Secret]] = {}
        # What this router alone knows of a row, as long as the row is the same.
        self._noted: dict[OwnedName, tuple[Row, Registration]] = {}
        for registration in declared:
            self._declared[registration.key] = registration
            self._index.add(str(registration.key), registration)

    @property
    def is_known(self) -> bool:
        """Whether the table was read: until then names are missing that may be there."""
        return self._rows.is_loaded or not self.is_shared

    async def run(self) -> None:
        """Follows the store until cancelled."""
        await self._rows.run()

    async def refresh(self) -> None:
        """Reads what the store has. Raises StoreDown."""
        await self._rows.refresh()

    def find(self, tenant: str, name: str) -> Registration | None:
        """The registration that a caller means by a name: its tenant's own, else the fleet's.
        Returns what `get` does."""
        own = OwnedName(name, tenant)
        found = self.get(own)
        if (found is not None and found.state != "deleted") or own in self.claimed:
            return found
        return self.get(OwnedName(name)) or found

    def is_claimed(self, tenant: str, name: str) -> bool:
        """Whether the adapters file says what a caller of this tenant means by a name."""
        return OwnedName(name, tenant) in self.claimed or OwnedName(name) in self.claimed

    def is_expected(self, tenant: str, name: str) -> bool:
        """Whether what the adapters file means by a name may soon be known."""
        return OwnedName(name, tenant) in self.expected or OwnedName(name) in self.expected

    def names_for(self, tenant: str) -> list[str]:
        """Names that callers of a tenant may mean, in order: at most MAX_LISTED."""
        keys = [*self._index.keys(""), *(self._index.keys(tenant) if tenant else ())]
        return sorted({_owned(key).name for key in islice(keys, MAX_LISTED)})

    def get(self, name: OwnedName) -> Registration | None:
        """The registration of a name, also one that has been deleted."""
        declared, row = self._declared.get(name), self._row(name)
        if row is None or not _counts(row, declared):
            return declared or self._dropped.get(name)
        noted = self._noted.get(name)
        is_noted = noted is not None and noted[0] is self._rows.row(str(name))
        found = noted[1] if noted is not None and is_noted else row
        if declared is None or declared.origin != "file":
            return found
        said = declared.pinned, declared.tool_format
        if (found.pinned, found.tool_format) == said:
            return found
        return msgspec.structs.replace(found, pinned=said[0], tool_format=said[1])

    def declared(self, name: OwnedName) -> Registration | None:
        return self._declared.get(name)

    def was_pinned(self, name: OwnedName) -> bool:
        """Whether a watched folder's name is to stay on the device, whatever it meant before."""
        row = self._row(name)
        last = row if row is not None and row.origin == "folder" else self.get(name)
        return last is not None and last.pinned

    @property
    def count(self) -> int:
        """Registrations, without the deleted."""
        return len(self._index)

    @property
    def in_service(self) -> int:
        """Names that are served."""
        return self._index.in_service

    @property
    def changes(self) -> int:
        """A number that rises with each change."""
        return self._index.changes

    def all(self) -> list[Registration]:
        """All registrations by name, without the deleted. They may be very many: what is asked
        often is asked of the others.
        """
        return self._found(sorted(_owned(key) for key in self._index.keys(None)))

    def first(self, count: int) -> list[Registration]:
        """So many registrations by name, without the deleted; of very many, some."""
        return self._found(self.names(count))

    def names(self, count: int, tenant: str | None = None) -> list[OwnedName]:
        """So many names of registrations, in order; of very many, some. tenant: whose; None =
        everybody's.
        """
        return sorted(map(_owned, islice(self._index.keys(tenant), count)))

    def page(
        self, tenant: str | None, search: str, after: str, count: int
    ) -> tuple[list[Registration], str | None]:
        """So many registrations behind a key, in the order of keys, and the key of the last if
        there are more. tenant: whose; None = everybody's. search: a part of the name.
        """
        keys = list(islice(self._index.keys(tenant, search, after), count + 1))
        more = keys[count - 1] if len(keys) > count else None
        return self._found(map(_owned, keys[:count])), more

    def marked(self, mark: Mark) -> list[Registration]:
        """Registrations with a mark, by name."""
        return self._found(sorted(map(_owned, self._index.marked(mark))))

    def meaning(self, held: HeldContent) -> list[Registration]:
        """Registrations that mean a content, now or soon."""
        return self._found(map(_owned, self._index.meaning(held)))

    def kept_bytes(self, tenant: str) -> int:
        """Bytes of the versions that a tenant keeps."""
        return self._index.kept_bytes(tenant)

    def _found(self, names: Iterable[OwnedName]) -> list[Registration]:
        found = (self.get(name) for name in names)
        return [one for one in found if one is not None and one.state != "deleted"]

    def pinned(self) -> list[Registration]:
        """Registrations that stay on the device."""
        return self.marked("pinned")

    def pins(self) -> set[HeldContent]:
        """Contents that stay on the device."""
        return {content.held for one in self.pinned() for content in one.pinned_contents}

    def uploads(self) -> set[str]:
        """Digests of the uploads that names need. Raises AdapterError while names are not known."""
        if not self.is_known:
            message = "registered adapters are not known yet: no Redis; try again soon"
            raise AdapterError("unavailable", message, (), _RETRY_S)
        return self._index.uploads()

    def note(self, before: Registration, registration: Registration) -> None:
        """Keep a fact that this router found out by itself; other routers do not learn of it.
        before: as `get` gave it."""
        name, row = registration.key, self._row(registration.key)
        if self.get(name) != before:
            return  # it is about what is no more
        declared, stored = self._declared.get(name), self._rows.row(str(name))
        with self._changing(name):
            if row is not None and stored is not None and _counts(row, declared):
                self._noted[name] = (stored, registration)
            elif declared is not None:
                self._declared[name] = registration
        self._changed()

    @contextlib.contextmanager
    def _changing(self, name: OwnedName) -> Iterator[None]:
        """Keeps the index as a name's meaning changes."""
        self.row_changes(str(name))
        yield
        self.row_changed(str(name))

    def row_changes(self, key: str) -> None:
        self._index.remove(key, self.get(_owned(key)))

    def row_changed(self, key: str) -> None:
        self._index.add(key, self.get(_owned(key)))

    def declare(self, registration: Registration) -> None:
        """Adds a declared registration. Raises AdapterError when there are too many."""
        name = registration.key
        if name not in self._declared and len(self._declared) >= MAX_ROWS:
            raise _too_many()
        with self._changing(name):
            self._dropped.pop(name, None)
            self._declared[name] = registration
        self._changed()

    async def drop(self, registration: Registration) -> None:
        """Removes what is declared no more. registration: as remembered, deleted."""
        name = registration.key
        with self._changing(name):
            self._declared.pop(name, None)
            self._dropped[name] = registration
        self._changed()
        row = self._row(name)
        if row is not None and row.origin != "api":  # counts for nobody who declares it no more
            with contextlib.suppress(StoreDown, TableFull, Conflict):
                await self._rows.write(str(name), None)

    async def write(self, registration: Registration) -> None:
        """Stores a registration. Raises AdapterError (unavailable, conflict), nothing changed."""
        name, token = registration.key, registration.token
        if token is not None and self.is_shared:
            raise AdapterError(
                "conflict",
                "a registration's own token is kept by one router and cannot be shared through "
                "Redis: give the routers HF_TOKEN, which opens registered adapters",
            )
        before = self._tokens.pop(name, None)
        if token is not None:
            self._tokens[name] = (registration.ref, token)
        row = msgspec.structs.replace(registration, token=None)
        try:
            await self._rows.write(str(name), msgspec.json.encode(row))
        except (StoreDown, TableFull, Conflict) as error:
            self._tokens.pop(name, None)
            if before is not None:
                self._tokens[name] = before
            raise _refusal(name, error) from error

    def _row(self, name: OwnedName) -> Registration | None:
        """The row of a name. Whatever the name holds, it is a row of its own owner."""
        row = self._rows.get(str(name))
        return row if row is not None and row.key == name else None

    def _read(self, value: bytes) -> Registration | None:
        try:
            row = _decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError):
            logger.error("the store has an adapter that cannot be read")
            return None
        row = of_bases(of_this_form(row), self.bases)
        ref, token = self._tokens.get(row.key, (None, None))
        return msgspec.structs.replace(row, token=token) if ref == row.ref else row

    def _changed(self) -> None:
        self._index.settle()
        self._noted = {
            name: noted
            for name, noted in self._noted.items()
            if self._rows.row(str(name)) is noted[0]
        }
        if self._listener is not None:
            self._listener.aliases_changed(self)


def _counts(row: Registration, declared: Registration | None) -> bool:
    """Whether a change to a declared name still counts: the declaration must mean the same."""
    if declared is None:
        return row.origin == "api"
    is_same = row.origin == declared.origin and row.ref == declared.ref
    if declared.origin == "folder":  # its declaration says which content of the folder it means
        is_same &= row.digest == declared.digest
    return is_same and row.state != "deleted"


def _owned(key: str) -> OwnedName:
    """The name that `OwnedName` spells so."""
    tenant, _, name = key.rpartition("::")
    return OwnedName(name, tenant)


def _is_deleted(registration: Registration) -> bool:
    return registration.state == "deleted"


def _too_many() -> AdapterError:
    return AdapterError("unavailable", f"at most {MAX_ROWS} adapters can be registered")


def _refusal(name: OwnedName, error: Exception) -> AdapterError:
    if isinstance(error, StoreDown):
        message = "adapters cannot be changed now: no Redis; what is registered goes on"
        return AdapterError("unavailable", message, (), _RETRY_S)
    if isinstance(error, TableFull):
        return _too_many()
    return AdapterError("conflict", f"adapter '{name.name}' has just been changed by somebody else")
