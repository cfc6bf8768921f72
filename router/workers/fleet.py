"""The workers of this router, the connections to them, and the queue in front of them: who gets the
next credit.

Carries out what `policy` decides; what is generated is the business of `generation`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import msgspec

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import AdapterManifest
from loraplex.router.call import Secret
from loraplex.router.failures import DeadlinePassed, NoWorker
from loraplex.router.names.served import Origin, home_key
from loraplex.router.policy.matching import Match, Matcher
from loraplex.router.policy.placement.placement import PlacementRequest, Placer, Reason, WorkerView
from loraplex.router.policy.queue.missed import Missed
from loraplex.router.policy.queue.queue_limits import QueueCapacity, QueueFull, QueueSize
from loraplex.router.policy.queue.waiting import Bill, Waiting, WaitingQueue
from loraplex.router.workers.client import WorkerClient
from loraplex.router.workers.session import Credit, WorkerLost, WorkerSession
from loraplex.server.protocol import ModelCard, WorkerHello

MAX_WORKERS = 4096

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_LATE_S = 0.25
# How soon those are tried again who would rather wait for a worker that has their adapter.
_HOLD_TICK_S = 0.02
_LOAD_ATTEMPTS = 3


class Roster:
    """The workers that this router knows; or those of one base among them, as `of` gives them."""

    def __init__(self, whole: "Roster | None" = None, base: str = "") -> None:
        self._whole = whole
        self._base = base
        self._clients: Sequence[WorkerClient] = ()

    def of(self, base: str) -> "Roster":
        """The workers of one base: those that served it when they were last connected."""
        return Roster(self, base)

    @property
    def clients(self) -> Sequence[WorkerClient]:
        """A client for each worker that was named or discovered, connected or not."""
        if self._whole is None:
            return self._clients
        return [client for client in self._whole.clients if client.base == self._base]

    @clients.setter
    def clients(self, clients: Sequence[WorkerClient]) -> None:
        self._clients = clients

    @property
    def sessions(self) -> list[WorkerSession]:
        """Sessions of connected workers."""
        return [client.session for client in self.clients if client.session is not None]

    @property
    def views(self) -> list[WorkerView]:
        """Views of connected workers."""
        return [session.view for session in self.sessions]

    @property
    def cards(self) -> list[ModelCard]:
        """Cards of connected workers, without their texts."""
        return [client.card for client in self.clients if client.card is not None]

    def accept_worker(self, hello: WorkerHello) -> str | None:
        """Accept a worker. If two workers have one name, the one that started last is believed."""
        for session in self.sessions:
            if session.worker_id != hello.worker_id:
                continue
            if session.epoch >= hello.epoch:
                return (
                    f"another worker {hello.worker_id} is connected, which started as late or "
                    "later: name it once, and give each worker a --worker-id of its own"
                )
            session.fence(f"another worker {hello.worker_id} has started since")
        return None


class Connections:
    """Keeps a client for each worker that is named or discovered. urls: of workers that the
    operator named. new_client: makes the client of a URL.

    `roster` lists all clients.
    """

    def __init__(
        self, roster: Roster, urls: Sequence[str], new_client: Callable[[str], WorkerClient]
    ) -> None:
        self._roster = roster
        self._new_client = new_client
        self._named = tuple(new_client(url) for url in dict.fromkeys(urls))
        self._found: dict[WorkerClient, asyncio.Task[None]] = {}
        roster.clients = self._named

    def discovered(self, urls: Collection[str]) -> None:
        """Connects to all workers that enlisted themselves; connected ones are never dropped."""
        urls = {url.rstrip("/") for url in urls}
        known = {client.url for client in self._roster.clients}
        for url in sorted(urls - known)[: MAX_WORKERS - len(known)]:
            client = self._new_client(url)
            self._found[client] = asyncio.create_task(client.run())
        for client in [c for c in self._found if c.url not in urls and c.session is None]:
            self._found.pop(client).cancel()
        self._roster.clients = (*self._named, *self._found)

    async def run(self) -> None:
        """Keeps the connections until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for client in self._named:
                    tasks.create_task(client.run())
                await asyncio.get_running_loop().create_future()  # new ones may be discovered
        finally:
            for task in self._found.values():
                task.cancel()
            await asyncio.gather(*self._found.values(), return_exceptions=True)


class Placed(NamedTuple):
    """A sequence's worker, why it is that one, and what the sequence is charged."""

    credit: Credit
    reason: Reason
    bill: Bill


class Fleet:
    """Brings sequences from the queue to the workers of one base. roster: these workers.

    silence_s: how long a worker may be silent before its sequences go on elsewhere. worker_wait_s:
    how long new sequences wait while no worker takes work. names_known: set once the operator's
    adapters have their names; first requests wait for it, too. base: the base's name, see
    `BaseModel`.
    """

    def __init__(
        self,
        queue: WaitingQueue[asyncio.Future[Placed]],
        roster: Roster,
        worker_wait_s: float,
        silence_s: float,
        handed_over: Callable[[int], None],
        names_known: asyncio.Event,
        base: str = "",
    ) -> None:
        self.queue = queue
        self.missed = Missed()
        self._base = base
        self._silence_s = silence_s
        self._handed_over = handed_over
        self._roster = roster
        self._names_known = names_known
        self._worker_wait_s = worker_wait_s
        self._placement = Placer()
        self._matcher = Matcher(queue, self._placement)
        self._without_worker = QueueCapacity(queue.capacity.limits)
        self._retry: asyncio.TimerHandle | None = None
        self._unready_since = 0.0
        self._changed = asyncio.Event()
        self.paused = False

    async def run(self) -> None:
        """Ages what waits and hears who is silent, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            now = loop.time()
            self._listen(now, now - due)
            self.queue.age(now)
            self.worker_changed()

    def _listen(self, now: float, late_s: float) -> None:
        """Move work away from workers that are silent, if there is another worker.

        Work that has not begun also leaves a worker that does not hear this router. late_s: how
        late this process is itself; then it may be that it only did not listen.
        """
        if late_s > _LATE_S:
            for session in self.sessions:
                session.liveness.excuse(now)
        heard = [(session, session.listen(now, self._silence_s)) for session in self.sessions]
        for session, hearing in heard if self.ready else ():
            if hearing == "silent":
                self._moved(session, session.hand_over("the worker has fallen silent"), hearing)
            elif hearing == "deaf":
                self._moved(session, session.take_back("the worker does not hear"), hearing)

    def _moved(self, session: WorkerSession, count: int, why: str) -> None:
        if count:
            logger.warning("worker %s is %s: %d moved", session.worker_id, why, count)
            self._handed_over(count)

    @property
    def clients(self) -> Sequence[WorkerClient]:
        return self._roster.clients

    @property
    def sessions(self) -> list[WorkerSession]:
        return self._roster.sessions

    @property
    def views(self) -> list[WorkerView]:
        return self._roster.views

    @property
    def without_worker(self) -> QueueSize:
        """Requests that wait for the first worker."""
        return self._without_worker.held

    @property
    def shards(self) -> int:
        """GPUs of a worker, which share the model."""
        statuses = (session.status for session in self.sessions)
        return max((status.shards for status in statuses if status is not None), default=1)

    @property
    def adapter_slots(self) -> int:
        """Adapters that the device of each worker may hold; 0 = no worker has said so yet."""
        statuses = (session.status for session in self.sessions)
        return min((status.adapter_slots for status in statuses if status is not None), default=0)

    @property
    def ready(self) -> bool:
        return any(view.able for view in self.views)

    async def until_ready(self, tenant: str, nbytes: int) -> None:
        """Waits for a worker that takes work and for names, with a request of `nbytes` in hand.

        As many may wait here as in the queue. Raises NoWorker when none came in time, QueueFull.
        """
        await self._until(lambda: self.ready and self._names_known.is_set(), tenant, nbytes)

    async def _until(self, is_so: Callable[[], bool], tenant: str, nbytes: int) -> None:
        if is_so():
            return
        if not self.ready:
            self.missed.note(asyncio.get_running_loop().time())
        refusal = self._without_worker.refusal(tenant, 1, nbytes)
        if refusal is not None:
            raise QueueFull(f"no worker is ready, and {refusal[0]}", self._worker_wait_s)
        self._without_worker.add(tenant, nbytes)
        try:
            async with asyncio.timeout(self._worker_wait_s):
                while not is_so():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise self._no_worker() from None
        finally:
            self._without_worker.remove(tenant, nbytes)

    def pause(self) -> None:
        """Holds what waits in the queue until `resume`. What runs goes on."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self.worker_changed()

    async def until_idle(self) -> None:
        """Waits until no sequence runs, or the pause is over."""
        while self.paused and any(view.in_flight for view in self.views):
            self._changed.clear()
            await self._changed.wait()

    async def acquire(self, entry: "Waiting[Any]") -> Placed:
        """Waits in the queue for a worker with room. Raises QueueFull, DeadlinePassed, NoWorker."""
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[Placed] = loop.create_future()
        ticket = self.queue.push(msgspec.structs.replace(entry, payload=granted), loop.time())
        self._grant()
        if not granted.done():
            self._hint(entry.request)
        try:
            return await granted
        except asyncio.CancelledError:
            if not self.queue.cancel(ticket) and _is_granted(granted):
                granted.result().bill.settle()
                granted.result().credit.release()
            raise

    async def until_loads(self) -> None:
        """Waits for a worker as a request does, but not for names. Raises AdapterError."""
        try:
            await self._until(lambda: self.ready, "", 0)
        except (NoWorker, QueueFull) as error:
            raise AdapterError("unavailable", error.message, (), error.retry_after_s) from error

    async def load_adapter(self, origin: Origin, token: Secret | None) -> AdapterManifest:
        """Lets the adapter's home fetch or merge it; where that cannot now, another worker. Without
        any, waits for one. Raises AdapterError.
        """
        failed: AdapterError | None = None
        asked: set[WorkerSession] = set()
        for _ in range(_LOAD_ATTEMPTS):
            session = self._home(origin, asked)
            if session is None and failed is None:
                await self.until_loads()
                asked.clear()
                session = self._home(origin, asked)
            if session is None:
                break
            asked.add(session)
            try:
                return await session.load(origin, token)
            except WorkerLost:
                continue
            except AdapterError as error:
                if error.code != "unavailable":
                    raise
                failed = error
        raise failed or AdapterError("unavailable", "no worker is ready to load it", (), 2.0)

    def _home(self, origin: Origin, asked: Collection[WorkerSession]) -> WorkerSession | None:
        """The worker that should load an adapter, of those that were not asked yet."""
        sessions = [session for session in self.sessions if session not in asked]
        home = self._placement.home(home_key(origin), [session.view for session in sessions])
        return next((session for session in sessions if session.view is home), None)

    def may_get(self, digest: str, error: AdapterError, avoid: Collection[str]) -> bool:
        """Whether some worker but these may have an adapter that one could not get."""
        others = [session for session in self.sessions if session.worker_id not in avoid]
        return any(error.code == "unavailable" or session.knows(digest) for session in others)

    def worker_changed(self) -> None:
        """Ends those whose time is over; hands out credits while there are some."""
        self._changed.set()
        now = asyncio.get_running_loop().time()
        for entry in self.queue.expire(now):
            _fail(entry, DeadlinePassed())
        if self.ready:
            self._unready_since = now
        elif now - self._unready_since >= self._worker_wait_s:
            for entry in self.queue.withdraw_new():
                _fail(entry, self._no_worker())
        self._grant()

    def _grant(self) -> None:
        if self.paused or not len(self.queue):
            return
        sessions = self.sessions
        views = [session.view for session in sessions]
        now = asyncio.get_running_loop().time()
        while (match := self._matcher.next(views, now)) is not None:
            worker = match.decision.worker
            session = next(session for session in sessions if session.view is worker)
            self._hand_out(match, session)
        if self._matcher.holds and self._retry is None:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(_HOLD_TICK_S, self._grant_held)

    def _hand_out(self, match: Match[asyncio.Future[Placed]], session: WorkerSession) -> None:
        entry, reason = match.entry, match.decision.reason
        adapter = entry.request.adapter
        if entry.payload.done():  # its caller left, and has not taken it out of the queue yet
            session.view.leave(adapter)
            match.bill.settle()
            return
        logger.debug(
            "a sequence of %r for adapter %.12s goes to %s: %s",
            entry.tenant,
            adapter,
            session.worker_id,
            reason,
        )
        entry.payload.set_result(Placed(Credit(session, adapter), reason, match.bill))

    def _hint(self, request: PlacementRequest) -> None:
        """Asks an adapter's home to bring the adapter nearer while a sequence waits."""
        views = self.views
        if not request.adapter or any(view.holds(request.adapter) for view in views):
            return
        home = self._placement.home(request.home_key, views)
        if home is not None and request.adapter in home.admitted:
            session = next(session for session in self.sessions if session.view is home)
            with contextlib.suppress(WorkerLost):
                session.prefetch(request.adapter)

    def _grant_held(self) -> None:
        self._retry = None
        self._grant()

    def _no_worker(self) -> NoWorker:
        draining = any(view.draining for view in self.views)
        of_base = f" of {self._base}" if self._base else ""
        state = "every worker{} is draining" if draining else "no worker{} is ready"
        why = state.format(of_base)
        if self.ready:
            why = "the operator's adapters are still being checked"
        return NoWorker(f"{why}; try again soon", 2.0)


def _is_granted(future: asyncio.Future[Placed]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _fail(entry: "Waiting[asyncio.Future[Placed]]", error: Exception) -> None:
    if not entry.payload.done():
        entry.payload.set_exception(error)
