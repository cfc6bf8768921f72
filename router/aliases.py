"""Where registrations are kept. In memory here; the protocol is what another store would offer."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from adapters.errors import AdapterError
from router.registration import Registration

MAX_REGISTRATIONS = 1 << 14
MAX_DELETED = 4096


class AliasStore(Protocol):
    """By name. Reads are on every request's way: they do not wait."""

    def get(self, name: str) -> Registration | None:
        """Also one that has been deleted."""
        ...

    def put(self, registration: Registration) -> None:
        """Raises AdapterError when there are too many."""
        ...

    def all(self) -> list[Registration]:
        """By name, without the deleted."""
        ...


class MemoryAliases:
    """An AliasStore that lasts as long as the process."""

    def __init__(self, registrations: Iterable[Registration] = ()) -> None:
        self._live: dict[str, Registration] = {}
        self._deleted: OrderedDict[str, Registration] = OrderedDict()
        for registration in registrations:
            self.put(registration)

    def get(self, name: str) -> Registration | None:
        return self._live.get(name) or self._deleted.get(name)

    def put(self, registration: Registration) -> None:
        name = registration.name
        if registration.state == "deleted":
            self._live.pop(name, None)
            self._deleted[name] = registration
            if len(self._deleted) > MAX_DELETED:
                self._deleted.popitem(last=False)
            return
        if name not in self._live and len(self._live) >= MAX_REGISTRATIONS:
            raise AdapterError(
                "unavailable", f"at most {MAX_REGISTRATIONS} adapters can be registered"
            )
        self._deleted.pop(name, None)
        self._live[name] = registration

    def all(self) -> list[Registration]:
        return [self._live[name] for name in sorted(self._live)]


def names_in_service(aliases: AliasStore) -> list[str]:
    return [registration.name for registration in aliases.all() if registration.in_service]
