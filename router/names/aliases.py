"""The table of registered names: this router's declarations, and the changes that routers share.

A declaration (`--adapter`, the adapters file, a watched folder) is each router's own and says what
a name means. The shared table adds what was done to the name since. Other names are the table's
alone. A name is the fleet's or one tenant's, and a tenant's own comes before the fleet's.
"""

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import AdapterRef
from loraplex.router.call import Secret
from loraplex.router.names.owned_name import OwnedName
from loraplex.router.names.registration import Registration, of_bases, of_this_form
from loraplex.router.policy.rollout import HeldContent
from loraplex.router.shared.replica import Conflict, Replica
from loraplex.router.shared.store import MAX_ROWS, Store, StoreDown, TableFull

logger = logging.getLogger(__name__)

TABLE = "adapters"
MAX_DELETED = 4096
_RETRY_S = 2.0
_decode = msgspec.json.Decoder(Registration).decode


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
        self._bases = tuple(bases)
        self._listener = listener
        self.is_shared = is_shared
        self.claimed: frozenset[OwnedName] = frozenset()
        self.expected: set[OwnedName] = set()
        self._rows = Replica(store, TABLE, self._read, self._changed, _is_deleted)
        self._declared = {registration.key: registration for registration in declared}
        self._dropped: OrderedDict[OwnedName, Registration] = OrderedDict()
        self._tokens: dict[OwnedName, tuple[AdapterRef, Secret]] = {}
        # What this router alone knows of a row, as long as the row is the same.
        self._noted: dict[OwnedName, tuple[Registration, Registration]] = {}
        self._all: list[Registration] | None = None

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

        Returns what `get` does.
        """
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

    def usable_by(self, tenant: str) -> list[Registration]:
        """Registrations in service that mean something to a caller of this tenant, by name."""
        names = dict.fromkeys(one.name for one in self.all() if one.tenant in ("", tenant))
        found = (self.find(tenant, name) for name in names)
        return [one for one in found if one is not None and one.in_service]

    def get(self, name: OwnedName) -> Registration | None:
        """The registration of a name, also one that has been deleted."""
        declared, row = self._declared.get(name), self._row(name)
        if row is None or not _counts(row, declared):
            return declared or self._dropped.get(name)
        noted = self._noted.get(name)
        found = noted[1] if noted is not None and noted[0] is row else row
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

    def all(self) -> list[Registration]:
        """All registrations by name, without the deleted."""
        if self._all is None:
            names = sorted(self._declared.keys() | {row.key for row in self._rows.values.values()})
            found = (self.get(name) for name in names)
            self._all = [one for one in found if one is not None and one.state != "deleted"]
        return self._all

    def pinned(self) -> list[Registration]:
        """Registrations that stay on the device."""
        held = (*self._declared.values(), *self._rows.values.values())
        names = {registration.key for registration in held if registration.pinned}
        found = (self.get(name) for name in sorted(names))
        return [one for one in found if one is not None and one.pinned]

    def pins(self) -> set[HeldContent]:
        """Contents that stay on the device."""
        return {content.held for one in self.pinned() for content in one.pinned_contents}

    def uploads(self) -> set[str]:
        """Digests of the uploads that names need. Raises AdapterError while names are not known."""
        if not self.is_known:
            message = "registered adapters are not known yet: no Redis; try again soon"
            raise AdapterError("unavailable", message, (), _RETRY_S)
        return {digest for registration in self.all() for digest in registration.uploads}

    def note(self, before: Registration, registration: Registration) -> None:
        """Keep a fact that this router found out by itself; other routers do not learn of it.

        before: as `get` gave it.
        """
        name, row = registration.key, self._row(registration.key)
        if self.get(name) != before:
            return  # it is about what is no more
        declared = self._declared.get(name)
        if row is not None and _counts(row, declared):
            self._noted[name] = (row, registration)
        elif declared is not None:
            self._declared[name] = registration
        self._changed()

    def declare(self, registration: Registration) -> None:
        """Adds a registration that a file or folder declares. Raises AdapterError when there are
        too many.
        """
        name = registration.key
        if name not in self._declared and len(self._declared) >= MAX_ROWS:
            raise _too_many()
        self._dropped.pop(name, None)
        self._declared[name] = registration
        self._changed()

    async def drop(self, registration: Registration) -> None:
        """Removes a registration that is declared no more. registration: as it is remembered,
        deleted.
        """
        name = registration.key
        self._declared.pop(name, None)
        self._dropped[name] = registration
        if len(self._dropped) > MAX_DELETED:
            self._dropped.popitem(last=False)
        self._changed()
        row = self._row(name)
        if row is not None and row.origin != "api":  # counts for nobody who declares it no more
            with contextlib.suppress(StoreDown, TableFull, Conflict):
                await self._rows.write(str(name), None)

    async def write(self, registration: Registration) -> None:
        """Stores a registration. Raises AdapterError (unavailable, conflict) and then has changed
        nothing.
        """
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
        row = self._rows.values.get(str(name))
        return row if row is not None and row.key == name else None

    def _read(self, value: bytes) -> Registration | None:
        try:
            row = _decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError):
            logger.error("the store has an adapter that cannot be read")
            return None
        row = of_bases(of_this_form(row), self._bases)
        ref, token = self._tokens.get(row.key, (None, None))
        return msgspec.structs.replace(row, token=token) if ref == row.ref else row

    def _changed(self) -> None:
        self._all = None
        self._noted = {
            name: noted for name, noted in self._noted.items() if self._row(name) is noted[0]
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
    return AdapterError("conflict", f"adapter '{name}' has just been changed by somebody else")
