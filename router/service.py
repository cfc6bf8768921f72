"""A router's parts, and the run of those that live. `build` makes them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from loraplex.adapters.common.meters import watch_loop_lag
from loraplex.router.background import Background
from loraplex.router.batches.desk import BatchDesk
from loraplex.router.config import RouterConfig
from loraplex.router.generation.answerer import Answerer
from loraplex.router.generation.dispatcher import Dispatcher
from loraplex.router.generation.tokenise import Tokeniser
from loraplex.router.http.idempotency import Idempotency
from loraplex.router.names.catalog import Catalog
from loraplex.router.operations.admin import AdapterAdmin, DeclaredCheck, OrphanedUnloads
from loraplex.router.operations.declarations import Declarations
from loraplex.router.operations.feedback import Feedback
from loraplex.router.operations.fleet_watch import FleetWatch
from loraplex.router.operations.rollouts import RolloutKeeper, Rollouts
from loraplex.router.policy.front_door import FrontDoor
from loraplex.router.responses.desk import ResponseDesk
from loraplex.router.shared.sharing import Sharing
from loraplex.router.shared.store import StoreDown
from loraplex.router.telemetry.caller_errors import CallerErrors
from loraplex.router.telemetry.metrics import RouterMetrics
from loraplex.router.telemetry.tracing import Tracing
from loraplex.router.tenancy.tenancy import Tenancy
from loraplex.router.text.template_sandbox import TemplateSandbox
from loraplex.router.uploads.receiver import UploadReceiver
from loraplex.router.workers.bases import Bases
from loraplex.router.workers.discovery import Discovery
from loraplex.router.workers.fleet import Connections, Roster

_START_POLL_S = 0.02
_START_POLLS = 100


@dataclass(frozen=True, slots=True)
class Service:
    """The parts that routes need."""

    config: RouterConfig
    bases: Bases
    catalog: Catalog
    admin: AdapterAdmin
    rollouts: Rollouts
    keeper: RolloutKeeper
    feedback: Feedback
    declarations: Declarations
    roster: Roster
    connections: Connections
    tokeniser: Tokeniser
    dispatcher: Dispatcher
    answerer: Answerer
    metrics: RouterMetrics
    sandbox: TemplateSandbox
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
    uploads: UploadReceiver

    def why_not_ready(self) -> str | None:
        """Why requests are not answered yet; None = they are. A failed adapter holds up nobody."""
        if self.dispatcher.draining:
            return "the router is being stopped"
        if not self.bases.ready:
            return "no worker is ready"
        return self.declarations.why_not_applied

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Runs the router, connected to the workers while inside."""
        try:
            background = self.background
            async with self.sharing.run(background), self.tenancy.run(background), self._tasks():
                await self._registered_adapters()
                await self._first_worker()
                yield
        finally:
            await self.sandbox.close()
            await self.tokeniser.makers.reader.close()
            await asyncio.to_thread(self.tokeniser.shapes.close)
            await asyncio.to_thread(self.tracing.close)

    @asynccontextmanager
    async def _tasks(self) -> AsyncIterator[None]:
        """Runs the background tasks. They are over before the store that they ask is closed."""
        works = [
            *(base.fleet.run() for base in self.bases),
            self.connections.run(),
            watch_loop_lag(self.metrics.loop_lag_s.observe),
            self.catalog.rules.aliases.run(),
            self.keeper.run(),
            self.feedback.run(),
            self.orphaned_unloads.run(),
            self.declarations.run(),
        ]
        if self.sharing.link is not None:
            works.append(Discovery(self.sharing.store, self.connections, self.config.secret).run())
        if self.config.check_adapters == "start":
            works.append(self.declared_check.run())
        try:
            async with self.background.running(*works):
                yield
        finally:
            await self.admin.close()

    async def _registered_adapters(self) -> None:
        """Waits until others' names are known, if Redis soon answers: nobody may ask before."""
        aliases = self.catalog.rules.aliases
        for _ in range(_START_POLLS):
            with contextlib.suppress(StoreDown):
                await aliases.refresh()
            if aliases.is_known:
                return
            await asyncio.sleep(_START_POLL_S)

    async def _first_worker(self) -> None:
        """Let early requests wait a moment, until a restarted router knows its workers."""
        for _ in range(_START_POLLS if self.roster.clients or self.sharing.link else 0):
            if self.bases.ready:
                return
            await asyncio.sleep(_START_POLL_S)
