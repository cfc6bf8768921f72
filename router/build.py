"""Builds a router's parts from its config, each after those that it needs."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry

from loraplex.adapters.common.meters import Meters
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.uploads.shelf import UploadShelf, upload_folder
from loraplex.router.background import Background
from loraplex.router.batches.build import make_batches
from loraplex.router.batches.desk import BatchDesk
from loraplex.router.call import Secret
from loraplex.router.config import RouterConfig, RouterConfigError
from loraplex.router.files.store import DiskShelf, FileStore
from loraplex.router.generation.answerer import Answerer
from loraplex.router.generation.dispatcher import Dispatcher
from loraplex.router.generation.division import AnswerParts
from loraplex.router.generation.prompts import PromptMakers
from loraplex.router.generation.sequence import Retries
from loraplex.router.generation.tokenise import Tokeniser
from loraplex.router.http.body import BodyLimits
from loraplex.router.http.idempotency import Idempotency
from loraplex.router.names.aliases import Aliases
from loraplex.router.names.catalog import Catalog, CatalogRules
from loraplex.router.names.rollout_tally import RolloutTally
from loraplex.router.names.use import AdapterUse
from loraplex.router.operations.admin import AdapterAdmin, DeclaredCheck, OrphanedUnloads
from loraplex.router.operations.compat_metrics import COMPAT_PREFIX, CompatMetrics
from loraplex.router.operations.declarations import AdaptersFile, Declarations, DeclarationWatch
from loraplex.router.operations.feedback import Feedback
from loraplex.router.operations.fleet_watch import (
    FleetWatch,
    watch_batches,
    watch_declared,
    watch_sharing,
    watch_state,
)
from loraplex.router.operations.folder_watch import WatchedFolders
from loraplex.router.operations.membership import Membership
from loraplex.router.operations.other_work import work_of
from loraplex.router.operations.pins import Pins
from loraplex.router.operations.rollouts import RolloutKeeper, Rollouts
from loraplex.router.operations.workers import AdapterWorkers
from loraplex.router.pictures.fetcher import PictureFetcher
from loraplex.router.pictures.held import HeldPictures
from loraplex.router.pictures.reader import PictureReader
from loraplex.router.pictures.uploaded import UploadedPictures
from loraplex.router.policy.front_door import FrontDoor
from loraplex.router.policy.placement.attempts import Quarantine, RetryBudget
from loraplex.router.policy.queue.queue_limits import QueueLimits
from loraplex.router.policy.queue.waiting import WaitingQueue
from loraplex.router.responses.desk import ResponseDesk
from loraplex.router.service import Service
from loraplex.router.shared.sharing import Sharing, make_sharing
from loraplex.router.start_check import base_names, blaming, check_workers, declared_adapters
from loraplex.router.telemetry.caller_errors import CallerErrors
from loraplex.router.telemetry.metrics import RouterMetrics
from loraplex.router.telemetry.tracing import Tracing, make_tracing
from loraplex.router.tenancy.keys import KeysFileError
from loraplex.router.tenancy.price_file import PricesError
from loraplex.router.tenancy.tenancy import ExposureError, Tenancy, check_exposure, make_tenancy
from loraplex.router.text.template_sandbox import TemplateSandbox
from loraplex.router.text.turn_taking import TurnTaking
from loraplex.router.uploads.courier import UploadCourier
from loraplex.router.uploads.receiver import UploadReceiver
from loraplex.router.workers.bases import BaseModel, Bases
from loraplex.router.workers.client import CardStore, WorkerClient
from loraplex.router.workers.fleet import Connections, Fleet, Roster
from loraplex.server.protocol import MAX_PICTURE_BYTES

_HUB_THREADS = 8
_FREE_RETRIES_PER_S = 10.0
# Retries after lost workers: what a request pays for, and how many at once.
_RETRY_SHARE = 0.2
_RETRY_BURST = 512


class Hub(Protocol):
    """Finds the commit behind a reference. May block; is called in a thread."""

    def resolve(self, ref: AdapterRef, token: str | None) -> AdapterRef:
        """Pins a reference to a commit. Raises AdapterError."""
        ...


@dataclass(frozen=True, slots=True)
class _Ground:
    """Parts that the other parts need."""

    config: RouterConfig
    router_id: str
    sharing: Sharing
    tenancy: Tenancy
    metrics: RouterMetrics
    roster: Roster
    names_known: asyncio.Event
    bases: Bases
    catalog: Catalog
    use: AdapterUse
    sandbox: TemplateSandbox
    reader: PictureReader
    pictures: HeldPictures
    background: Background
    errors: CallerErrors
    body_limits: BodyLimits
    shelf: UploadShelf


def build_service(config: RouterConfig, registry: CollectorRegistry, hub: Hub) -> Service:
    """Makes the parts of a router. Nothing runs before `Service.run`. Raises RouterConfigError."""
    check_workers(config)
    ground = _ground(config, registry, hub)
    admin = _admin(ground)
    rollouts = Rollouts(admin, lambda by: ground.metrics.rollbacks.labels(by).inc())
    declarations = Declarations(_watches(config, admin, rollouts), ground.names_known)
    tokeniser = _tokeniser(ground)
    dispatcher = _dispatcher(ground, tokeniser)
    batches = _batches(ground, dispatcher)
    answerer = _answerer(ground, dispatcher)
    service = Service(
        config=config,
        router_id=ground.router_id,
        sharing=ground.sharing,
        tenancy=ground.tenancy,
        metrics=ground.metrics,
        bases=ground.bases,
        catalog=ground.catalog,
        admin=admin,
        rollouts=rollouts,
        keeper=_keeper(ground, rollouts),
        feedback=Feedback(ground.sharing.store, ground.catalog.rules.aliases, ground.metrics),
        declarations=declarations,
        roster=ground.roster,
        connections=_connections(ground, admin),
        tokeniser=tokeniser,
        dispatcher=dispatcher,
        answerer=answerer,
        sandbox=ground.sandbox,
        errors=ground.errors,
        watch=_watch(ground, dispatcher, declarations, batches),
        tracing=_tracing(config),
        front_door=FrontDoor(config.max_connections),
        idempotency=_idempotency(ground),
        background=ground.background,
        orphaned_unloads=OrphanedUnloads(ground.sharing.store, ground.catalog.rules.aliases, admin),
        declared_check=_declared_check(ground),
        batches=batches,
        responses=_responses(ground, answerer),
        uploads=_uploads(ground),
    )
    _declare_gauges(service, registry)
    return service


def _ground(config: RouterConfig, registry: CollectorRegistry, hub: Hub) -> _Ground:
    router_id = uuid.uuid4().hex
    sharing = _sharing(config)
    tenancy = _tenancy(config, sharing, router_id)
    metrics = RouterMetrics(registry, config.metrics_adapters, base_names(config))
    roster, names_known = Roster(), asyncio.Event()
    names_known.set()
    bases = _bases(config, roster, names_known, metrics.handed_over.inc)
    catalog = Catalog(
        rules=_rules(config, sharing, Pins(roster)),
        pin=_Pinner(hub).pin,
        load=bases.load,
        clock=_now,
        unix_time=time.time,
    )
    return _Ground(
        config=config,
        router_id=router_id,
        sharing=sharing,
        tenancy=tenancy,
        metrics=metrics,
        roster=roster,
        names_known=names_known,
        bases=bases,
        catalog=catalog,
        use=AdapterUse(time.time),
        sandbox=TemplateSandbox(),
        reader=_reader(config),
        pictures=HeldPictures(),
        background=Background(),
        errors=CallerErrors(metrics),
        body_limits=BodyLimits(config.max_body_bytes, config.body_timeout_s),
        shelf=_shelf(config),
    )


def _bases(
    config: RouterConfig,
    roster: Roster,
    names_known: asyncio.Event,
    handed_over: Callable[[int], None],
) -> Bases:
    turns = TurnTaking()

    def base(name: str) -> BaseModel:
        own = roster.of(name) if name else roster
        fleet = Fleet(
            queue=WaitingQueue(_queue_limits(config)),
            roster=own,
            worker_wait_s=config.worker_wait_s,
            silence_s=config.worker_silence_s,
            handed_over=handed_over,
            names_known=names_known,
            base=name,
        )
        return BaseModel(config, own, fleet, turns, name)

    return Bases([base(name) for name in base_names(config)])


def _reader(config: RouterConfig) -> PictureReader:
    folder = config.files_dir
    store = None if folder is None else FileStore(folder.expanduser())
    most = max(config.max_body_bytes, MAX_PICTURE_BYTES)
    try:
        return PictureReader(PictureFetcher(config.picture_hosts), UploadedPictures(store, most))
    except AdapterError as error:
        raise RouterConfigError(str(error)) from None


def _shelf(config: RouterConfig) -> UploadShelf:
    return UploadShelf(upload_folder(config.upload.store, config.cache_dir), config.upload.disk)


def _uploads(ground: _Ground) -> UploadReceiver:
    aliases, config = ground.catalog.rules.aliases, ground.config
    return UploadReceiver(
        ground.shelf, config.upload.max_bytes, config.body_timeout_s, aliases.uploads
    )


def _admin(ground: _Ground) -> AdapterAdmin:
    workers = AdapterWorkers(ground.catalog, ground.bases, ground.config.adapter_timeout_s)
    is_taken = ground.bases.is_named
    return AdapterAdmin(ground.catalog, workers, ground.use, is_taken, ground.router_id)


def _dispatcher(ground: _Ground, tokeniser: Tokeniser) -> Dispatcher:
    return Dispatcher(
        bases=ground.bases,
        catalog=ground.catalog,
        tokeniser=tokeniser,
        config=ground.config,
        use=ground.use,
        pictures=ground.pictures,
        retries=_retries(ground.config),
    )


def _batches(ground: _Ground, dispatcher: Dispatcher) -> BatchDesk | None:
    config = ground.config
    if config.files_dir is None:
        return None
    return make_batches(
        config=config,
        folder=config.files_dir,
        sharing=ground.sharing,
        tenancy=ground.tenancy,
        dispatcher=dispatcher,
        metrics=ground.metrics,
        router_id=ground.router_id,
    )


def _responses(ground: _Ground, answerer: Answerer) -> ResponseDesk | None:
    config, shelf = ground.config, ground.sharing.shelf
    if shelf is None and config.files_dir is not None:
        shelf = DiskShelf(FileStore(config.files_dir.expanduser()))
    if shelf is None or not config.responses.keep_s:
        return None
    limits, stop_s = config.responses, config.drain_timeout_s
    return ResponseDesk(shelf, limits, answerer, stop_s, time.time)


def _watch(
    ground: _Ground,
    dispatcher: Dispatcher,
    declarations: Declarations,
    batches: BatchDesk | None,
) -> FleetWatch:
    return FleetWatch(
        ground.bases,
        ground.roster,
        ground.catalog,
        dispatcher,
        declarations,
        ground.errors,
        lambda: work_of(ground.metrics, batches),
    )


def _answerer(ground: _Ground, dispatcher: Dispatcher) -> Answerer:
    return Answerer(
        dispatcher=dispatcher,
        tenancy=ground.tenancy,
        body_limits=ground.body_limits,
        metrics=ground.metrics,
        errors=ground.errors,
    )


def _declare_gauges(service: Service, registry: CollectorRegistry) -> None:
    """Metrics that are read at each scrape."""
    metrics, door = service.metrics, service.front_door
    watch_state(metrics, service.bases, service.roster, service.catalog, service.dispatcher)
    watch_declared(metrics, service.catalog.rules.aliases, service.declarations)
    watch_sharing(metrics, service.sharing, service.tenancy)
    watch_batches(metrics, service.batches)
    if service.config.metrics_compat:
        aliases = service.catalog.rules.aliases
        compat = CompatMetrics(service.bases, aliases, service.admin.use)
        compat.declare(Meters(registry, COMPAT_PREFIX), metrics)
    metrics.meters.watch("connections_open", "Connections of clients", lambda: door.open)


def _connections(ground: _Ground, admin: AdapterAdmin) -> Connections:
    new_client = partial(
        WorkerClient,
        router_id=ground.router_id,
        secret=ground.config.secret,
        cards=CardStore(ground.config.cache_dir),
        listener=Membership(ground.bases, ground.roster, admin, ground.background),
        courier=UploadCourier(ground.shelf),
        pictures=ground.pictures,
    )
    return Connections(ground.roster, ground.config.workers, new_client)


def _idempotency(ground: _Ground) -> Idempotency:
    return Idempotency(
        ground.sharing.store,
        ground.tenancy.identify,
        ground.router_id,
        ground.config.idempotency_ttl_s,
        ground.body_limits,
        strict=ground.config.quota_outage == "closed",
    )


def _tokeniser(ground: _Ground) -> Tokeniser:
    config = ground.config
    parts = AnswerParts(config.tool_format, config.reasoning_format)
    return Tokeniser(PromptMakers(ground.sandbox, ground.reader), parts, config.grammar)


def _keeper(ground: _Ground, rollouts: Rollouts) -> RolloutKeeper:
    store = ground.sharing.store
    return RolloutKeeper(
        store,
        ground.router_id,
        ground.catalog.rules.aliases,
        rollouts,
        RolloutTally(store, ground.metrics.outcomes, time.time),
        ground.tenancy.audit.record,
        time.time,
    )


def _tracing(config: RouterConfig) -> Tracing:
    with blaming("--otlp-endpoint", ValueError):
        return make_tracing(config)


def _sharing(config: RouterConfig) -> Sharing:
    with blaming("--redis", ValueError):
        return make_sharing(config)


def _retries(config: RouterConfig) -> Retries:
    budget = RetryBudget(_RETRY_SHARE, _FREE_RETRIES_PER_S, _RETRY_BURST, time.monotonic())
    return Retries(budget, Quarantine(config.quarantine_s))


def _queue_limits(config: RouterConfig) -> QueueLimits:
    return QueueLimits(
        config.max_queue,
        config.max_queue_bytes,
        config.max_tenant_queue,
        config.max_tenant_queue_bytes,
    )


def _tenancy(config: RouterConfig, sharing: Sharing, router_id: str) -> Tenancy:
    with blaming("--host", ExposureError):
        check_exposure(config)
    with (
        blaming(f"--keys-file {config.keys_file}", KeysFileError),
        blaming(f"--prices {config.prices}", PricesError),
    ):
        return make_tenancy(config, sharing, router_id)


def _watches(
    config: RouterConfig, admin: AdapterAdmin, rollouts: Rollouts
) -> Iterator[DeclarationWatch]:
    file, folders, clock = config.adapters_file, config.watch_folders, time.monotonic
    if file is not None:
        yield AdaptersFile(file, admin, rollouts, config.default_source, clock)
    if folders:
        yield WatchedFolders(folders, admin, clock)


def _declared_check(ground: _Ground) -> DeclaredCheck:
    names = [registration.name for registration in declared_adapters(ground.config)]
    return DeclaredCheck(ground.catalog, names, lambda: ground.bases.ready)


class _Pinner:
    """Pins references to the Hub, in threads of its own: it may be slow."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._threads = ThreadPoolExecutor(_HUB_THREADS, "hub")

    async def pin(self, ref: AdapterRef, token: Secret | None) -> AdapterRef:
        """Pins a reference to the Hub to a commit. Other sources' references are the worker's to
        look at. Raises AdapterError."""
        if ref.source != "hub":
            return ref
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._hub.resolve, ref, token)


def _rules(config: RouterConfig, sharing: Sharing, pins: Pins) -> CatalogRules:
    declared = declared_adapters(config)
    rules = CatalogRules(
        aliases=Aliases(
            sharing.store, sharing.link is not None, declared, pins, base_names(config)
        ),
        hub_owners=config.hub_owners,
        hub_token=Secret(config.hub_token) if config.hub_token else None,
        share_hub_token=config.share_hub_token,
        ttl_s=config.adapter_ttl_s,
        timeout_s=config.adapter_timeout_s,
    )
    for registration in declared:
        try:
            rules.check_owner(registration.ref)
        except AdapterError as error:
            raise RouterConfigError(f"--adapter {registration.name}: {error.message}") from error
    return rules


def _now() -> float:
    return asyncio.get_running_loop().time()
