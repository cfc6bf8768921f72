"""The moves of a rollout: shares set, warmed, taken away, promoted, rolled back. Pure.

now: Unix seconds. `by`: who wants it.
"""

import math
from collections.abc import Collection, Sequence

import msgspec

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import AdapterRef, format_ref
from loraplex.router.names.registration import Change, Registration, noted
from loraplex.router.policy.rollout import MAX_WEIGHT, Content, Declared, Guards, Rollout, Version

_ALL = MAX_WEIGHT


class Shares(msgspec.Struct, frozen=True):
    """Shares that an operator wants. weight: of the old version. versions: without what is in
    force.
    """

    versions: tuple[Version, ...]
    weight: int
    guards: Guards | None
    declared: Declared | None = None


def split(
    own: Collection[AdapterRef], versions: Sequence[tuple[AdapterRef, int]]
) -> tuple[int, list[tuple[AdapterRef, int]]]:
    """The old version's weight, and the others. Unsaid, it is what is left of 100. own: references
    of the old version. Raises AdapterError (conflict)."""
    others = [(ref, weight) for ref, weight in versions if ref not in own]
    mine = [weight for ref, weight in versions if ref in own]
    if len(mine) > 1 or len({ref for ref, _ in others}) < len(others):
        raise AdapterError("conflict", "a version is there twice")
    total = sum(weight for _, weight in others)
    if not others or (not mine and total > MAX_WEIGHT) or (mine and not mine[0] + total):
        raise AdapterError(
            "conflict",
            "expected versions beside the present one, with weights of 100 at most in all, or "
            "the present one's weight, too",
        )
    return (mine[0] if mine else MAX_WEIGHT - total), others


def check_undeclared(registration: Registration) -> None:
    """Checks that commands may change a rollout. Raises AdapterError (conflict) where the adapters
    file says what versions there are.
    """
    rollout = registration.rollout
    if rollout is not None and rollout.declared is not None:
        raise AdapterError(
            "conflict",
            f"the versions of adapter '{registration.name}' are declared by the adapters file: "
            "change them there, or take their shares away with a rollback",
        )


def stays_back(
    version: Version, weight: int, there: Rollout | None, wanted: Declared | None
) -> bool:
    """Whether a version that went back stays so: the file says of it what it said before."""
    before = None if there is None else there.declared
    is_same = before is not None and (version.ref, weight) in before.versions
    return version.rolled_back and wanted is not None and is_same


def with_shares(
    registration: Registration, wanted: Shares, new_id: str, now: float, by: str
) -> Registration:
    """The registration with other shares. Less is in force at once, more when it is warm. Raises
    AdapterError (conflict)."""
    there = registration.rollout
    _check_distinct(registration, wanted.versions)
    rollout = Rollout(
        new_id if there is None else there.id,
        tuple(_lowered(version, there, now) for version in wanted.versions),
        wanted.weight,
        max(wanted.weight, _ALL if there is None else there.live),
        wanted.guards,
        wanted.declared,
    )
    if not rollout.is_warming:
        rollout = in_force(rollout)
    after = msgspec.structs.replace(registration, rollout=rollout)
    return noted(after, now, "rollout", by, _described(rollout))


def in_force(rollout: Rollout) -> Rollout:
    """The rollout with all wanted weights in force."""
    versions = tuple(msgspec.structs.replace(v, live=v.weight) for v in rollout.versions)
    return msgspec.structs.replace(rollout, versions=versions, live=rollout.weight)


def copies_needed(rollout: Rollout, digest: str, old_copies: int, workers: int) -> int:
    """Counts the devices on which a version must be before its share is in force. old_copies:
    devices that have the old version, which bear all requests now."""
    return max(1, min(workers, math.ceil(rollout.share(digest) * old_copies)))


def rolled_back(
    registration: Registration, digest: str | None, why: str, now: float, by: str
) -> Registration:
    """The registration without a version's share (None: any). Raises AdapterError (conflict)."""
    rollout = running(registration)
    versions = tuple(
        msgspec.structs.replace(v, weight=0, live=0, rolled_back=True, why=why)
        if (v.weight or v.live) and digest in (None, v.digest)
        else v
        for v in rollout.versions
    )
    if versions == rollout.versions:
        raise AdapterError("conflict", f"adapter '{registration.name}': no such share to take away")
    after = msgspec.structs.replace(rollout, versions=versions)
    if not any(version.weight for version in versions):
        after = msgspec.structs.replace(after, weight=_ALL, live=_ALL)
    changed = msgspec.structs.replace(registration, rollout=after)
    return noted(changed, now, "rollback", by, why)


def promoted(registration: Registration, version: Version, now: float, by: str) -> Registration:
    """The registration once the name means this version; there is no other beside it."""
    after = msgspec.structs.replace(
        registration, ref=version.ref, content=version.content, rollout=None, error=None
    )
    return noted(after, now, "promote", by)


def to_promote(registration: Registration, digest: str | None) -> Version:
    """The version that is meant; None: the only one with a share. Raises AdapterError."""
    versions = [
        v
        for v in running(registration).versions
        if (v.weight and digest is None) or (digest is not None and v.digest.startswith(digest))
    ]
    if len(versions) != 1:
        which = "no version" if not versions else f"{len(versions)} versions"
        raise AdapterError(
            "conflict", f"adapter '{registration.name}': {which} to promote; say which, by digest"
        )
    return versions[0]


def ended(registration: Registration, now: float, by: str) -> Registration:
    """The registration with all for the old version. Raises AdapterError (conflict)."""
    running(registration)
    after = msgspec.structs.replace(registration, rollout=None)
    return noted(after, now, "rollout", by, "ended")


def before(registration: Registration, digest: str | None) -> Change:
    """The earlier meaning of the name: the last one, or that with `digest`. Raises AdapterError
    (conflict)."""
    for change in reversed(registration.history):
        is_other = change.digest != registration.digest and change.ref
        if is_other and (digest is None or change.digest.startswith(digest)):
            return change
    what = "an earlier version" if digest is None else f"a version {digest[:80]!r}"
    message = f"the history of adapter '{registration.name}' has not {what}"
    raise AdapterError("conflict", message)


def reverted(registration: Registration, content: Content, now: float, by: str) -> Registration:
    """The registration after a rollback: it means what it meant before, pinned to that content."""
    after = msgspec.structs.replace(
        registration, ref=content.ref, content=content, rollout=None, error=None
    )
    return noted(after, now, "rollback", by)


def running(registration: Registration) -> Rollout:
    """The rollout that a registration has. Raises AdapterError (conflict)."""
    if registration.rollout is None:
        raise AdapterError("conflict", f"adapter '{registration.name}' has no rollout")
    return registration.rollout


def _lowered(version: Version, there: Rollout | None, now: float) -> Version:
    """A version that comes again, its counts at zero: old ones say nothing of it now."""
    if there is None:
        return msgspec.structs.replace(version, live=0)
    known = there.version(version.digest)
    if known is None or known.rolled_back:
        return msgspec.structs.replace(version, live=0, since=int(now))
    live = min(known.live, version.weight)
    return msgspec.structs.replace(version, live=live, since=known.since)


def _check_distinct(registration: Registration, versions: Sequence[Version]) -> None:
    seen = {registration.digest}
    for version in versions:
        if version.digest in seen:
            raise AdapterError(
                "conflict",
                f"{format_ref(version.ref)} is the same content as another version of "
                f"'{registration.name}'",
            )
        seen.add(version.digest)


def _described(rollout: Rollout) -> str:
    shares = (f"{version.digest[:12]} {version.weight}" for version in rollout.versions)
    return ", ".join((f"weights: {rollout.weight}", *shares))
