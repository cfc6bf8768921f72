"""Carries out what the operator wants of registered adapters: on the table, and on every worker.

What may be done when is `registration`'s policy. One operation a name at a time.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from adapters.errors import AdapterError
from router.adapter_use import AdapterUse
from router.adapter_wish import Wish
from router.aliases import AliasStore
from router.catalog import Catalog
from router.fleet import Fleet
from router.generation import Secret
from router.registration import Content, Event, Registration, conflicts, move, seen
from router.worker_session import WorkerLost, WorkerSession
from server.protocol import AdapterTiers

log = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 2.0

# Worker id -> digest -> where the worker has it.
Tiers = dict[str, dict[str, AdapterTiers]]


class AdapterAdmin:
    """Every operation raises AdapterError and then has changed nothing that is served.

    is_taken: names of the base. timeout_s: for bringing an adapter to the workers' devices.
    clock: Unix seconds.
    """

    def __init__(
        self,
        catalog: Catalog,
        fleet: Fleet,
        use: AdapterUse,
        is_taken: Callable[[str], bool],
        timeout_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.use = use
        self._catalog = catalog
        self._aliases: AliasStore = catalog.rules.aliases
        self._fleet = fleet
        self._is_taken = is_taken
        self._timeout_s = timeout_s
        self._clock = clock
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._draining: dict[str, asyncio.Task[None]] = {}
        self._told_pins: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        fleet.on_connect = self._on_connect

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def can_admit(self) -> bool:
        """Whether there is a worker to fetch and check adapters."""
        return self._fleet.ready

    # ---- the table

    def get(self, name: str) -> Registration:
        """Raises AdapterError (not_found, gone)."""
        registration = self._aliases.get(name)
        if registration is None:
            raise AdapterError("not_found", f"no adapter is registered as {name[:200]!r}")
        if registration.state == "deleted":
            raise AdapterError("gone", f"adapter {name!r} has been deleted")
        return registration

    def all(self) -> list[Registration]:
        return self._aliases.all()

    async def register(self, wish: Wish) -> Registration:
        """Fetches and checks it first; a name that already means it is left as it is."""
        if self._is_taken(wish.name):
            raise AdapterError("conflict", f"{wish.name!r} is a name of the base model")
        async with self._lock(wish.name):
            before = self._aliases.get(wish.name)
            if before is not None and before.state != "deleted":
                conflicts(before, wish.ref, wish.replace)
                move(before, "admit")
            wanted = Registration(wish.name, wish.ref, wish.origin, wish.pin, wish.token)
            token = self._token(wanted)
            content = await self._catalog.fetch(wish.ref, token)
            if before is not None:
                wanted = msgspec.structs.replace(wanted, history=before.history)
            if wish.pin:
                await self._bring(content, token)
            return self._admit(before, move(seen(wanted, content, self._clock()), "admit"))

    async def load(self, name: str) -> Registration:
        """To the device of every worker, and into service if it was unloaded."""
        async with self._lock(name):
            before = self.get(name)
            registration = await self._admitted(before, "admit")
            await self._bring(_content(registration), self._token(registration))
            return self._admit(before, registration)

    async def pin(self, name: str) -> Registration:
        """As `load`; and there it stays."""
        async with self._lock(name):
            before = self.get(name)
            registration = await self._admitted(before, "pin")
            await self._bring(_content(registration), self._token(registration))
            return self._admit(before, msgspec.structs.replace(registration, pinned=True))

    async def unpin(self, name: str) -> Registration:
        async with self._lock(name):
            registration = msgspec.structs.replace(self.get(name), pinned=False)
            self._put(registration)
            return registration

    async def refresh(self, name: str) -> tuple[str | None, Registration]:
        """What the reference means now. Returns the digest before, and the registration after."""
        async with self._lock(name):
            before = self.get(name)
            after = move(before, "refresh")
            try:
                content = await self._catalog.fetch(before.ref, self._token(before))
                after = seen(after, content, self._clock())
                if before.pinned and after.digest != before.digest:
                    await self._bring(content, self._token(before))
            except AdapterError as error:
                self._put(msgspec.structs.replace(before, error=error.message))
                raise
            return before.digest, self._admit(before, after)

    async def unload(self, name: str, wait_s: float) -> Registration:
        """Takes no new requests at once; waits so long for the rest, which goes on by itself."""
        async with self._lock(name):
            registration = move(self.get(name), "unload")
            self._put(registration)
            task = self._draining.get(name)
            if registration.state == "unloading" and task is None:
                task = self._draining[name] = self._spawn(self._drain(name, registration.digest))
                task.add_done_callback(lambda _: self._draining.pop(name, None))
        if task is not None:
            await asyncio.wait([task], timeout=wait_s)
        return self.get(name)

    async def delete(self, name: str) -> Registration:
        """Requests that name it are told so from now on; running ones finish."""
        async with self._lock(name):
            before = self.get(name)
            deleted = msgspec.structs.replace(
                move(before, "delete"), pinned=False, content=None, token=None
            )
            self._put(deleted)
            if before.digest is not None and name not in self._draining:
                self._spawn(self._retire(name, before.digest))
            return deleted

    # ---- the workers

    async def tiers(self, digests: Iterable[str]) -> Tiers:
        """Of all workers that answer in time."""
        wanted = sorted(set(digests))
        if not wanted:
            return {}
        sessions = {session.worker_id: session for session in self._fleet.sessions}
        reports = await asyncio.gather(*(self._status(s, wanted) for s in sessions.values()))
        return {
            worker_id: {tiers.digest: tiers for tiers in report}
            for worker_id, report in zip(sessions, reports, strict=True)
            if report is not None
        }

    async def _status(
        self, session: WorkerSession, digests: list[str]
    ) -> tuple[AdapterTiers, ...] | None:
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                return (await session.order("status", *digests)).tiers
        except (AdapterError, TimeoutError, WorkerLost):
            return None

    async def _bring(self, content: Content, token: Secret | None) -> None:
        """To the device of every worker. Raises AdapterError when not one of them has it then."""
        sessions = self._fleet.sessions
        if not sessions:
            raise AdapterError("unavailable", "no worker is connected", (), 2.0)
        problems = await asyncio.gather(*(self._bring_to(s, content, token) for s in sessions))
        failed = [problem for problem in problems if problem is not None]
        for problem in failed:
            log.warning("adapter %.12s: %s", content.manifest.digest, problem)
        if len(failed) == len(sessions):
            raise AdapterError("unavailable", failed[0], (), 2.0)

    async def _bring_to(
        self, session: WorkerSession, content: Content, token: Secret | None
    ) -> str | None:
        digest = content.manifest.digest
        try:
            async with asyncio.timeout(self._timeout_s):
                await session.admit(content.ref, token, digest)
                error = (await session.order("load", digest)).error
        except (AdapterError, WorkerLost) as caught:
            error = str(caught)
        except TimeoutError:
            error = f"it had no room for it within {self._timeout_s:g} s"
        return None if error is None else f"worker {session.worker_id}: {error}"

    async def _evict(self, digest: str) -> str | None:
        """From device and host memory of every worker. Returns what went wrong."""
        problems = []
        for session in self._fleet.sessions:
            with contextlib.suppress(WorkerLost):  # then its memory is its own business
                report = await session.order("evict", digest)
                if report.error is not None:
                    problems.append(f"worker {session.worker_id}: {report.error}")
        return "; ".join(problems) or None

    # ---- inside

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _token(self, registration: Registration) -> Secret | None:
        return self._catalog.rules.credential(registration)

    async def _admitted(self, registration: Registration, event: Event) -> Registration:
        """In the state after the event, with its content."""
        moved = move(registration, event)
        if registration.content is not None and registration.state != "registered":
            return moved
        content = await self._catalog.fetch(registration.ref, self._token(registration))
        return seen(moved, content, self._clock())

    def _admit(self, before: Registration | None, after: Registration) -> Registration:
        """Puts it. What the name meant before leaves when its requests are over."""
        self._put(after)
        old = None if before is None else before.digest
        if old is not None and old != after.digest:
            self._spawn(self._retire(after.name, old))
        return after

    def _put(self, registration: Registration) -> None:
        self._aliases.put(registration)
        self._sync_pins()

    def _sync_pins(self) -> None:
        pins = self._pins()
        if pins == self._told_pins:
            return
        self._told_pins = pins
        for session in self._fleet.sessions:
            with contextlib.suppress(WorkerLost):  # it is told when it is back
                session.pin(pins)

    def _pins(self) -> set[str]:
        return {registration.pin for registration in self._aliases.all() if registration.pin}

    def _on_connect(self, session: WorkerSession) -> None:
        self._spawn(self._tell_pins(session))

    async def _tell_pins(self, session: WorkerSession) -> None:
        """A worker can only keep what it has fetched."""
        for registration in self._aliases.all():
            if registration.pin is None or registration.content is None:
                continue
            content, token = registration.content, self._token(registration)
            try:
                await session.admit(content.ref, token, registration.pin)
            except AdapterError as error:
                log.warning("adapter %s cannot be pinned: %s", registration.name, error.message)
            except WorkerLost:
                return
        with contextlib.suppress(WorkerLost):
            session.pin(self._pins())

    async def _drain(self, name: str, digest: str | None) -> None:
        await self.use.drained(name)
        problem = await self._evict_unused(digest)
        registration = self._aliases.get(name)
        if registration is not None and registration.state == "unloading":
            done = move(registration, "drained")
            self._put(msgspec.structs.replace(done, error=problem))

    async def _retire(self, name: str, digest: str) -> None:
        await self.use.drained(name, digest)
        problem = await self._evict_unused(digest)
        if problem is not None:
            log.warning("adapter %.12s stays in memory: %s", digest, problem)

    async def _evict_unused(self, digest: str | None) -> str | None:
        """Another name may mean the same content."""
        served = {r.digest for r in self._aliases.all() if r.in_service}
        if digest is None or digest in served:
            return None
        try:
            return await self._evict(digest)
        except AdapterError as error:
            return error.message

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _content(registration: Registration) -> Content:
    assert registration.content is not None
    return registration.content
