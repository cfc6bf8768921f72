"""A router's parts, and the run of those that live. `build` makes them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from adapters.common.meters import watch_loop_lag
from router.background import Background
from router.batches.desk import BatchDesk
from router.config import RouterConfig, RouterConfigError
from router.generation.answerer import Answerer
from router.generation.dispatcher import Dispatcher
from router.generation.tokenise import Tokeniser
from router.http.idempotency import Idempotency
from router.names.catalog import Catalog
from router.operations.admin import AdapterAdmin
from router.operations.declared_check import DeclaredCheck
from router.operations.file_watch import AdaptersFile
from router.operations.fleet_watch import FleetWatch
from router.operations.orphaned_unloads import OrphanedUnloads
from router.operations.rollout_keeper import RolloutKeeper
from router.operations.rollouts import Rollouts
from router.policy.front_door import FrontDoor
from router.responses.desk import ResponseDesk
from router.shared.sharing import Sharing
from router.shared.store import StoreDown
from router.telemetry.caller_errors import CallerErrors
from router.telemetry.metrics import RouterMetrics
from router.telemetry.tracing import Tracing
from router.tenancy.tenancy import Tenancy
from router.text.template_sandbox import TemplateSandbox
from router.workers.base_model import BaseModel
from router.workers.connections import Connections
from router.workers.discovery import Discovery
from router.workers.fleet import Fleet
from server.protocol import ModelCard

_START_POLL_S = 0.02
_START_POLLS = 100


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
    connections: Connections
    tokeniser: Tokeniser
    dispatcher: Dispatcher
    answerer: Answerer
    metrics: RouterMetrics
    sandbox: TemplateSandbox
    saved_card: ModelCard | None
    router_id: str
    sharing: Sharing
    tenancy: Tenancy
    errors: CallerErrors
    watch: FleetWatch
    tracing: Tracing
    front_door: FrontDoor
    idempotency: Idempotency
    background: Background
    orphaned_unloads: OrphanedUnloads
    declared_check: DeclaredCheck
    batches: BatchDesk | None
    responses: ResponseDesk | None

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
        """Connected to the workers while inside. Raises RouterConfigError for a bad model card."""
        if self.saved_card is not None:
            refusal = await self.base.adopt(self.saved_card)
            if refusal is not None:
                raise RouterConfigError(f"--model-card: {refusal}")
        try:
            background = self.background
            async with self.sharing.run(background), self.tenancy.run(background), self._tasks():
                await self._registered_adapters()
                await self._first_worker()
                yield
        finally:
            await self.sandbox.close()
            await asyncio.to_thread(self.tokeniser.shapes.close)
            await asyncio.to_thread(self.tracing.close)

    @asynccontextmanager
    async def _tasks(self) -> AsyncIterator[None]:
        """They are over before the store that they ask is closed."""
        works = [
            self.fleet.run(),
            self.connections.run(),
            watch_loop_lag(self.metrics.loop_lag_s.observe),
            self.catalog.rules.aliases.run(),
            self.keeper.run(),
            self.orphaned_unloads.run(),
        ]
        if self.sharing.link is not None:
            works.append(Discovery(self.sharing.store, self.connections, self.config.secret).run())
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
