"""A registered adapter's life: what it means now and meant before, what may be done next. Pure.

A name is only what somebody wrote: what is served is the content behind it, by its digest.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from loraplex.adapters.errors import AdapterError, AdapterErrorCode
from loraplex.adapters.manifest import DIGEST_FORM
from loraplex.adapters.ref import AdapterRef, format_ref
from loraplex.router.call import Secret
from loraplex.router.names.served import OwnedName
from loraplex.router.policy.rollout import Content, Declared, Guards, HeldContent, Rollout

MAX_HISTORY = 32
MAX_KEPT = 32
MAX_NOTE = 300

Origin = Literal["option", "api", "file", "folder"]
# Where registrations of an origin come from, for people.
DECLARED_BY: dict[Origin, str] = {
    "option": "--adapter",
    "api": "the API",
    "file": "the adapters file",
    "folder": "--watch-folder",
}
AliasState = Literal[
    "registered",  # resolved when a request names it, and again every now and then
    "ready",  # admitted: it means one content until it is refreshed or replaced
    "unloading",  # no new requests; running ones finish
    "unloaded",  # out of service and out of the workers' memory, until it is loaded
    "deleted",  # kept so that requests get 410
]
Action = Literal["register", "refresh", "rollout", "promote", "rollback", "upload"]
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


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
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


class UploadedVersion(msgspec.Struct, frozen=True):
    """A version of a name that was uploaded. number: counts from 1, and is never used again."""

    number: int
    content: Content


class Registration(msgspec.Struct, frozen=True, omit_defaults=True):
    """A registered name, with all that is known of its adapter. token: opens the reference at its
    source; it never leaves this process but to a worker.

    content: set once known; it is served as it is while `ready`. history: oldest first, the last is
    the present one. error: what went wrong last. rollout: other versions beside `content`. tenant:
    whose name it is; "" = the fleet's. drainer: the router that sees an unload through.
    tool_format: in which it writes calls; "" = by its chat template, or the base's. kept: uploaded
    versions that `name@17` may name, the newest last. keep: how many. last_version: its number.
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
    kept: tuple[UploadedVersion, ...] = ()
    keep: int = 1
    last_version: int = 0

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
    def held(self) -> frozenset[HeldContent]:
        """All that requests may get by this name, now or soon."""
        kept = (version.content.held for version in self.kept)
        return frozenset((*kept, *(content.held for content in self._present)))

    @property
    def base(self) -> str | None:
        """The name of its adapter's base; None = not known yet."""
        return None if self.content is None else self.content.base

    @property
    def kept_bytes(self) -> int:
        """Bytes of its uploaded versions."""
        return sum(version.content.manifest.nbytes for version in self.kept)

    @property
    def uploads(self) -> frozenset[str]:
        """Digests of the uploads whose files may still be wanted."""
        kept = (version.content.ref for version in self.kept)
        refs = (self.ref, *kept, *(content.ref for content in self._present))
        return frozenset(ref.name for ref in refs if ref.source == "upload")

    @property
    def pinned_contents(self) -> tuple[Content, ...]:
        """Contents that the registration keeps on the device."""
        is_kept = self.pinned and self.state == "ready" and self.content is not None
        return self._present if is_kept else ()

    @property
    def _present(self) -> tuple[Content, ...]:
        """Contents that the name itself means: its own, and those of its rollout."""
        own = () if self.content is None else (self.content,)
        versions = () if self.rollout is None else self.rollout.versions
        return (*own, *(v.content for v in versions if v.live or v.weight))

    def version(self, number: int) -> Content:
        """The content of an uploaded version. Raises AdapterError unless it is kept."""
        for version in self.kept:
            if version.number == number:
                return version.content
        code: AdapterErrorCode = "gone" if number <= self.last_version else "not_found"
        kept = ", ".join(str(version.number) for version in self.kept) or "none"
        raise AdapterError(code, f"no version {number} of adapter '{self.name}'; kept: {kept}")

    def chosen(self, sticky: str) -> Content | None:
        """The content for one caller."""
        version = None if self.rollout is None else self.rollout.choose(sticky)
        return self.content if version is None else version.content


def of_this_form(registration: Registration) -> Registration:
    """The registration without contents whose digests have another form. It is resolved anew."""
    contents = [registration.content, *(version.content for version in registration.kept)]
    if all(one is None or one.manifest.form == DIGEST_FORM for one in contents):
        return registration
    state: AliasState = "registered" if registration.state == "ready" else registration.state
    return msgspec.structs.replace(
        registration, content=None, kept=(), rollout=None, history=(), state=state
    )


def of_bases(registration: Registration, bases: Sequence[str]) -> Registration:
    """The registration as a router has it that serves these bases. bases: their names; "" of the
    only one. Contents of a base without a name are taken for the first one's, and contents of any
    base for the only one's; its workers judge them anew. Contents of a name that is none of several
    stay what they are.
    """
    first = bases[0]

    def of_known(content: Content) -> Content:
        return content if content.base and first else msgspec.structs.replace(content, base=first)

    content, kept, rollout = registration.content, registration.kept, registration.rollout
    if all(held.base in bases for held in registration.held):
        return registration
    if rollout is not None:
        versions = tuple(
            msgspec.structs.replace(v, content=of_known(v.content)) for v in rollout.versions
        )
        rollout = msgspec.structs.replace(rollout, versions=versions)
    return msgspec.structs.replace(
        registration,
        content=None if content is None else of_known(content),
        kept=tuple(msgspec.structs.replace(v, content=of_known(v.content)) for v in kept),
        rollout=rollout,
    )


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
    """The state after an event. Raises AdapterError (conflict, gone) for what cannot be now."""
    state = _NEXT[event].get(registration.state)
    if state is None:
        if registration.state == "deleted":
            check_served(registration)
        hint = _HINTS.get(registration.state, "that cannot be done now")
        raise AdapterError(
            "conflict", f"adapter '{registration.name}' is {registration.state}: {hint}"
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


def uploaded(
    registration: Registration, content: Content, keep: int | None, now: float, by: str
) -> Registration:
    """The registration once its name means an upload: a new version, unless the name means this
    content already. keep: how many versions stay; None = as many as before.
    """
    keep = registration.keep if keep is None else keep
    kept, number = registration.kept, registration.last_version
    if not kept or kept[-1].content.digest != content.digest:
        number += 1
        kept = (*kept, UploadedVersion(number, content))
    after = msgspec.structs.replace(
        registration, ref=content.ref, kept=kept[-keep:], keep=keep, last_version=number
    )
    return seen(after, content, now, "upload", by)


def renewed(existing: Registration | None, name: OwnedName, ref: AdapterRef) -> Registration:
    """The registration that an upload begins with: as the name is, or as it counted before."""
    if existing is None or existing.state == "deleted":
        last = 0 if existing is None else existing.last_version
        return Registration(name.name, ref, "api", tenant=name.tenant, last_version=last)
    return msgspec.structs.replace(existing, ref=ref, origin="api", token=None)


def check_kept_bytes(others: int, after: Registration, most: int) -> None:
    """Checks what a tenant keeps. others: bytes of its other names. Raises AdapterError."""
    nbytes = others + after.kept_bytes
    if nbytes > most:
        raise AdapterError(
            "too_large",
            f"the tenant would keep {nbytes} bytes of uploads, and may keep {most}: "
            "delete a name, or keep fewer versions",
        )


def check_uploadable(existing: Registration | None, replace: bool) -> None:
    """Checks that an upload may become what a name means. Raises AdapterError (conflict)."""
    if existing is None or existing.state == "deleted":
        return
    if existing.rollout is not None:
        message = f"adapter '{existing.name}' has a rollout: end it first"
        raise AdapterError("conflict", message)
    if existing.ref.source != "upload" and not replace:
        message = (
            f"adapter '{existing.name}' is registered with {format_ref(existing.ref)}: "
            "`?replace=true` lets the upload take its place"
        )
        raise AdapterError("conflict", message)
    move(existing, "admit")


def conflicts(existing: Registration, ref: AdapterRef, replace: bool) -> None:
    """Raises AdapterError where a name is to mean another reference, and nobody said so."""
    if existing.state == "deleted" or existing.ref == ref or replace:
        return
    raise AdapterError(
        "conflict",
        f"adapter '{existing.name}' is registered with another reference: "
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


class PublishRequest(msgspec.Struct, frozen=True):
    """A wish that a name mean an upload. digest: of the upload's files.

    keep: how many versions stay; None = as before. replace: also a name that was no upload.
    most_bytes: of the tenant's kept versions.
    """

    name: OwnedName
    digest: str
    keep: int | None
    replace: bool
    by: str
    most_bytes: int


class RolloutRequest(msgspec.Struct, frozen=True):
    """Versions of a name and their weights, also its present one's if it is named.

    guards: None = no version goes back by itself; unset = as they are, or the usual ones.
    declared: what the adapters file says, if the request is the file's.
    """

    versions: tuple[tuple[AdapterRef, int], ...]
    guards: Guards | None | msgspec.UnsetType = msgspec.UNSET
    by: str = ""
    declared: Declared | None = None
