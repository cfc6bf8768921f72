"""The operator's orders to workers: bring adapters to devices, keep them there, evict them."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from loraplex.adapters.errors import AdapterError
from loraplex.router.call import Secret
from loraplex.router.names.aliases import Aliases
from loraplex.router.names.catalog import Catalog
from loraplex.router.names.served import home_key
from loraplex.router.policy.placement.placement import rank
from loraplex.router.policy.rollout import Content, HeldContent
from loraplex.router.workers.bases import Bases
from loraplex.router.workers.session import WorkerLost, WorkerSession
from loraplex.server.protocol import AdapterTiers

log = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 2.0

# Worker id -> content -> where the worker has it.
Tiers = dict[str, dict[HeldContent, AdapterTiers]]


class AdapterWorkers:
    """Brings adapters to workers' memory, and away. timeout_s: of bringing one to a device."""

    def __init__(self, catalog: Catalog, bases: Bases, timeout_s: float) -> None:
        self._rules = catalog.rules
        self._aliases: Aliases = catalog.rules.aliases
        self._bases = bases
        self._timeout_s = timeout_s

    @property
    def ready(self) -> bool:
        """Whether there is a worker to fetch and check adapters."""
        return self._bases.ready

    async def tiers(self, contents: Iterable[HeldContent]) -> Tiers:
        """Tiers of adapters on all workers of their bases that answer in time."""
        wanted: dict[str, set[str]] = {}
        for held in contents:
            wanted.setdefault(held.base, set()).add(held.digest)
        asked = {
            session.worker_id: (session, sorted(digests))
            for base, digests in wanted.items()
            for session in self._sessions(base)
        }
        reports = await asyncio.gather(*(self._status(*one) for one in asked.values()))
        return {
            worker_id: {
                HeldContent(asked[worker_id][0].base, tiers.digest): tiers for tiers in report
            }
            for worker_id, report in zip(asked, reports, strict=True)
            if report is not None
        }

    async def bring(self, content: Content, token: Secret | None) -> dict[str, str]:
        """Brings an adapter to the device of every worker. Returns what is wrong, by the id of the
        worker. Raises AdapterError when not one of them has it then."""
        tasks = {
            session.worker_id: self._bring_one(session, content, token)
            for session in self._sessions(content.base)
        }
        problems = dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
        found = {worker_id: problem for worker_id, problem in problems.items() if problem}
        if len(found) == len(tasks):
            first = next(iter(found.values()), "no worker is connected")
            raise AdapterError("unavailable", first, (), 2.0)
        return found

    async def warm(self, content: Content, token: Secret | None, copies: int) -> None:
        """Brings an adapter to so many devices, its homes first. Raises AdapterError for fewer."""
        sessions = [session for session in self._sessions(content.base) if session.view.able]
        ranking = rank(home_key(content.ref), [session.worker_id for session in sessions])
        sessions.sort(key=lambda session: ranking[session.worker_id])
        problems: list[str] = []
        done = 0
        while done < copies:
            # One that cannot have it is made good by the next.
            homes, sessions = sessions[: copies - done], sessions[copies - done :]
            if not homes:
                raise AdapterError("unavailable", (*problems, "no worker is ready")[0], (), 2.0)
            brought = await asyncio.gather(*(self._bring_one(s, content, token) for s in homes))
            done += brought.count(None)
            problems += filter(None, brought)

    def holding(self, held: HeldContent | None) -> list[str]:
        """Ids of workers that reported it on the device."""
        sessions = () if held is None else self._sessions(held.base)
        return sorted(s.worker_id for s in sessions if held and held.digest in s.view.resident)

    def count(self, base: str) -> int:
        """Workers of a base that take work."""
        return sum(session.view.able for session in self._sessions(base))

    async def evict(self, held: HeldContent) -> str | None:
        """Evicts an adapter from all workers of its base. Returns what went wrong."""
        problems = []
        for session in self._sessions(held.base):
            with contextlib.suppress(WorkerLost):  # then its memory is its own business
                report = await session.order("evict", held.digest)
                if report.error is not None:
                    problems.append(f"worker {session.worker_id}: {report.error}")
        return "; ".join(problems) or None

    async def send_pins(self, session: WorkerSession) -> None:
        """Brings a worker the pinned adapters. A worker can only keep what it has fetched."""
        for registration in self._aliases.pinned():
            token = self._rules.credential(registration)
            for content in registration.pinned_contents:
                if content.base != session.base:
                    continue
                try:
                    await session.admit(content.ref, token, content.digest)
                except AdapterError as error:
                    log.warning("adapter %s cannot be pinned: %s", registration.key, error.message)
                except WorkerLost:
                    return
        with contextlib.suppress(WorkerLost):
            pins = self._aliases.pins()
            session.pin(held.digest for held in pins if held.base == session.base)

    def _sessions(self, base: str) -> list[WorkerSession]:
        found = self._bases.find(base)
        return [] if found is None else found.fleet.sessions

    async def _status(
        self, session: WorkerSession, digests: list[str]
    ) -> tuple[AdapterTiers, ...] | None:
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                return (await session.order("status", *digests)).tiers
        except (AdapterError, TimeoutError, WorkerLost):
            return None

    async def _bring_one(
        self, session: WorkerSession, content: Content, token: Secret | None
    ) -> str | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await session.admit(content.ref, token, content.digest)
                error = (await session.order("load", content.digest)).error
        except (AdapterError, WorkerLost) as caught:
            error = str(caught)
        except TimeoutError:
            error = f"it had no room for it within {self._timeout_s:g} s"
        if error is None:
            return None
        problem = f"worker {session.worker_id}: {error}"
        log.warning("adapter %.12s: %s", content.digest, problem)
        return problem
