"""A registered adapter's life: what it means now and meant before, what may be done next. Pure.

A name is only what somebody wrote: what is served is the content behind it, by its digest.
"""

from typing import Literal

import msgspec

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import AdapterRef, format_ref
from loraplex.router.call import Secret
from loraplex.router.names.owned_name import OwnedName
from loraplex.router.policy.rollout import Content, Declared, Guards, Rollout

MAX_HISTORY = 32
MAX_NOTE = 300

Origin = Literal["option", "api", "file"]
AliasState = Literal[
    "registered",  # resolved when a request names it, and again every now and then
    "ready",  # admitted: it means one content until it is refreshed or replaced
    "unloading",  # no new requests; running ones finish
    "unloaded",  # out of service and out of the workers' memory, until it is loaded
    "deleted",  # kept so that requests get 410
]
Action = Literal["register", "refresh", "rollout", "promote", "rollback"]
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


class Change(msgspec.Struct, frozen=True):
    """A change of a name's meaning, and who wanted it.

    digest, ref: the content that the name means, and where the content lay, with its commit if it
    has one. since: Unix seconds. before: the digest before. note: what else there is to say.
    """

    digest: str
    since: int
    action: Action = "register"
    by: str = ""
    ref: str = ""
    before: str | None = None
    note: str = ""


class Registration(msgspec.Struct, frozen=True):
    """A registered name, with all that is known of its adapter. token: opens the reference at its
    source; it never leaves this process but to a worker.

    content: set once known; it is served as it is while `ready`. history: oldest first, the last is
    the present one. error: what went wrong last. rollout: other versions beside `content`. tenant:
    whose name it is; "" = the fleet's. drainer: the router that sees an unload through.
    tool_format: in which it writes calls; "" = by its chat template, or the base's.
    """

    name: str
    ref: AdapterRef
    origin: Origin
    pinned: bool = False
    token: Secret | None = None
    state: AliasState = "registered"
    content: Content | None = None
    history: tuple[Change, ...] = ()
    error: str | None = None
    rollout: Rollout | None = None
    tenant: str = ""
    drainer: str = ""
    tool_format: str = ""

    @property
    def key(self) -> OwnedName:
        return OwnedName(self.name, self.tenant)

    @property
    def digest(self) -> str | None:
        return None if self.content is None else self.content.manifest.digest

    @property
    def is_broken(self) -> bool:
        """Whether a declared adapter cannot be had now, or was judged."""
        return self.state == "registered" and self.content is None and self.error is not None

    @property
    def shown_state(self) -> str:
        return "broken" if self.is_broken else self.state

    @property
    def in_service(self) -> bool:
        return self.state in _IN_SERVICE

    @property
    def digests(self) -> frozenset[str]:
        """All that requests may get by this name, now or soon."""
        own = () if self.content is None else (self.content.digest,)
        versions = () if self.rollout is None else self.rollout.versions
        return frozenset((*own, *(v.digest for v in versions if v.live or v.weight)))

    @property
    def pinned_contents(self) -> tuple[Content, ...]:
        """Contents that the registration keeps on the device."""
        if not self.pinned or self.state != "ready" or self.content is None:
            return ()
        versions = () if self.rollout is None else self.rollout.versions
        return (self.content, *(v.content for v in versions if v.live or v.weight))

    def chosen(self, sticky: str) -> Content | None:
        """The content for one caller."""
        version = None if self.rollout is None else self.rollout.choose(sticky)
        return self.content if version is None else version.content


def check_served(registration: Registration) -> None:
    """Checks that a name is served. Raises AdapterError unless requests may name it."""
    name, state = registration.name, registration.state
    if registration.ref.source == "alias":  # its entry in the adapters file cannot be understood
        raise AdapterError("invalid", f"adapter {name!r} cannot be served: {registration.error}")
    if state == "deleted":
        raise AdapterError("gone", f"adapter {name!r} has been deleted")
    if not registration.in_service:
        raise AdapterError("conflict", f"adapter {name!r} is {state}: it is not served now")


def move(registration: Registration, event: Event) -> Registration:
    """The state that follows an event. Raises AdapterError (conflict, gone) for what
    cannot be now.
    """
    state = _NEXT[event].get(registration.state)
    if state is None:
        if registration.state == "deleted":
            check_served(registration)
        hint = _HINTS.get(registration.state, "that cannot be done now")
        raise AdapterError(
            "conflict", f"adapter '{registration.key}' is {registration.state}: {hint}"
        )
    drainer = registration.drainer if state == "unloading" else ""
    return msgspec.structs.replace(registration, state=state, drainer=drainer)


def seen(
    registration: Registration,
    content: Content,
    now: float,
    action: Action = "register",
    by: str = "",
) -> Registration:
    """The registration once its name means this content; its state stays. now: Unix seconds."""
    known = registration.history
    after = msgspec.structs.replace(registration, content=content, error=None)
    is_new = not known or known[-1].digest != content.digest
    return noted(after, now, action, by) if is_new else after


def noted(
    registration: Registration, now: float, action: Action, by: str, note: str = ""
) -> Registration:
    """The registration with a line more in its history; the oldest goes when there are too many."""
    content, known = registration.content, registration.history
    assert content is not None
    before = known[-1].digest if known else None
    ref = format_ref(content.ref)
    change = Change(content.digest, int(now), action, by, ref, before, note[:MAX_NOTE])
    return msgspec.structs.replace(registration, history=(*known, change)[-MAX_HISTORY:])


def conflicts(existing: Registration, ref: AdapterRef, replace: bool) -> None:
    """Checks that a name may get this reference. Raises AdapterError when a name is to mean another
    reference, and nobody said so.
    """
    if existing.state == "deleted" or existing.ref == ref or replace:
        return
    raise AdapterError(
        "conflict",
        f"adapter '{existing.key}' is registered with another reference: "
        "send `replace`: true (vLLM's route: `load_inplace`) to replace it, or delete it first",
    )


class RegistrationRequest(msgspec.Struct, frozen=True):
    """A wish that a name mean a reference. replace: also if the name means something else now.

    pin: None = as the name is. token: None = the one that opens this reference already, if any. by:
    who wants it, for the history. once: not if the name is served already, whatever it means. load:
    to the device of every worker first. tool_format: None = as the name has it; "" = none.
    """

    name: OwnedName
    ref: AdapterRef
    origin: Origin
    pin: bool | None = None
    token: Secret | None = None
    replace: bool = False
    by: str = ""
    once: bool = False
    load: bool = False
    tool_format: str | None = None


class RolloutRequest(msgspec.Struct, frozen=True):
    """Versions of a name and their weights, also its present one's if it is named.

    guards: None = no version goes back by itself; unset = as they are, or the usual ones.
    declared: what the adapters file says, if the request is the file's.
    """

    versions: tuple[tuple[AdapterRef, int], ...]
    guards: Guards | None | msgspec.UnsetType = msgspec.UNSET
    by: str = ""
    declared: Declared | None = None
