"""The fleet's state: as `GET /v1/fleet` shows it, and as gauges of this router.

It is collected on request: for the route at most once a second, for gauges at each scrape. Nothing
is measured while nobody looks.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import get_args

import msgspec
from msgspec import UNSET

from loraplex.adapters.common.meters import Labels, Row
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
from loraplex.router.batches.desk import BatchDesk
from loraplex.router.call import RequestError
from loraplex.router.generation.dispatcher import Dispatcher
from loraplex.router.names.aliases import Aliases
from loraplex.router.names.catalog import Catalog
from loraplex.router.names.served import OwnedName
from loraplex.router.operations.declarations import Declarations
from loraplex.router.policy.quota import Reason as QuotaReason
from loraplex.router.policy.rollout import VersionState
from loraplex.router.shared.sharing import Sharing
from loraplex.router.shared_tasks import SharedTasks
from loraplex.router.telemetry.caller_errors import CallerErrors
from loraplex.router.telemetry.metrics import RouterMetrics
from loraplex.router.telemetry.top_adapters import Count
from loraplex.router.tenancy.metering import MODES
from loraplex.router.tenancy.tenancy import Tenancy
from loraplex.router.version import VERSION
from loraplex.router.workers.bases import BaseModel, Bases
from loraplex.router.workers.client import WorkerClient
from loraplex.router.workers.fleet import Roster
from loraplex.router.workers.session import WorkerLost, WorkerSession
from loraplex.server.protocol import AdapterPlace

LOOK_EVERY_S = 1.0
LOOK_TIMEOUT_S = 0.8
MAX_WATCHERS = 64

# What a worker is to this router.
WORKER_STATES = ("ready", "starting", "draining", "disconnected")


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


def watch_state(
    metrics: RouterMetrics,
    bases: Bases,
    roster: Roster,
    catalog: Catalog,
    dispatcher: Dispatcher,
) -> None:
    """Registers metrics of requests, queue, workers and adapters, once, at the build."""
    meters = metrics.meters
    text = "Requests being answered"
    if bases.have_names:
        _watch_bases(metrics, bases, "requests_running", text, lambda base: base.running)
    else:
        meters.watch("requests_running", text, lambda: dispatcher.running)
    for name, text, read in (
        ("queue_sequences", "Sequences waiting for a worker", lambda b: len(b.fleet.queue)),
        (
            "queue_bytes",
            "Bytes of the prompts that wait",
            lambda b: b.fleet.queue.capacity.held.nbytes,
        ),
        (
            "queue_limit_sequences",
            "Sequences that may wait",
            lambda b: b.fleet.queue.capacity.limits.count,
        ),
        (
            "waiting_room_requests",
            "Requests waiting for any worker at all",
            lambda b: b.fleet.without_worker.count,
        ),
    ):
        _watch_bases(metrics, bases, name, text, read)
    if bases.have_names:
        text = "Requests of the last minute that found no worker of their base"
        _watch_bases(metrics, bases, "base_wanted", text, _wanted)
    meters.watch(
        "adapters_registered",
        "Names of adapters in service",
        lambda: catalog.rules.aliases.in_service,
    )
    meters.rows(
        "adapter_versions",
        "gauge",
        "Versions of adapters in rollouts, by state",
        {"state": get_args(VersionState)},
        lambda: _versions(catalog.rules.aliases),
    )
    _watch_workers(metrics, bases, roster)
    _watch_adapters(metrics, catalog.rules.aliases)


def _watch_bases(
    metrics: RouterMetrics, bases: Bases, name: str, text: str, read: Callable[[BaseModel], float]
) -> None:
    """Declares a gauge, with a series for each base that has a name."""
    labels: Labels = {"base": ()} if bases.have_names else {}
    metrics.meters.rows(
        name,
        "gauge",
        text,
        labels,
        lambda: [((base.name,) if labels else (), read(base)) for base in bases],
    )


def _wanted(base: BaseModel) -> float:
    return base.fleet.missed.count(asyncio.get_running_loop().time())


def _watch_adapters(metrics: RouterMetrics, aliases: Aliases) -> None:
    """Labels are registered names, as many as `top_adapters` shows; besides `_base`, `_other`."""
    top = metrics.top_adapters

    def is_registered(name: OwnedName) -> bool:
        registration = aliases.get(name)
        return registration is not None and registration.state != "deleted"

    def rows(what: Count) -> Iterable[Row]:
        top.settle(time.monotonic(), is_registered)
        return top.rows(what)

    texts: tuple[tuple[Count, str], ...] = (
        ("requests", "Requests that began"),
        ("errors", "Requests that failed after they began"),
        ("prompt_tokens", "Prompt tokens"),
        ("generated_tokens", "Tokens received from workers"),
        ("device_seconds", "Seconds of devices in steps"),
        ("cost", "Money, in the currency of --prices"),
    )
    for what, text in texts:
        metrics.meters.rows(
            f"adapter_{what}",
            "counter",
            f"{text}, by adapter: `_base`, the registered ones with most tokens, `_other`",
            {"adapter": ()},
            partial(rows, what),
        )
    metrics.meters.rows(
        "adapter_info",
        "gauge",
        "1 for each adapter that has series of its own: what it is",
        {"adapter": (), "state": (), "rank": (), "pinned": ()},
        lambda: _infos(aliases, top.shown),
    )


def watch_declared(metrics: RouterMetrics, aliases: Aliases, declarations: Declarations) -> None:
    """Registers the gauge of declared adapters that cannot be served, once, at the build."""

    def broken() -> Iterator[Row]:
        yield ("option",), len(aliases.marked("broken option"))
        yield ("file",), declarations.broken("file")
        yield ("folder",), declarations.broken("folder")

    metrics.meters.rows(
        "adapters_broken",
        "gauge",
        "Declared adapters that cannot be served as declared: --adapter's, the adapters file's,"
        " watched folders'",
        {"origin": ("option", "file", "folder")},
        broken,
    )


def _versions(aliases: Aliases) -> Iterator[Row]:
    counts = dict.fromkeys(get_args(VersionState), 0)
    for registration in aliases.marked("rollout"):
        if registration.rollout is not None:
            for version in registration.rollout.versions:
                counts[version.state] += 1
    return (((state,), count) for state, count in counts.items())


def _infos(aliases: Aliases, names: Iterable[OwnedName]) -> Iterator[Row]:
    for name in names:
        registration = aliases.get(name)
        if registration is not None:
            content = registration.content
            rank = "" if content is None else str(max(content.manifest.ranks, default=0))
            pinned = str(registration.pinned).lower()
            yield (str(name), registration.shown_state, rank, pinned), 1.0


def watch_sharing(metrics: RouterMetrics, sharing: Sharing, tenancy: Tenancy) -> None:
    """Registers metrics of Redis, sharing routers, refusals and keys, once, at the build."""
    meters, admission = metrics.meters, tenancy.metering.admission
    meters.watch("redis_up", "Whether Redis answers, or none is shared", lambda: sharing.is_up)
    meters.watch("routers", "Live routers that share quotas", lambda: admission.routers)
    meters.rows(
        "quota_refusals",
        "counter",
        "Requests refused for a quota, by what was used up",
        {"reason": get_args(QuotaReason)},
        lambda: (((reason,), count) for reason, count in admission.refusals.items()),
    )
    meters.watch("keys", "Keys that are known", lambda: len(tenancy.keyring.all()))
    meters.rows(
        "quota_mode",
        "gauge",
        "Where quotas are counted now: 1 for the mode in force",
        {"mode": MODES},
        lambda: (((mode,), mode == admission.mode) for mode in MODES),
    )


def watch_batches(metrics: RouterMetrics, desk: BatchDesk | None) -> None:
    """Declares the metrics of batches: all of this router's, but what is stored."""
    meters = metrics.meters

    def read(of: Callable[[BatchDesk], float]) -> Callable[[], float]:
        return lambda: 0.0 if desk is None else of(desk)

    for name, text, value in (
        ("batches_running", "Batches that this router runs", lambda d: d.keeper.running),
        ("batch_rows", "Sequences of batches that it runs", lambda d: d.keeper.rows.running),
        ("batch_rows_limit", "As many as may run now", lambda d: d.keeper.rows.most),
        ("files", "Files in --files-dir", lambda d: d.keeper.stored.files),
        ("files_bytes", "What is in --files-dir, in bytes", lambda d: d.keeper.stored.nbytes),
    ):
        meters.watch(name, text, read(value))


def _watch_workers(metrics: RouterMetrics, bases: Bases, roster: Roster) -> None:
    """Labels are the ids of connected workers: as many as there are."""
    meters = metrics.meters

    def each(read: Callable[[WorkerSession], float]) -> Callable[[], Iterable[Row]]:
        return lambda: {(s.worker_id,): read(s) for s in roster.sessions}.items()

    def able(base: BaseModel) -> float:
        return sum(view.able for view in base.fleet.views)

    _watch_bases(metrics, bases, "workers_ready", "Workers that take work", able)
    meters.rows(
        "workers",
        "gauge",
        "Workers that this router knows, by state",
        {"state": WORKER_STATES},
        lambda: _states(roster),
    )
    for name, text, read in (
        ("sequences", "Sequences that this router has there", lambda s: s.view.in_flight),
        ("credits", "Sequences that it may have there", lambda s: s.view.credits),
        ("status_age_seconds", "Since a worker reported its state", lambda s: s.silent_s),
    ):
        meters.rows(f"link_{name}", "gauge", text, {"worker": ()}, each(read))


def _states(roster: Roster) -> Iterator[Row]:
    counts = dict.fromkeys(WORKER_STATES, 0)
    for view in roster.views:
        state = "draining" if view.draining else "ready" if view.ready else "starting"
        counts[state] += 1
    counts["disconnected"] = len(roster.clients) - len(roster.views)
    return (((state,), count) for state, count in counts.items())
