"""Carries out rollouts: resolves and judges versions, shifts shares, and takes them back."""

import asyncio
import secrets
from collections.abc import Callable

import msgspec

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import AdapterRef, format_ref, parse_ref
from loraplex.router.names.owned_name import OwnedName
from loraplex.router.names.registration import Registration, RolloutRequest
from loraplex.router.names.rollout_moves import (
    Shares,
    before,
    check_undeclared,
    copies_needed,
    ended,
    in_force,
    promoted,
    reverted,
    rolled_back,
    running,
    split,
    stays_back,
    to_promote,
    with_shares,
)
from loraplex.router.operations.admin import AdapterAdmin
from loraplex.router.policy.rollout import (
    Content,
    Declared,
    Guards,
    HeldContent,
    RolledBackBy,
    Rollout,
    Version,
)

GUARD = "guard"
BY_OPERATOR = "an operator took it back"


class Rollouts:
    """Operates on rollouts. Every operation raises AdapterError and then has changed nothing that
    is served.

    count: hears of each version that went back, and of whose doing.
    """

    def __init__(self, admin: AdapterAdmin, count: Callable[[RolledBackBy], None]) -> None:
        self._admin = admin
        self._count = count

    async def roll_out(self, name: OwnedName, request: RolloutRequest) -> Registration:
        """Fetches and checks every version first; shares rise when they are warm."""
        admin = self._admin
        async with admin.lock(name):
            there = admin.get(name)
            if request.declared is None:
                check_undeclared(there)
            registration = await admin.admitted(there, "refresh")
            present = [registration.ref]
            if registration.content is not None:
                present.append(registration.content.ref)
            own, others = split(present, request.versions)
            versions = await asyncio.gather(
                *(self._version(registration, *other, request.declared) for other in others)
            )
            guards = request.guards
            if isinstance(guards, msgspec.UnsetType):
                guards = Guards() if there.rollout is None else there.rollout.guards
            shares = Shares(tuple(versions), own, guards, request.declared)
            new_id = secrets.token_hex(8)
            after = with_shares(registration, shares, new_id, admin.clock(), request.by)
            if after.pinned:
                for content in after.pinned_contents:
                    await admin.workers.bring(content, admin.token(after))
            return await admin.commit(there, after)

    async def warm(self, name: OwnedName) -> Registration:
        """Brings versions to as many devices as their shares need, then puts these in force."""
        admin = self._admin
        registration = admin.get(name)
        rollout = running(registration)
        workers = admin.workers
        old_copies = len(workers.holding(_held(registration)))
        for version in rollout.versions:
            if version.state == "warming":
                count = workers.count(version.content.base)
                copies = copies_needed(rollout, version.digest, old_copies, count)
                await workers.warm(version.content, admin.token(registration), copies)
        async with admin.lock(name):
            now = admin.get(name)
            if now.rollout != rollout or now.digest != registration.digest:
                raise AdapterError(
                    "conflict", f"the rollout of '{name.name}' has just been changed"
                )
            warmed = msgspec.structs.replace(now, rollout=in_force(rollout), error=None)
            return await admin.commit(now, warmed)

    async def roll_back(
        self, name: OwnedName, digest: str | None, why: str, by: str
    ) -> Registration:
        """Takes a version's share away at once; None: every version's."""
        admin = self._admin
        async with admin.lock(name):
            there = admin.get(name)
            after = rolled_back(there, digest, why, admin.clock(), by)
            done = await admin.commit(there, after)
        self._count("guard" if by == GUARD else "operator")
        return done

    def take_back_here(self, name: OwnedName, digest: str, why: str) -> None:
        """Takes a version back as a guard, for this router alone: others do not hear of it."""
        there = self._admin.get(name)
        after = rolled_back(there, digest, why, self._admin.clock(), GUARD)
        self._admin.aliases.note(there, after)
        self._count("guard_alone")

    async def report(self, name: OwnedName, before: Rollout) -> Registration:
        """Reports to the others what was taken back here. before: the rollout that they know."""
        admin = self._admin
        async with admin.lock(name):
            there = admin.get(name)
            return await admin.commit(msgspec.structs.replace(there, rollout=before), there)

    async def promote(self, name: OwnedName, digest: str | None, by: str) -> Registration:
        """Makes the name mean this version from now on, once enough workers have it."""
        admin = self._admin
        admin.check_free(name)
        async with admin.lock(name):
            there = admin.get(name)
            version = to_promote(there, digest)
            await self._warm_as_much(there, version.content)
            return await admin.commit(there, promoted(there, version, admin.clock(), by))

    async def back(self, name: OwnedName, digest: str | None, by: str) -> Registration:
        """Takes versions' shares away while there are some; else the name means what it meant."""
        rollout = self._admin.get(name).rollout
        shared = [] if rollout is None else [v for v in rollout.versions if v.weight or v.live]
        named = [v.digest for v in shared if digest is not None and v.digest.startswith(digest)]
        if named:
            return await self.roll_back(name, named[0], BY_OPERATOR, by)
        if shared and digest is None:
            return await self.roll_back(name, None, BY_OPERATOR, by)
        return await self.revert(name, digest, by)

    async def revert(self, name: OwnedName, digest: str | None, by: str) -> Registration:
        """Sets a name back to an earlier content, without a rollout, if its source has that."""
        admin = self._admin
        admin.check_free(name)
        async with admin.lock(name):
            there = await admin.admitted(admin.get(name), "refresh")
            earlier = before(there, digest)
            content = await self._fetch_earlier(there, earlier.ref)
            if content.digest != earlier.digest:
                raise AdapterError("conflict", f"{earlier.ref} has other content now than it had")
            await self._warm_as_much(there, content)
            after = reverted(there, content, admin.clock(), by)
            done = await admin.commit(there, after)
        self._count("operator")
        return done

    async def _fetch_earlier(self, registration: Registration, ref: str) -> Content:
        """An earlier content of a name. Raises AdapterError (conflict) when its source lost it."""
        try:
            return await self._admin.fetch(registration, parse_ref(ref))
        except AdapterError as error:
            if error.code != "not_found":
                raise
            raise AdapterError("conflict", f"{ref} cannot be had: {error.message}") from error

    async def end(self, name: OwnedName, by: str, *, by_file: bool = False) -> Registration:
        """Ends a rollout: the old version has everything again, and the others are forgotten."""
        admin = self._admin
        async with admin.lock(name):
            there = admin.get(name)
            if not by_file:
                check_undeclared(there)
            return await admin.commit(there, ended(there, admin.clock(), by))

    async def _version(
        self, registration: Registration, ref: AdapterRef, weight: int, declared: Declared | None
    ) -> Version:
        """Makes a version of a rollout; one that is there stays, unless it has failed."""
        there = registration.rollout
        for version in () if there is None else there.versions:
            if version.ref == ref and stays_back(version, weight, there, declared):
                return version
            if version.ref == ref and not version.rolled_back:
                return msgspec.structs.replace(version, weight=weight)
        content = await self._admin.fetch(registration, ref)
        if content.base != registration.base:
            message = f"{format_ref(ref)} is for another base than adapter '{registration.name}'"
            raise AdapterError("conflict", message)
        return Version(ref, content, weight)

    async def _warm_as_much(self, registration: Registration, content: Content) -> None:
        """Warms a content on as many devices as what the name means now."""
        workers = self._admin.workers
        held = len(workers.holding(_held(registration)))
        copies = max(1, min(workers.count(content.base), held))
        if registration.pinned:
            await workers.bring(content, self._admin.token(registration))
        else:
            await workers.warm(content, self._admin.token(registration), copies)


def _held(registration: Registration) -> HeldContent | None:
    return None if registration.content is None else registration.content.held
