"""Builds a router's parts from its config, and runs those that live."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry

from adapters.common.meters import Meters, watch_loop_lag
from adapters.errors import AdapterError
from adapters.ref import AdapterRef
from router.background import Background
from router.call import Secret
from router.config import ConfigError, RouterConfig
from router.generation.answer_parts import AnswerParts
from router.generation.answerer import Answerer
from router.generation.dispatcher import Dispatcher, DispatchLimits
from router.generation.sequence import Retries
from router.http.body import BodyLimits
from router.http.idempotency import Idempotency
from router.http.intake import Intake
from router.names.aliases import Aliases
from router.names.catalog import Catalog, CatalogRules
from router.names.rollout_tally import RolloutTally
from router.names.use import AdapterUse
from router.operations.admin import AdapterAdmin
from router.operations.compat_metrics import COMPAT_PREFIX, CompatMetrics
from router.operations.declared_check import DeclaredCheck
from router.operations.file_watch import AdaptersFile
from router.operations.fleet_watch import FleetWatch
from router.operations.rollout_keeper import RolloutKeeper
from router.operations.rollouts import Rollouts
from router.operations.state_metrics import watch_sharing, watch_state
from router.operations.unload_heir import UnloadHeir
from router.operations.workers import AdapterWorkers
from router.policy.front_door import FrontDoor
from router.policy.placement.attempts import Quarantine, RetryBudget
from router.policy.queue.queue_limits import QueueLimits
from router.policy.queue.waiting import WaitingQueue
from router.shared.sharing import Sharing, make_sharing
from router.shared.store import StoreDown
from router.start_check import blaming, check_workers, declared_adapters, saved_card
from router.telemetry.metrics import RouterMetrics
from router.telemetry.told_errors import ToldErrors
from router.telemetry.tracing import Tracing, make_tracing
from router.tenancy.keys_file import KeysFileError
from router.tenancy.tenancy import ExposureError, Tenancy, check_exposure, make_tenancy
from router.text.template_sandbox import TemplateSandbox
from router.workers.base_model import BaseModel
from router.workers.discovery import Discovery
from router.workers.fleet import Fleet
from router.workers.model_card import CardStore
from server.protocol import ModelCard

_HUB_THREADS = 8
_START_POLL_S = 0.02
_START_POLLS = 100
_FREE_RETRIES_PER_S = 10.0
# A few milliseconds of an event loop's iteration.
_BEGIN_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Service:
    """The parts that routes need."""

    config: RouterConfig
    base: BaseModel
    catalog: Catalog
    admin: AdapterAdmin
    rollouts: Rollouts
    keeper: RolloutKeeper
    adapters_file: AdaptersFile | None
    fleet: Fleet
    dispatcher: Dispatcher
    answerer: Answerer
    metrics: RouterMetrics
    sandbox: TemplateSandbox
    saved_card: ModelCard | None
    router_id: str
    sharing: Sharing
    tenancy: Tenancy
    errors: ToldErrors
    watch: FleetWatch
    tracing: Tracing
    front_door: FrontDoor
    idempotency: Idempotency
    background: Background
    unload_heir: UnloadHeir
    declared_check: DeclaredCheck

    def why_not_ready(self) -> str | None:
        """None = new requests are answered. An adapter that failed holds nobody up."""
        if self.dispatcher.draining:
            return "the router is being stopped"
        if not self.fleet.ready or self.base.text is None:
            return "no worker is ready"
        if self.adapters_file is not None and not self.adapters_file.applied.is_set():
            return "the adapters of --adapters-file are being checked"
        return None

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Connected to the workers while inside. Raises ConfigError for a bad model card."""
        if self.saved_card is not None:
            refusal = await self.base.adopt(self.saved_card)
            if refusal is not None:
                raise ConfigError(f"--model-card: {refusal}")
        cards = CardStore(self.config.cache_dir)
        self.fleet.connect(self.config.workers, self.router_id, self.config.secret, cards)
        try:
            background = self.background
            async with self.sharing.run(background), self.tenancy.run(background), self._tasks():
                await self._registered_adapters()
                await self._first_worker()
                yield
        finally:
            await self.sandbox.close()
            await asyncio.to_thread(self.dispatcher.shapes.close)
            await asyncio.to_thread(self.tracing.close)

    @asynccontextmanager
    async def _tasks(self) -> AsyncIterator[None]:
        """They are over before the store that they ask is closed."""
        works = [
            self.fleet.run(),
            watch_loop_lag(self.metrics.loop_lag_s.observe),
            self.catalog.rules.aliases.run(),
            self.keeper.run(),
            self.unload_heir.run(),
        ]
        if self.sharing.link is not None:
            works.append(Discovery(self.sharing.store, self.fleet, self.config.secret).run())
        if self.adapters_file is not None:
            works.append(self.adapters_file.run())
        if self.config.check_adapters == "start":
            works.append(self.declared_check.run())
        try:
            async with self.background.running(*works):
                yield
        finally:
            await self.admin.close()

    async def _registered_adapters(self) -> None:
        """Names that others registered are known before anybody asks, if Redis soon answers."""
        aliases = self.catalog.rules.aliases
        for _ in range(_START_POLLS):
            with contextlib.suppress(StoreDown):
                await aliases.refresh()
            if aliases.is_known:
                return
            await asyncio.sleep(_START_POLL_S)

    async def _first_worker(self) -> None:
        """What comes before a restarted router knows its workers waits for them, for a moment."""
        for _ in range(_START_POLLS if self.fleet.clients or self.sharing.link else 0):
            if self.fleet.ready and self.base.text is not None:
                return
            await asyncio.sleep(_START_POLL_S)


class Hub(Protocol):
    """Finds the commit behind a reference. May block; is called in a thread."""

    def resolve(self, ref: AdapterRef, token: str | None) -> AdapterRef:
        """Raises AdapterError."""
        ...


def build_service(config: RouterConfig, registry: CollectorRegistry, hub: Hub) -> Service:
    """Raises ConfigError."""
    check_workers(config)
    router_id = uuid.uuid4().hex
    sharing = _sharing(config)
    tenancy = _tenancy(config, sharing, router_id)
    metrics = RouterMetrics(registry, config.metrics_adapters)
    base = BaseModel(config)
    fleet = Fleet(
        WaitingQueue(_queue_limits(config)),
        # What runs or waits was tokenised for the base that is served now.
        lambda card: base.adopt(card, lambda: bool(fleet.views) or dispatcher.running > 0),
        config.worker_wait_s,
        config.worker_silence_s,
        metrics.handed_over.inc,
    )
    catalog = _catalog(config, sharing, fleet, hub)
    sandbox = TemplateSandbox()
    limits = _dispatch_limits(config)
    use = AdapterUse(time.time)
    admin = _admin(config, catalog, fleet, use, base, router_id)
    rollouts = Rollouts(admin, lambda by: metrics.rollbacks.labels(by).inc())
    keeper = _keeper(rollouts, catalog, sharing, tenancy, metrics, router_id)
    dispatcher = Dispatcher(base, catalog, fleet, sandbox, metrics, limits, use, _retries(config))
    errors = ToldErrors(metrics)
    body_limits = BodyLimits(config.max_body_bytes, config.body_timeout_s)
    answerer = Answerer(
        *(base, dispatcher, tenancy, catalog.rules.registered_name, body_limits, errors),
        intake=Intake(_BEGIN_AT_ONCE),
    )
    watch_state(metrics, fleet, catalog, dispatcher)
    watch_sharing(metrics, sharing, tenancy)
    if config.metrics_compat:
        aliases, compat = catalog.rules.aliases, Meters(registry, COMPAT_PREFIX)
        CompatMetrics(base, fleet, aliases, use).declare(compat)
    door = FrontDoor(config.max_connections, config.max_connections_per_address)
    metrics.meters.watch("connections_open", "Connections of clients", lambda: door.open)
    file = _adapters_file(config, admin, rollouts, fleet.names_known)
    return Service(
        *(config, base, catalog, admin, rollouts, keeper, file),
        *(fleet, dispatcher, answerer, metrics, sandbox),
        saved_card=saved_card(config),
        router_id=router_id,
        sharing=sharing,
        tenancy=tenancy,
        errors=errors,
        watch=FleetWatch(base, catalog, fleet, dispatcher, file, errors),
        tracing=_tracing(config),
        front_door=door,
        idempotency=_idempotency(config, sharing, tenancy, router_id, body_limits),
        background=_follow(base, fleet),
        unload_heir=UnloadHeir(sharing.store, admin),
        declared_check=_declared_check(config, catalog, fleet),
    )


def _idempotency(
    config: RouterConfig,
    sharing: Sharing,
    tenancy: Tenancy,
    router_id: str,
    body_limits: BodyLimits,
) -> Idempotency:
    return Idempotency(
        sharing.store,
        tenancy.identify,
        router_id,
        config.idempotency_ttl_s,
        body_limits,
        strict=config.idempotency_outage == "closed",
    )


def _follow(base: BaseModel, fleet: Fleet) -> Background:
    """The base is what connected workers say of it."""
    background = Background()
    base.others = lambda: fleet.cards
    fleet.on_leave = lambda: background.start(base.review())
    return background


def _dispatch_limits(config: RouterConfig) -> DispatchLimits:
    return DispatchLimits(
        config.max_requests,
        config.max_stream_buffer,
        config.max_stream_buffer_bytes,
        config.request_timeout_s,
        config.share_prefixes,
        AnswerParts(config.tool_format, config.reasoning_format),
        config.grammar,
    )


def _catalog(config: RouterConfig, sharing: Sharing, fleet: Fleet, hub: Hub) -> Catalog:
    rules = _rules(config, sharing)
    return Catalog(rules, _Pinner(hub).pin, fleet.load_adapter, _now, time.time)


def _admin(
    config: RouterConfig,
    catalog: Catalog,
    fleet: Fleet,
    use: AdapterUse,
    base: BaseModel,
    router_id: str,
) -> AdapterAdmin:
    workers = AdapterWorkers(catalog, fleet, config.adapter_timeout_s)
    admin = AdapterAdmin(catalog, workers, use, base.is_named, router_id)
    fleet.on_connect = admin.worker_connected
    return admin


def _keeper(
    rollouts: Rollouts,
    catalog: Catalog,
    sharing: Sharing,
    tenancy: Tenancy,
    metrics: RouterMetrics,
    router_id: str,
) -> RolloutKeeper:
    tally = RolloutTally(sharing.store, metrics.outcomes, time.time)
    aliases, audit = catalog.rules.aliases, tenancy.audit.record
    return RolloutKeeper(sharing.store, router_id, aliases, rollouts, tally, audit, time.time)


def _tracing(config: RouterConfig) -> Tracing:
    with blaming("--otlp-endpoint", ValueError):
        return make_tracing(config)


def _sharing(config: RouterConfig) -> Sharing:
    with blaming("--redis", ValueError):
        return make_sharing(config)


def _retries(config: RouterConfig) -> Retries:
    budget = RetryBudget(
        config.retry_share, _FREE_RETRIES_PER_S, config.retry_burst, time.monotonic()
    )
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
    with blaming(f"--keys-file {config.keys_file}", KeysFileError):
        return make_tenancy(config, sharing, router_id)


def _adapters_file(
    config: RouterConfig, admin: AdapterAdmin, rollouts: Rollouts, applied: asyncio.Event
) -> AdaptersFile | None:
    if config.adapters_file is None:
        return None
    applied.clear()
    source = config.default_source
    return AdaptersFile(config.adapters_file, admin, rollouts, source, time.monotonic, applied)


def _declared_check(config: RouterConfig, catalog: Catalog, fleet: Fleet) -> DeclaredCheck:
    names = [registration.name for registration in declared_adapters(config)]
    return DeclaredCheck(catalog, names, lambda: fleet.ready)


class _Pinner:
    """Asks the Hub in threads of its own: it may be slow."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._threads = ThreadPoolExecutor(_HUB_THREADS, "hub")

    async def pin(self, ref: AdapterRef, token: Secret | None) -> AdapterRef:
        """Raises AdapterError. Other sources' references are the worker's to look at."""
        if ref.source != "hub":
            return ref
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._hub.resolve, ref, token)


def _rules(config: RouterConfig, sharing: Sharing) -> CatalogRules:
    declared = declared_adapters(config)
    rules = CatalogRules(
        aliases=Aliases(sharing.store, sharing.link is not None, declared),
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
            raise ConfigError(f"--adapter {registration.name}: {error.message}") from error
    return rules


def _now() -> float:
    return asyncio.get_running_loop().time()
