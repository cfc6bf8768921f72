"""Carries out rollouts: resolves and judges versions, warms them, shifts shares, and takes worse
ones back.

One router of those that share a store advances them for all, by a lease. If two act at the same
time, the table's revisions decide which one counts. While the store is away each judges alone.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable

import msgspec

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import AdapterRef, format_ref, parse_ref
from loraplex.router.names.aliases import Aliases
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
from loraplex.router.names.rollout_tally import (
    Read,
    ReadScores,
    RolloutTally,
    breaches,
    no_scores,
)
from loraplex.router.names.served import OwnedName
from loraplex.router.operations.admin import AdapterAdmin
from loraplex.router.policy.guards import Measurements, Verdict, judged
from loraplex.router.policy.rollout import (
    Content,
    Declared,
    Guards,
    HeldContent,
    RolledBackBy,
    Rollout,
    Version,
)
from loraplex.router.shared.replica import every
from loraplex.router.shared.store import Store, StoreDown
from loraplex.router.tenancy.records import AuditRecord

GUARD = "guard"
BY_OPERATOR = "an operator took it back"

logger = logging.getLogger(__name__)

TICK_S = 1.0
LEASE_S = 5.0
_RETRY_S = 2.0
_KEY = "rollouts:keeper"


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


class _Verdict(msgspec.Struct):
    """Verdict of a guard on a rollout. before: the rollout as all know it. why: by digest of what
    was taken back of it.
    """

    before: Rollout
    why: dict[str, str]


class LoneGuard:
    """Judges rollouts for this router alone. audit: hears which version was taken back, and why."""

    def __init__(
        self,
        aliases: Aliases,
        rollouts: Rollouts,
        tally: RolloutTally,
        audit: Callable[[OwnedName, str], None],
    ) -> None:
        self._aliases = aliases
        self._rollouts = rollouts
        self._tally = tally
        self._audit = audit
        self._verdicts: dict[OwnedName, _Verdict] = {}

    async def judge(self, rolling: Iterable[Registration]) -> None:
        for registration in rolling:
            async for digest, why in breaches(registration, self._tally.read_own, no_scores):
                note = f"{why}; counted by one router, without Redis"
                assert registration.rollout is not None
                self._take_back(registration.key, registration.rollout, digest, note)

    async def report(self) -> None:
        """Makes its verdicts everybody's where all is as it was judged. Raises StoreDown.

        Who has set shares in the meantime has judged it, too, and what was counted is reported
        anyway.
        """
        if self._verdicts:
            await self._aliases.refresh()
        for name, verdict in list(self._verdicts.items()):
            there = self._aliases.get(name)
            if there is not None and there.rollout == verdict.before:  # the row was written anew
                for digest, why in verdict.why.items():
                    self._rollouts.take_back_here(name, digest, why)
            elif there is None or not self._is_kept(there, verdict):
                del self._verdicts[name]
                continue
            try:
                await self._rollouts.report(name, verdict.before)
            except AdapterError as error:
                logger.warning(
                    "adapter %s: its rollback is not reported yet: %s", name, error.message
                )
            else:
                del self._verdicts[name]

    def _is_kept(self, there: Registration, verdict: _Verdict) -> bool:
        if there.rollout is None or there.rollout.id != verdict.before.id:
            return False
        back = {v.digest: v.why for v in there.rollout.versions if v.rolled_back}
        return all(back.get(digest) == why for digest, why in verdict.why.items())

    def _take_back(self, name: OwnedName, before: Rollout, digest: str, why: str) -> None:
        self._rollouts.take_back_here(name, digest, why)
        self._verdicts.setdefault(name, _Verdict(before, {})).why[digest] = why
        logger.error("adapter %s: %.12s is rolled back here: %s", name, digest, why)
        self._audit(name, why)


class RolloutKeeper:
    """Leads the rollouts, if no other router does: it warms versions, and takes back those that do
    badly. clock: Unix seconds. audit: hears of what is done without an operator.
    """

    def __init__(
        self,
        store: Store,
        router_id: str,
        aliases: Aliases,
        rollouts: Rollouts,
        tally: RolloutTally,
        audit: Callable[[AuditRecord], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._me = router_id.encode()
        self._aliases = aliases
        self._rollouts = rollouts
        self._tally = tally
        self._audit = audit
        self._clock = clock
        self._alone = LoneGuard(aliases, rollouts, tally, self._note)
        self._warming: dict[OwnedName, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Leads the rollouts until cancelled."""
        try:
            await every(TICK_S, self.step)
        finally:
            for task in self._warming.values():
                task.cancel()
            await asyncio.gather(*self._warming.values(), return_exceptions=True)

    async def step(self) -> None:
        """Judges each rollout, if this router leads. Raises StoreDown, and then has judged by what
        this router saw.
        """
        try:
            await self._tally.flush()
            await self._alone.report()
            leads = bool(self._rolling()) and await self._leads()
        except StoreDown:
            await self._alone.judge(self._rolling())
            raise
        for registration in self._rolling() if leads else ():
            if registration.key not in self._warming:
                self._start_warming(registration)
            await self._judge(registration)

    async def measured(self, registration: Registration) -> Measurements:
        """Measurements in the guards' window; by this router alone while there is no Redis."""
        try:
            return await self._measured(registration, self._tally.read, self._tally.scores)
        except StoreDown:
            own = await self._measured(registration, self._tally.read_own, no_scores)
            return msgspec.structs.replace(own, of_all=False)

    async def _measured(
        self, registration: Registration, read: Read, read_scores: ReadScores
    ) -> Measurements:
        rollout, digest = registration.rollout, registration.digest or ""
        if rollout is None:
            return Measurements({}, {})
        window_s = (rollout.guards or Guards()).window_s
        versions = {digest: await read(rollout.id, digest, window_s, 0)}
        verdicts: dict[str, Verdict] = {}
        scores = await read_scores(rollout)
        for version in rollout.versions:
            new = await read(rollout.id, version.digest, window_s, version.since)
            versions[version.digest] = new
            if rollout.guards is not None and version.live:
                old = await read(rollout.id, digest, window_s, version.since)
                pair = scores[version.digest]
                verdicts[version.digest] = judged(rollout.guards, old, new, pair)
        return Measurements(versions, verdicts, scores=scores)

    def _rolling(self) -> list[Registration]:
        return [r for r in self._aliases.marked("rollout") if r.state == "ready"]

    def _start_warming(self, registration: Registration) -> None:
        name, rollout = registration.key, registration.rollout
        if rollout is not None and rollout.is_warming:
            task = self._warming[name] = asyncio.create_task(self._warm(registration))
            task.add_done_callback(lambda _: self._warming.pop(name, None))

    async def _leads(self) -> bool:
        there = await self._store.add(_KEY, self._me, LEASE_S)
        if there is None:
            return True
        return there == self._me and await self._store.swap(_KEY, self._me, self._me, LEASE_S)

    async def _warm(self, registration: Registration) -> None:
        try:
            await self._rollouts.warm(registration.key)
        except AdapterError as error:
            if error.code != "conflict":
                note = f"not warm yet: {error.message}"
                self._aliases.note(registration, msgspec.structs.replace(registration, error=note))
            await asyncio.sleep(_RETRY_S)

    async def _judge(self, registration: Registration) -> None:
        async for digest, why in breaches(registration, self._tally.read, self._tally.scores):
            there = self._aliases.get(registration.key)
            # An operator may have set shares anew while the counts were read.
            if there is not None and there.rollout == registration.rollout:
                await self._roll_back(registration.key, digest, why)

    async def _roll_back(self, name: OwnedName, digest: str, why: str) -> None:
        try:
            await self._rollouts.roll_back(name, digest, why, GUARD)
        except AdapterError as error:
            logger.error("adapter %s: %.12s is not rolled back: %s", name, digest, error.message)
            return
        logger.error("adapter %s: %.12s is rolled back: %s", name, digest, why)
        self._note(name, why)

    def _note(self, name: OwnedName, why: str) -> None:
        action = f"rollback by guard: {why}"
        self._audit(AuditRecord(self._clock(), action, name.name, name.tenant, 200, "", ""))
