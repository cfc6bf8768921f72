"""A registered adapter's life: what it means now and meant before, what may be done next. Pure.

A name is only what somebody wrote: what is served is the content behind it, by its digest.
"""

from typing import Literal

import msgspec

from adapters.errors import AdapterError
from adapters.manifest import AdapterManifest
from adapters.ref import AdapterRef
from router.generation import Secret

MAX_HISTORY = 32

Origin = Literal["option", "api", "file"]
AliasState = Literal[
    "registered",  # resolved when a request names it, and again every now and then
    "ready",  # admitted: it means one content until it is refreshed or replaced
    "unloading",  # no new requests; running ones finish
    "unloaded",  # out of service and out of the workers' memory, until it is loaded
    "deleted",  # kept so that requests are told
]
Event = Literal["admit", "refresh", "pin", "unload", "drained", "delete"]

_IN_SERVICE: tuple[AliasState, ...] = ("registered", "ready")
_NEXT: dict[Event, dict[AliasState, AliasState]] = {
    "admit": {"registered": "ready", "ready": "ready", "unloaded": "ready"},
    "refresh": {"registered": "ready", "ready": "ready"},
    "pin": {"registered": "ready", "ready": "ready", "unloaded": "ready"},
    "unload": {
        "registered": "unloading",
        "ready": "unloading",
        "unloading": "unloading",
        "unloaded": "unloaded",
    },
    "drained": {"unloading": "unloaded"},
    "delete": {
        "registered": "deleted",
        "ready": "deleted",
        "unloading": "deleted",
        "unloaded": "deleted",
    },
}
_HINTS: dict[AliasState, str] = {
    "unloading": "wait until it is unloaded",
    "unloaded": "load it first",
}


class Content(msgspec.Struct, frozen=True):
    """What a reference turned out to be. ref: with its commit, for sources that have one."""

    ref: AdapterRef
    manifest: AdapterManifest


class DigestRecord(msgspec.Struct, frozen=True):
    """since: Unix seconds."""

    digest: str
    since: int


class Registration(msgspec.Struct, frozen=True):
    """token: opens the reference at its source; it never leaves this process but to a worker.

    content: set once known; it is served as it is while `ready`. history: oldest first, the last
    is the present one. error: what went wrong last.
    """

    name: str
    ref: AdapterRef
    origin: Origin
    pinned: bool = False
    token: Secret | None = None
    state: AliasState = "registered"
    content: Content | None = None
    history: tuple[DigestRecord, ...] = ()
    error: str | None = None

    @property
    def digest(self) -> str | None:
        return None if self.content is None else self.content.manifest.digest

    @property
    def in_service(self) -> bool:
        return self.state in _IN_SERVICE

    @property
    def pin(self) -> str | None:
        """The digest that it keeps on the device."""
        return self.digest if self.pinned and self.state == "ready" else None


def check_served(registration: Registration) -> None:
    """Raises AdapterError unless requests may name it."""
    name, state = registration.name, registration.state
    if state == "deleted":
        raise AdapterError("gone", f"adapter {name!r} has been deleted")
    if not registration.in_service:
        raise AdapterError("conflict", f"adapter {name!r} is {state}: it is not served now")


def move(registration: Registration, event: Event) -> Registration:
    """Its next state. Raises AdapterError (conflict, gone) for what cannot be now."""
    state = _NEXT[event].get(registration.state)
    if state is None:
        if registration.state == "deleted":
            check_served(registration)
        hint = _HINTS.get(registration.state, "that cannot be done now")
        raise AdapterError(
            "conflict", f"adapter {registration.name!r} is {registration.state}: {hint}"
        )
    return msgspec.structs.replace(registration, state=state)


def seen(registration: Registration, content: Content, now: float) -> Registration:
    """It means this content now; its state stays. now: Unix seconds."""
    history = registration.history
    if not history or history[-1].digest != content.manifest.digest:
        history = (*history, DigestRecord(content.manifest.digest, int(now)))[-MAX_HISTORY:]
    return msgspec.structs.replace(registration, content=content, history=history, error=None)


def conflicts(existing: Registration, ref: AdapterRef, replace: bool) -> None:
    """Raises AdapterError when a name is to mean another reference, and nobody said so."""
    if existing.state == "deleted" or existing.ref == ref or replace:
        return
    raise AdapterError(
        "conflict",
        f"adapter {existing.name!r} is registered with another reference: "
        "send `replace`: true to replace it, or delete it first",
    )
