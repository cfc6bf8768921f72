"""Passes frames between routers and engine: submits, aborts, events, status. All on one event loop.

Sockets are `connections.py`'s, the process is `engine_supervisor.py`'s, adapters are
`adapter_service.py`'s, `adapter_orders.py`'s and `host_tier.py`'s business; who owns which sequence
is decided in `sequences.py`.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from loraplex.adapters.common.meters import watch_loop_lag
from loraplex.server.engine.messages import (
    AbortSequence,
    AdapterPlaced,
    AdapterSettled,
    EngineReady,
    FromEngine,
    NeedSlab,
    PicturesWanted,
    PictureTaken,
    SlabReleased,
    StartProgress,
    StepOutput,
    Submit,
)
from loraplex.server.protocol import (
    Abort,
    AdapterLoad,
    AdapterMerge,
    AdapterOrder,
    AdapterPins,
    AdapterPrefetch,
    ErrorCode,
    Evidence,
    GenerateRequest,
    Inspect,
    ModelCard,
    PicturesMissing,
    RouterFrame,
    WorkerFrame,
    WorkerHello,
    WorkerStatus,
)
from loraplex.server.worker.adapters.adapter_meter import AdapterMeter
from loraplex.server.worker.adapters.adapter_orders import AdapterOrders
from loraplex.server.worker.adapters.adapter_service import AdapterService
from loraplex.server.worker.adapters.host_tier import HostTier
from loraplex.server.worker.adapters.staging import Staging
from loraplex.server.worker.connections import (
    POLICY_VIOLATION,
    ConnectionFault,
    RouterConnection,
    require,
)
from loraplex.server.worker.inspector import Inspector
from loraplex.server.worker.known_engine import KnownEngine
from loraplex.server.worker.metrics import LookupTier, WorkerMetrics
from loraplex.server.worker.pictures.service import PictureService
from loraplex.server.worker.sequences import (
    ByConnection,
    DuplicateSequence,
    SequenceTable,
    refusal,
    weigh,
)
from loraplex.server.worker.start_log import StartLog
from loraplex.server.worker.validation import check_digests, check_id, check_name, check_request

log = logging.getLogger(__name__)

STATUS_INTERVAL_S = 0.5
FLUSH_S = 1.0

State = Literal["starting", "ready", "engine_lost", "draining"]


class Worker:
    """Implements `EngineListener` and `FrameHandler`.

    capacity: sequences taken at once. pictures: set before the engine starts; None = the model
    reads none.
    """

    pictures: PictureService | None = None

    def __init__(
        self,
        capacity: int,
        worker_id: str,
        card: ModelCard,
        engine: KnownEngine,
        loads: AdapterService,
        tier: HostTier,
        orders: AdapterOrders,
        metrics: WorkerMetrics,
    ) -> None:
        self.state: State = "starting"
        self.card: bytes | None = None
        self.card_digest = ""
        self._worker_id = worker_id
        self._base_card = card
        self._max_context = card.max_context
        self._loads = loads
        self._tier = tier
        self._orders = orders
        self._engine = engine
        self._inspector = Inspector(tier, orders)
        self._metrics = metrics
        self._table = SequenceTable(capacity)
        self._connections: dict[int, RouterConnection] = {}
        self._total_pages = self._adapter_slots = self._rows = self._page_size = 0
        self._shards = 1
        self._step = self._step_tokens = 0
        self._epoch = 0
        self._suspected = False
        self._start = StartLog(time.monotonic())
        self._adapter_meter = AdapterMeter(metrics)
        self._staging = Staging(tier, orders, self._adapter_meter, engine.to_engine)
        self.became_ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def takes_work(self) -> bool:
        return self.state == "ready" and not self._suspected

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def draining(self) -> bool:
        return self.state == "draining"

    # Routers

    def hello(self) -> WorkerHello:
        credits = self._table.credits([*self._connections, -1])[-1]
        return WorkerHello(self._worker_id, self._epoch, self.card_digest, credits)

    def connected(self, connection: RouterConnection) -> None:
        self._connections[connection.number] = connection
        self._metrics.routers.set(len(self._connections))
        self._broadcast_status()  # to all: the others' credits are fewer from now on

    def disconnected(self, connection: RouterConnection) -> None:
        """Drop the router, and stop at once what nobody reads any more."""
        self._connections.pop(connection.number, None)
        self._metrics.routers.set(len(self._connections))
        self._orders.disconnected(connection.number)
        for key in self._table.disconnect(connection.number):
            self._engine.to_engine(AbortSequence(key))
        self._metrics.orphans.set(self._table.orphans)

    def router_frame(self, connection: RouterConnection, frame: RouterFrame) -> None:
        if isinstance(frame, GenerateRequest):
            self._submit(connection, frame)
        elif isinstance(frame, Abort):
            self._abort(connection, frame)
        elif isinstance(frame, AdapterLoad | AdapterMerge):
            self._load(connection, frame)
        elif isinstance(frame, AdapterPins):
            require(check_digests(frame))
            self._orders.pin(connection.number, frame.digests)
        elif isinstance(frame, AdapterOrder):
            require(check_id("order_id", frame.order_id) or check_digests(frame))
            self._orders.order(connection.number, frame, self._reply(connection))
        elif isinstance(frame, AdapterPrefetch):
            require(check_digests(frame))
            self._tier.hint(d for d in frame.digests if self._engine.device_state(d) == "absent")
        elif isinstance(frame, Inspect):
            require(check_id("order_id", frame.order_id))
            engine, in_use = self._engine, self._table.by_adapter()
            connection.send(self._inspector.picture(frame, engine.stats, engine.resident, in_use))

    def _submit(self, connection: RouterConnection, request: GenerateRequest) -> None:
        require(check_name(request))
        refused = self._refused(request)
        if refused is not None:
            self._refuse(connection, request, *refused)
            return
        try:
            key = self._table.open(connection.number, request)
        except DuplicateSequence as error:
            raise ConnectionFault(POLICY_VIOLATION, "a sequence was submitted twice") from error
        if key is None:
            message = f"{self._table.capacity} sequences are in flight"
            self._refuse(connection, request, "overloaded", message)
            return
        self._idle.clear()
        self._metrics.sequences.set(len(self._table))
        self._engine.to_engine(Submit(key, request))
        if request.adapter is not None:
            self._orders.used(request.adapter)
            tier = self._lookup(request.adapter)
            self._metrics.lookups.labels(tier).inc()
            if tier == "host":
                self._staging.push(request.adapter)
            elif tier != "device":
                self._tier.prefetch(request.adapter)

    def _lookup(self, digest: str) -> LookupTier:
        """Name the place where a sequence finds its adapter."""
        state = self._engine.device_state(digest)
        if state != "absent":
            return "device" if state == "ready" else "loading"
        return "host" if self._tier.state(digest) == "ready" else "disk"

    def _refused(self, request: GenerateRequest) -> tuple[ErrorCode, str] | None:
        if self.state == "draining":
            return "draining", "the worker is draining"
        if not self.takes_work:
            return "overloaded", "the engine is being started again, or is silent"
        return check_request(request, self._max_context, self._base_card.vision)

    def _refuse(
        self, connection: RouterConnection, request: GenerateRequest, error: ErrorCode, message: str
    ) -> None:
        self._metrics.refused.labels(error).inc()
        connection.send_events(self._step, [refusal(request, error, message)])

    def _abort(self, connection: RouterConnection, frame: Abort) -> None:
        require(check_name(frame))
        keys = self._table.keys_of(connection.number, frame.request_id, frame.attempt, frame.choice)
        for key in keys:
            self._engine.to_engine(AbortSequence(key))

    def _load(self, connection: RouterConnection, frame: AdapterLoad | AdapterMerge) -> None:
        require(check_id("load_id", frame.load_id))
        if isinstance(frame, AdapterMerge):
            self._loads.merge(frame, self._reply(connection))
        else:
            self._loads.load(frame, self._reply(connection))

    def _reply(self, connection: RouterConnection) -> Callable[[WorkerFrame], None]:
        """Sends to this router, unless it has left by then."""

        def reply(frame: WorkerFrame) -> None:
            if connection.number in self._connections:
                connection.send(frame)

        return reply

    # Engine

    def engine_starting(self, progress: StartProgress) -> None:
        line = self._start.line(progress, time.monotonic())
        if line is not None:
            log.info("%s", line)

    def start_facts(self) -> dict[str, str | float]:
        """How far the engine's start is, for programs."""
        return self._start.facts(time.monotonic())

    def engine_ready(self, ready: EngineReady) -> None:
        for line in ready.summary:
            log.info("%s", line)
        if self.card is None:
            self._publish_card(ready)
        else:
            log.info("the engine is ready again")
        self._total_pages, self._adapter_slots = ready.total_pages, ready.adapter_slots
        self._rows, self._page_size, self._step_tokens = ready.max_rows, ready.page_size, 0
        self._shards = ready.shards
        self._inspector.engine_ready(ready)
        self._metrics.engine_started(ready)
        self._engine.started(ready)
        self._epoch = max(self._epoch + 1, int(time.time() * 1000))
        self._orders.engine_ready()
        if self.state != "draining":
            self._enter("ready")
            self.became_ready.set()

    def _publish_card(self, ready: EngineReady) -> None:
        max_context = min(self._base_card.max_context, ready.max_context)
        card = msgspec.structs.replace(
            self._base_card, max_context=max_context, dtype=ready.dtype, device=ready.device
        )
        self._max_context = max_context
        self.card = msgspec.json.encode(card)
        self.card_digest = hashlib.sha256(self.card).hexdigest()

    def engine_frame(self, frame: FromEngine) -> None:
        if isinstance(frame, StepOutput):
            self._step = frame.step
            self._step_tokens += frame.num_tokens
            if frame.resident is not None:
                self._adapter_meter.evicted(self._engine.resident, frame.resident)
            self._engine.stepped(frame)
            self._metrics.stepped(frame)
            self._inspector.stepped(frame)
            self._deliver(self._table.route(frame.events))
            self._forget_pictures()
        elif isinstance(frame, AdapterSettled):
            self._orders.settled(frame)
        elif isinstance(frame, AdapterPlaced):
            self._inspector.device.placed(frame)
        elif isinstance(frame, NeedSlab):
            self._inspector.device.left(frame.digest)
            self._staging.need(frame.digest)
        elif isinstance(frame, SlabReleased):
            self._staging.released(frame)
        elif isinstance(frame, PicturesWanted):
            self._ask_for_pictures(frame)
        elif isinstance(frame, PictureTaken) and self.pictures is not None:
            self.pictures.taken(frame)

    def _ask_for_pictures(self, frame: PicturesWanted) -> None:
        """Has pictures decoded that the engine waits for. Their router is asked for files that are
        not here."""
        asker = self._table.asker(frame.key)
        if asker is None or self.pictures is None:
            return
        number, request = asker
        missing = self.pictures.wanted(frame.key, request, frame.spans)
        if missing and number in self._connections:
            identity = (request.request_id, request.attempt, request.choice)
            self._connections[number].send(PicturesMissing(*identity, missing))

    def _forget_pictures(self) -> None:
        """Has no pictures brought for sequences that have ended."""
        ended = self._table.take_ended()
        if self.pictures is not None:
            for key in ended:
                self.pictures.ended(key)

    def engine_lost(self, reason: str, from_outside: bool = False) -> None:
        """End the engine's sequences with one terminal event each; routers try elsewhere."""
        evidence = self._evidence(from_outside)
        self._start = StartLog(time.monotonic())
        self._staging.engine_lost()
        if self.pictures is not None:
            self.pictures.engine_lost()
        self._engine.lost()
        self._suspected = False
        self._orders.engine_lost()
        self._inspector.engine_lost()
        self._metrics.restarts.inc()
        if self.state == "ready":
            self._enter("engine_lost")
        self._deliver(self._table.end_all("engine_lost", "the engine was lost", evidence))

    def _evidence(self, from_outside: bool = False) -> dict[int, Evidence]:
        """Weigh what the engine's end, or its silence, says of sequences."""
        is_telling = self._step_tokens > 0 and not from_outside
        return weigh(self._engine.begun.keys(), self._table.fresh(), is_telling)

    def engine_suspected(self, suspected: bool) -> None:
        """Routers hear of it at once; what runs may go on elsewhere, and nothing new comes."""
        self._suspected = suspected
        self._metrics.ready.set(self.takes_work)
        self._broadcast_status()

    def engine_has_work(self) -> bool:
        return len(self._table) > 0

    def _deliver(self, routed: ByConnection) -> None:
        for number, events in routed.items():
            connection = self._connections.get(number)
            if connection is not None:
                connection.send_events(self._step, events)
        self._metrics.sequences.set(len(self._table))
        self._metrics.orphans.set(self._table.orphans)
        if not len(self._table):
            self._idle.set()

    # Status

    def _enter(self, state: State) -> None:
        self.state = state
        self._metrics.ready.set(state == "ready")
        self._broadcast_status()

    def _status(self) -> WorkerStatus:
        stats = self._engine.stats
        return WorkerStatus(
            worker_id=self._worker_id,
            epoch=self._epoch,
            base_digest=self._base_card.base_digest,
            ready=self.takes_work,
            draining=self.draining,
            free_pages=stats.free_pages,
            total_pages=self._total_pages,
            running=stats.running,
            waiting=max(len(self._table) - stats.running, 0),
            resident=tuple(self._engine.resident),
            loading=stats.loading,
            step=self._step,
            adapter_slots=self._adapter_slots,
            silent=self._suspected,
            load_bytes_s=self._orders.load_bytes_s,
            preemptions=stats.preemptions,
            step_tokens=self._step_tokens,
            page_size=self._page_size,
            shards=self._shards,
        )

    def _broadcast_status(self) -> None:
        status = self._status()
        evidence = self._evidence() if self._suspected else {}
        for number, credits in self._table.credits(self._connections).items():
            rows = -(-self._rows * credits // self._table.capacity)
            named = self._table.named(number, evidence)
            own = msgspec.structs.replace(status, credits=credits, rows=rows, evidence=named)
            self._connections[number].send_status(own)

    async def report_status(self) -> None:
        """Twice a second, for ever."""
        while True:
            self._broadcast_status()
            await asyncio.sleep(STATUS_INTERVAL_S)

    async def watch_loop(self) -> None:
        """Measure for ever how late the event loop is."""
        await watch_loop_lag(self._metrics.loop_lag_s.observe)

    def render_metrics(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type."""
        self._tier.measure()
        return self._metrics.meters.render(accept)

    # The end

    async def drain(self, limit_s: float) -> None:
        """Take nothing new and finish what runs; what is left after limit_s ends in an error."""
        self._enter("draining")
        try:
            await asyncio.wait_for(self._idle.wait(), limit_s)
        except TimeoutError:
            log.warning("%d sequences did not end in time", len(self._table))
            self._deliver(self._table.end_all("draining", "the worker was stopped"))
        await asyncio.gather(*(c.flush(FLUSH_S) for c in self._connections.values()))
