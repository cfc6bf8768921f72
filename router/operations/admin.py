"""Carries out the operator's changes of registered adapters, in the table and on every worker.

What may be done when is `registration`'s policy. One operation a name at a time on this router; of
two routers the second gets a conflict. Adapters that `--adapter` declares are checked at start;
unloads whose router was stopped or died are finished.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from loraplex.adapters.common.nearest import did_you_mean, one_edit_away
from loraplex.adapters.errors import AdapterError, AdapterErrorCode
from loraplex.adapters.ref import AdapterRef
from loraplex.router.call import AdapterChoice, Secret
from loraplex.router.names.aliases import Aliases
from loraplex.router.names.catalog import Catalog
from loraplex.router.names.registration import (
    DECLARED_BY,
    Event,
    Origin,
    PublishRequest,
    Registration,
    RegistrationRequest,
    check_kept_bytes,
    check_uploadable,
    conflicts,
    move,
    renewed,
    seen,
    uploaded,
)
from loraplex.router.names.served import OwnedName
from loraplex.router.names.use import AdapterUse
from loraplex.router.operations.workers import AdapterWorkers
from loraplex.router.policy.rollout import Content, HeldContent
from loraplex.router.shared.replica import REFRESH_S, every
from loraplex.router.shared.store import Store
from loraplex.router.tenancy.metering import ROUTERS
from loraplex.router.workers.session import WorkerSession

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_HEARD_S = 1.5 * REFRESH_S

CHECKED_AT_ONCE = 2
_READY_POLL_S = 0.25
# A source that is down may be back soon; what an operator must mend takes longer.
_FIRST_PAUSE_S: dict[AdapterErrorCode, float] = {
    "unavailable": 5.0,
    "not_found": 60.0,
    "unauthorized": 60.0,
    "forbidden": 60.0,
}
_MAX_PAUSE_S = 600.0
_JITTER = 0.2

# Longer than routers take to say again that they are there, when the store has lost it.
UNLOADS_TICK_S = 8.0


class Published(NamedTuple):
    """An upload that its name means now. problems: of workers that do not have it, by their ids."""

    registration: Registration
    problems: dict[str, str]


class AdapterAdmin:
    """Operates on registered adapters. Every operation raises AdapterError and then has changed
    nothing that is served.

    is_taken: names of the bases. router_id: this router's. clock: Unix seconds. `by` is who wants
    it, for the history.
    """

    def __init__(
        self,
        catalog: Catalog,
        workers: AdapterWorkers,
        use: AdapterUse,
        is_taken: Callable[[str], bool],
        router_id: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.use = use
        self.workers = workers
        self.clock = clock
        self._catalog = catalog
        self.aliases: Aliases = catalog.rules.aliases
        self._is_taken = is_taken
        self._me = router_id
        self._locks: WeakValueDictionary[OwnedName, asyncio.Lock] = WeakValueDictionary()
        self._draining: dict[OwnedName, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def worker_connected(self, session: WorkerSession) -> None:
        self._spawn(self.workers.send_pins(session))

    # ---- the table

    def get(self, name: OwnedName) -> Registration:
        """Returns the registration of a name. Raises AdapterError (not_found, gone)."""
        registration = self.aliases.get(name)
        if registration is None:
            close = one_edit_away(
                name.name, lambda other: self.is_registered(OwnedName(other, name.tenant))
            )
            hint = did_you_mean(close)
            raise AdapterError(
                "not_found", f"no adapter is registered as {name.name[:200]!r}{hint}"
            )
        if registration.state == "deleted":
            raise AdapterError("gone", f"adapter '{name.name}' has been deleted")
        return registration

    def is_registered(self, name: OwnedName) -> bool:
        registration = self.aliases.get(name)
        return registration is not None and registration.state != "deleted"

    def concerning(
        self, origin: Literal["file", "folder"], names: Iterable[OwnedName]
    ) -> list[Registration]:
        """Registrations of these names, and all others that have this origin."""
        found = {name: self.aliases.get(name) for name in names}
        found |= {one.key: one for one in self.aliases.marked(origin)}
        return [one for one in found.values() if one is not None and one.state != "deleted"]

    def declare_broken(self, request: RegistrationRequest, why: str) -> None:
        """Notes that an adapter is declared which cannot be had. It takes the place of no other."""
        name, before = request.name, self.aliases.get(request.name)
        is_free = before is None or before.state == "deleted" or before.is_broken
        if not is_free or self._is_taken(name.name):
            return
        broken = Registration(
            name=name.name,
            ref=request.ref,
            origin=request.origin,
            pinned=bool(request.pin),
            error=why,
            tenant=name.tenant,
            tool_format=request.tool_format or "",
        )
        with contextlib.suppress(AdapterError):  # there may be too many
            self.aliases.declare(broken)

    def check_free(self, name: OwnedName, origin: Origin | None = None) -> None:
        """Checks that no declaration, or none of `origin`, has the name. Raises AdapterError."""
        declared = self.aliases.declared(name)
        if declared is not None and origin in (None, declared.origin):
            where = DECLARED_BY[declared.origin]
            raise AdapterError(
                "conflict", f"adapter '{name.name}' is declared by {where}: change it there"
            )

    async def register(self, request: RegistrationRequest) -> Registration:
        """Fetches and checks it first; a name that already means it is left as it is."""
        self._check_not_base(request.name)
        async with self.lock(request.name):
            before = self.aliases.get(request.name)
            wanted = self._wanted(request, before)
            token = self.token(wanted)
            content = await self._catalog.fetch(request.ref, token)
            if before is not None:
                last = before.last_version
                wanted = msgspec.structs.replace(wanted, history=before.history, last_version=last)
            if wanted.pinned or request.load:
                await self.workers.bring(content, token)
            after = seen(wanted, content, self.clock(), "register", request.by)
            return await self.commit(before, move(after, "admit"), declare=request.origin != "api")

    def _check_not_base(self, name: OwnedName) -> None:
        if self._is_taken(name.name):
            raise AdapterError("conflict", f"{name.name!r} is a name of the base model")

    def check_uploadable(self, name: OwnedName, replace: bool) -> None:
        """Checks that an upload may become what a name means. Raises AdapterError (conflict)."""
        self._check_not_base(name)
        self.check_free(name)
        check_uploadable(self.aliases.get(name), replace)

    async def publish(self, request: PublishRequest) -> Published:
        """Makes an upload what its name means, once a worker has judged it and enough of them have
        it. What runs goes on with the version that it began with.
        """
        name, ref = request.name, AdapterRef("upload", request.digest)
        async with self.lock(name):
            self.check_uploadable(name, request.replace)
            before = self.aliases.get(name)
            content = await self._catalog.fetch(ref, None)
            wanted = renewed(before, name, ref)
            after = uploaded(wanted, content, request.keep, self.clock(), request.by)
            own = 0 if before is None or before.state == "deleted" else before.kept_bytes
            others = self.aliases.kept_bytes(name.tenant) - own
            check_kept_bytes(others, after, request.most_bytes)
            problems = await self.workers.bring(content, None)
            return Published(await self.commit(before, move(after, "admit")), problems)

    def _wanted(self, request: RegistrationRequest, before: Registration | None) -> Registration:
        """Makes the registration that a request asks for. Raises AdapterError where another owner
        decides about the name.
        """
        name = request.name
        if request.once and before is not None and before.in_service:
            raise AdapterError(
                "conflict",
                f"adapter '{name.name}' has already been loaded: `load_inplace`: true replaces it",
            )
        # Who registers a name once more, to be sure that it is there, takes nothing from it.
        pinned = request.pin if request.pin is not None else before is not None and before.pinned
        known = "" if before is None else before.tool_format
        wanted = Registration(
            name=name.name,
            ref=request.ref,
            origin=request.origin,
            pinned=pinned,
            token=request.token,
            tenant=name.tenant,
            tool_format=known if request.tool_format is None else request.tool_format,
        )
        declared = self.aliases.declared(name)
        if request.origin != "api":
            return self._wanted_by_declaration(wanted, before, request.replace)
        if declared is not None:
            if declared.ref != request.ref:
                self.check_free(name)
            if declared.origin == "file":
                pinned = declared.pinned
                wanted = msgspec.structs.replace(wanted, tool_format=declared.tool_format)
            wanted = msgspec.structs.replace(wanted, origin=declared.origin, pinned=pinned)
        if before is not None and before.state != "deleted":
            conflicts(before, request.ref, request.replace)
            move(before, "admit")
            # A credential was given for one reference, and goes to no other.
            if before.ref == request.ref and request.token is None:
                wanted = msgspec.structs.replace(wanted, token=before.token)
        return wanted

    def _wanted_by_declaration(
        self, wanted: Registration, before: Registration | None, replace: bool
    ) -> Registration:
        """The registration that a declaration asks for. Raises AdapterError: another goes first."""
        stronger = ("option",) if wanted.origin == "file" else ("option", "file", "api")
        if before is not None and before.origin in stronger:
            conflicts(before, wanted.ref, replace)
        if wanted.origin == "file":
            return wanted
        return msgspec.structs.replace(wanted, pinned=self.aliases.was_pinned(wanted.key))

    async def load(self, name: OwnedName) -> Registration:
        """Brings an adapter to the device of every worker, and into service if it was unloaded."""
        async with self.lock(name):
            before = self.get(name)
            registration = await self.admitted(before, "admit")
            await self._bring_all(registration)
            return await self.commit(before, registration)

    async def pin(self, name: OwnedName) -> Registration:
        """Pins an adapter: `load` brings it, and there it stays."""
        async with self.lock(name):
            before = self.get(name)
            registration = await self.admitted(before, "pin")
            await self._bring_all(registration)
            pinned = msgspec.structs.replace(registration, pinned=True)
            return await self.commit(before, pinned, declare=before.origin == "file")

    async def unpin(self, name: OwnedName) -> Registration:
        async with self.lock(name):
            before = self.get(name)
            unpinned = msgspec.structs.replace(before, pinned=False)
            return await self.commit(before, unpinned, declare=before.origin == "file")

    async def refresh(self, name: OwnedName, by: str = "") -> tuple[str | None, Registration]:
        """Make the name mean the reference's present content. Returns the digest before, and the
        registration after."""
        async with self.lock(name):
            before = self.get(name)
            after = move(before, "refresh")
            try:
                content = await self.fetch(before, before.ref)
                after = seen(after, content, self.clock(), "refresh", by)
                if before.pinned and after.digest != before.digest:
                    await self.workers.bring(content, self.token(before))
            except AdapterError as error:
                self.aliases.note(before, msgspec.structs.replace(before, error=error.message))
                raise
            return before.digest, await self.commit(before, after)

    async def unload(self, name: OwnedName, wait_s: float) -> Registration:
        """Takes no new requests at once; waits so long for the rest, which goes on by itself."""
        async with self.lock(name):
            registration = move(self.get(name), "unload")
            if registration.state == "unloading" and not registration.drainer:
                registration = msgspec.structs.replace(registration, drainer=self._me)
            task = await self._unload(registration)
        if task is not None:
            await asyncio.wait([task], timeout=wait_s)
        return self.get(name)

    async def take_up(self, name: OwnedName, drainer: str) -> None:
        """Goes on with an unload that another router left unfinished. drainer: the one that left
        it. Raises AdapterError where another has it by now."""
        async with self.lock(name):
            there = self.get(name)
            if there.state == "unloading" and there.drainer == drainer:
                await self._unload(msgspec.structs.replace(there, drainer=self._me))

    async def delete(self, name: OwnedName) -> Registration:
        """Requests that name it get that error from now on; running ones finish."""
        async with self.lock(name):
            before = self.get(name)
            deleted = msgspec.structs.replace(
                move(before, "delete"),
                pinned=False,
                content=None,
                token=None,
                rollout=None,
                tool_format="",
                kept=(),
            )
            if before.origin == "api":
                await self.aliases.write(deleted)
            else:
                await self.aliases.drop(deleted)
            self._retire_all(name, before.held)
            return deleted

    # ---- for operations on rollouts, too

    def lock(self, name: OwnedName) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def token(self, registration: Registration) -> Secret | None:
        return self._catalog.rules.credential(registration)

    async def fetch(self, registration: Registration, ref: AdapterRef) -> Content:
        """The present content of a reference, opened as the registration's. Raises AdapterError."""
        opened = msgspec.structs.replace(registration, ref=ref)
        return await self._catalog.fetch(ref, self.token(opened))

    async def admitted(self, registration: Registration, event: Event) -> Registration:
        """Returns a registration in the state after the event, with its content."""
        moved = move(registration, event)
        if registration.content is not None and registration.state != "registered":
            return moved
        content = await self.fetch(registration, registration.ref)
        return seen(moved, content, self.clock())

    async def commit(
        self, before: Registration | None, after: Registration, *, declare: bool = False
    ) -> Registration:
        """Puts it. What the name meant before leaves when its requests are over."""
        if declare:
            self.aliases.declare(after)
        else:
            await self.aliases.write(after)
        if before is not None:
            self._retire_all(after.key, before.held - after.held)
        return after

    # ---- inside

    async def _bring_all(self, registration: Registration) -> None:
        versions = () if registration.rollout is None else registration.rollout.versions
        assert registration.content is not None
        for content in (registration.content, *(v.content for v in versions if v.live)):
            await self.workers.bring(content, self.token(registration))

    async def _unload(self, registration: Registration) -> "asyncio.Task[None] | None":
        """Returns what drains it, if it is drained."""
        name = registration.key
        await self.aliases.write(registration)
        task = self._draining.get(name)
        if registration.state == "unloading" and task is None:
            task = self._draining[name] = self._spawn(self._drain(registration))
            task.add_done_callback(lambda _: self._draining.pop(name, None))
        return task

    async def _drain(self, unloading: Registration) -> None:
        name = unloading.key
        await self._all_heard()
        await self.use.drained(name)
        problems = [await self._evict_unused(held) for held in unloading.held]
        problem = "; ".join(problem for problem in problems if problem) or None
        while (there := self.aliases.get(name)) is not None and there.state == "unloading":
            done = msgspec.structs.replace(move(there, "drained"), error=problem)
            try:
                await self.aliases.write(done)
            except AdapterError:
                await asyncio.sleep(_RETRY_S)

    async def _all_heard(self) -> None:
        """Waits until no router sends new requests for what a name meant before."""
        if self.aliases.is_shared:
            await asyncio.sleep(_HEARD_S)

    def _retire_all(self, name: OwnedName, contents: frozenset[HeldContent]) -> None:
        for held in contents:
            self._spawn(self._retire(name, held))

    async def _retire(self, name: OwnedName, held: HeldContent) -> None:
        await self._all_heard()
        await self.use.drained(name, held)
        problem = await self._evict_unused(held)
        if problem is not None:
            log.warning("adapter %.12s stays in memory: %s", held.digest, problem)

    async def _evict_unused(self, held: HeldContent) -> str | None:
        """Evicts a content that no name means any more: another name may mean the same."""
        if any(held in r.held for r in self.aliases.meaning(held) if r.in_service):
            return None
        try:
            return await self.workers.evict(held)
        except AdapterError as error:
            return error.message

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class DeclaredCheck:
    """Checks at the start that the declared adapters can be had. names: of the fleet's adapters.
    is_ready: whether a worker takes work.
    """

    def __init__(
        self, catalog: Catalog, names: Sequence[str], is_ready: Callable[[], bool]
    ) -> None:
        self._catalog = catalog
        self._names = names
        self._is_ready = is_ready
        self._slots = asyncio.Semaphore(CHECKED_AT_ONCE)
        self._ready = asyncio.Event()

    async def run(self) -> None:
        """Checks until each adapter is there, or judged unfit; or until cancelled."""
        following = asyncio.create_task(self._follow())
        try:
            async with asyncio.TaskGroup() as tasks:
                for name in self._names:
                    tasks.create_task(self._watch(name))
        finally:
            following.cancel()

    async def _watch(self, name: str) -> None:
        attempt = 0
        while (error := await self._try(name)) is not None:
            pause_s = pause_after(error, attempt)
            if pause_s is None:
                return
            await asyncio.sleep(pause_s * random.uniform(1 - _JITTER, 1 + _JITTER))
            attempt += 1

    async def _try(self, name: str) -> AdapterError | None:
        choice = AdapterChoice(name, AdapterRef("alias", name))
        try:
            if not self._ready.is_set():  # a worker may take minutes to start
                async with self._slots:
                    await self._catalog.look(choice)
                await self._ready.wait()
            async with self._slots:
                if self._is_open(choice):
                    await self._catalog.resolve(choice)
        except AdapterError as error:
            return error
        return None

    def _is_open(self, choice: AdapterChoice) -> bool:
        """Checks whether an adapter is still to be judged. It is not where a request has found out
        meanwhile, or an operator has taken it away.
        """
        found = self._catalog.rules.registration(choice)
        if found is None or found.state != "registered":
            return False
        return found.digest is None or found.error is not None

    async def _follow(self) -> None:
        """Follows whether there is a worker, for all who wait for one."""
        while True:
            if self._is_ready():
                self._ready.set()
            else:
                self._ready.clear()
            await asyncio.sleep(_READY_POLL_S)


def pause_after(error: AdapterError, attempt: int) -> float | None:
    """Seconds until it is worth trying again; None = it was judged, and will be as it is. attempt:
    how often it was tried again already."""
    first = _FIRST_PAUSE_S.get(error.code)
    if first is None:
        return None
    pause_s: float = min(_MAX_PAUSE_S, first * 2.0 ** min(attempt, 16))
    return max(pause_s, min(_MAX_PAUSE_S, error.retry_after_s or 0.0))


class OrphanedUnloads:
    """Ends dead routers' unloads. Every router looks, as not all know each name; one gets each."""

    def __init__(self, store: Store, aliases: Aliases, admin: AdapterAdmin) -> None:
        self._store = store
        self._aliases = aliases
        self._admin = admin
        self._left: set[tuple[OwnedName, str]] = set()

    async def run(self) -> None:
        """Takes over unloads of dead routers until cancelled."""
        await every(UNLOADS_TICK_S, self.step)

    async def step(self) -> None:
        """Takes over unloads whose router was missing at the last look, too. Raises StoreDown."""
        before, self._left = self._left, set()
        unloading = {(r.key, r.drainer) for r in self._aliases.marked("unloading")}
        if not unloading or not self._admin.workers.ready:
            return
        there = await self._store.leased(ROUTERS)
        self._left = {(name, drainer) for name, drainer in unloading if drainer not in there}
        for name, drainer in self._left & before:
            with contextlib.suppress(AdapterError):  # another router was faster
                await self._admin.take_up(name, drainer)
