"""The fleet as `GET /v1/fleet` shows it: collected on request, at most once a second.

Nothing is measured while nobody looks.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

import msgspec
from msgspec import UNSET

from loraplex.router.api.admin.fleet import (
    MAX_ADAPTERS,
    BaseState,
    FleetObject,
    PlaceObject,
    RegisteredObject,
    RouterObject,
    WorkerObject,
    WorkObject,
    base_object,
    place_objects,
    registered_objects,
    worker_object,
)
from loraplex.router.call import RequestError
from loraplex.router.generation.dispatcher import Dispatcher
from loraplex.router.names.catalog import Catalog
from loraplex.router.operations.declarations import Declarations
from loraplex.router.shared_tasks import SharedTasks
from loraplex.router.telemetry.caller_errors import CallerErrors
from loraplex.router.version import VERSION
from loraplex.router.workers.base_model import BaseModel
from loraplex.router.workers.bases import Bases
from loraplex.router.workers.client import WorkerClient
from loraplex.router.workers.roster import Roster
from loraplex.router.workers.session import WorkerLost, WorkerSession
from loraplex.server.protocol import AdapterPlace

LOOK_EVERY_S = 1.0
LOOK_TIMEOUT_S = 0.8
MAX_WATCHERS = 64


class FleetWatch:
    """Watches the fleet: `look` is the whole picture, `Changes` what a stream sends of it."""

    def __init__(
        self,
        bases: Bases,
        roster: Roster,
        catalog: Catalog,
        dispatcher: Dispatcher,
        declarations: Declarations,
        errors: CallerErrors,
        work: Callable[[], WorkObject],
    ) -> None:
        self.closing = asyncio.Event()
        self._bases = bases
        self._roster = roster
        self._catalog = catalog
        self._dispatcher = dispatcher
        self._declarations = declarations
        self._errors = errors
        self._work = work
        self._watchers = 0
        self._latest: FleetObject | None = None
        self._looked_at = 0.0
        self._looking = SharedTasks[None, FleetObject]()
        # What was made of a value, kept as long as the value stays the same.
        self._places: dict[str, tuple[tuple[AdapterPlace, ...], tuple[PlaceObject, ...]]] = {}
        self._registered: tuple[int, tuple[RegisteredObject, ...]] = (-1, ())

    def close(self) -> None:
        """Streams end: the router is about to stop."""
        self.closing.set()

    def enter(self) -> Callable[[], None]:
        """Counts a stream; call the result when it is over. Raises RequestError."""
        if self._watchers >= MAX_WATCHERS:
            raise RequestError("overloaded", f"{self._watchers} streams watch the fleet already")
        self._watchers += 1
        return self._leave

    def _leave(self) -> None:
        self._watchers -= 1

    async def look(self) -> FleetObject:
        """The fleet, at most a second old; workers that do not answer in time as they were."""
        now = asyncio.get_running_loop().time()
        if self._latest is not None and now - self._looked_at < LOOK_EVERY_S / 2:
            return self._latest
        return await self._looking.run(None, self._look)

    async def _look(self) -> FleetObject:
        looks = [asyncio.ensure_future(s.pictures.look()) for s in self._roster.sessions]
        if looks:
            _, late = await asyncio.wait(looks, timeout=LOOK_TIMEOUT_S)
            for task in late:
                task.cancel()
            for done in await asyncio.gather(*looks, return_exceptions=True):
                if isinstance(done, Exception) and not isinstance(done, WorkerLost):
                    raise done
        self._latest = self._compose()
        self._looked_at = asyncio.get_running_loop().time()
        return self._latest

    def _compose(self) -> FleetObject:
        text, queues = self._bases.first.text, [fleet.queue for fleet in self._bases.fleets]
        aliases = self._catalog.rules.aliases
        if aliases.changes != self._registered[0]:
            shown = registered_objects(aliases.first(MAX_ADAPTERS))
            same = shown == self._registered[1]
            self._registered = (aliases.changes, self._registered[1] if same else shown)
        names = self._catalog.names()
        workers = tuple(self._worker(client, names) for client in self._roster.clients)
        return FleetObject(
            time=time.time(),
            version=VERSION,
            base=None if text is None else base_object(text.card, bool(text.templates)),
            bases=tuple(map(base_state, self._bases)) if self._bases.are_several else UNSET,
            router=RouterObject(
                queue=sum(map(len, queues)),
                max_queue=sum(queue.capacity.limits.count for queue in queues),
                queue_bytes=sum(queue.capacity.held.nbytes for queue in queues),
                running=self._dispatcher.running,
                max_requests=self._dispatcher.max_requests,
            ),
            work=self._work(),
            workers=workers,
            adapters=self._registered[1],
            adapters_left_out=max(0, aliases.count - MAX_ADAPTERS),
            problems=self._declarations.problems,
            errors=self._errors.newest_first,
        )

    def _worker(self, client: WorkerClient, names: Mapping[str, str]) -> WorkerObject:
        session = client.session
        if session is None:
            self._places.pop(client.url, None)
            base = client.base or UNSET
            return WorkerObject(client.url, base=base, problem=client.problem, places=())
        view = session.view
        worker = WorkerObject(
            client.url,
            session.worker_id,
            session.base or UNSET,
            "starting",
            in_flight=view.in_flight,
            credits=view.credits,
            places=(),
        )
        places = self._places_of(client.url, session, names)
        return worker_object(worker, session.status, session.pictures.latest, places)

    def _places_of(
        self, url: str, session: WorkerSession, names: Mapping[str, str]
    ) -> tuple[PlaceObject, ...]:
        places = session.pictures.places
        before = self._places.get(url)
        if before is None or before[0] is not places:
            before = self._places[url] = (places, place_objects(places, names))
        return before[1]


class Changes:
    """One stream's view: what it already received is left out."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[PlaceObject, ...] | None] = {}
        self._adapters: tuple[RegisteredObject, ...] | None = None

    def of(self, fleet: FleetObject) -> FleetObject:
        workers = tuple(
            msgspec.structs.replace(worker, places=None)
            if worker.url in self._places and self._places[worker.url] is worker.places
            else worker
            for worker in fleet.workers
        )
        self._places = {worker.url: worker.places for worker in fleet.workers}
        same = self._adapters is fleet.adapters
        self._adapters = fleet.adapters
        return msgspec.structs.replace(
            fleet, workers=workers, adapters=None if same else fleet.adapters
        )


async def next_look(closing: asyncio.Event) -> bool:
    """Waits until it is time to look again. False: the router is about to stop."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LOOK_EVERY_S):
            await closing.wait()
    return not closing.is_set()


def base_state(base: BaseModel) -> BaseState:
    """Describes one of several bases."""
    text, queue = base.text, base.fleet.queue
    return BaseState(
        name=base.name,
        model=None if text is None else base_object(text.card, bool(text.templates)),
        queue=len(queue),
        waiting=base.fleet.without_worker.count,
        workers=len(base.fleet.clients),
        workers_ready=sum(view.able for view in base.fleet.views),
    )
