"""One live connection to a worker: credits, sequences in flight, adapter loads, status.

It lasts as long as its WebSocket. Reconnecting and model cards are `worker_client`'s business.
"""

import asyncio
import contextlib
import fcntl
import logging
import struct
import termios
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal

import msgspec
from websockets.asyncio.client import ClientConnection

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import AdapterManifest
from loraplex.router.names.served import Origin
from loraplex.router.policy.placement.liveness import Hearing, Liveness
from loraplex.router.policy.placement.placement import WorkerView
from loraplex.router.workers.loads import (
    ConnectionLoads,
    ConnectionOrders,
    ProtocolFault,
    Supply,
)
from loraplex.server.protocol import (
    MAX_FRAME_BYTES,
    Abort,
    AdapterPins,
    AdapterPlace,
    AdapterPrefetch,
    AdapterReport,
    AdapterState,
    DeviceCost,
    ErrorCode,
    Evidence,
    GenerateRequest,
    Inspect,
    OrderAction,
    PicturesMissing,
    RouterFrame,
    StepEvents,
    TokenEvent,
    WorkerHello,
    WorkerPicture,
    WorkerStatus,
    decode_worker_frame,
    encode,
)

logger = logging.getLogger(__name__)

MAX_OUTBOX_BYTES = 64 << 20
_PROBE_INTERVAL_S = 0.5

Sink = Callable[[TokenEvent], None]
Spend = Callable[[DeviceCost], None]
# Sends the worker the files of pictures, by their digests. Raises AdapterError.
Bring = Callable[[Sequence[str]], Awaitable[None]]
SequenceKey = tuple[str, int, int]
Tier = Literal["none", "device", "loading", "fetched", "absent"]


def unsent_bytes(transport: asyncio.WriteTransport) -> int:
    """Bytes unsent in this process's buffers and the kernel's (tcp(7), SIOCOUTQ)."""
    socket = None if transport.is_closing() else transport.get_extra_info("socket")
    if socket is None:
        return 0
    (kernel,) = struct.unpack("i", fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)))
    return transport.get_write_buffer_size() + int(kernel)


def unread_bytes(transport: asyncio.WriteTransport) -> int:
    """Counts the bytes that have come and that this process has not read (tcp(7), SIOCINQ)."""
    socket = None if transport.is_closing() else transport.get_extra_info("socket")
    if socket is None:
        return 0
    (kernel,) = struct.unpack("i", fcntl.ioctl(socket.fileno(), termios.FIONREAD, bytes(4)))
    return int(kernel)


class WorkerPictures:
    """Pictures of the worker behind one connection.

    `send` puts a frame on the wire; it may raise what ends a connection. places: of the newest
    picture that had any; the same tuple for as long as nothing changes.
    """

    def __init__(self, send: Callable[[Inspect], None]) -> None:
        self.latest: WorkerPicture | None = None
        self.places: tuple[AdapterPlace, ...] = ()
        self._send = send
        self._awaited: asyncio.Future[None] | None = None
        self._asked = 0

    async def look(self) -> None:
        """Asks for a picture and waits until it has come; callers at once share it. Raises what
        `fail` was given."""
        if self._awaited is None:
            known = 0 if self.latest is None else self.latest.version
            self._asked += 1
            self._send(Inspect(f"p{self._asked}", known))
            self._awaited = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._awaited)

    def on_picture(self, picture: WorkerPicture) -> None:
        self.latest = picture
        if picture.places is not None:
            self.places = picture.places
        awaited, self._awaited = self._awaited, None
        if awaited is not None and not awaited.done():
            awaited.set_result(None)

    def fail(self, error: Exception) -> None:
        awaited, self._awaited = self._awaited, None
        if awaited is not None and not awaited.done():
            awaited.set_exception(error)
            awaited.exception()  # whoever waited may have left: it counts as seen


class WorkerLost(Exception):
    """The connection to the worker is gone, or cannot take this frame."""


class _Live:
    """A sequence in flight. It ends with the worker's terminal event, or with the connection."""

    __slots__ = ("adapter", "begun", "next_index", "sink", "spend", "starting")

    def __init__(
        self, sink: Sink, spend: Spend, next_index: int, adapter: str, starting: bool
    ) -> None:
        self.sink: Sink | None = sink
        self.spend = spend
        self.next_index = next_index
        self.adapter = adapter
        self.starting = starting
        self.begun = False


class Credit:
    """The right to one sequence on this connection; `submit` spends it, `release` gives it back.

    adapter: of the sequence, "" = base; its worker's view counts it already.
    """

    __slots__ = ("_adapter", "_held", "session")

    def __init__(self, session: "WorkerSession", adapter: str) -> None:
        self.session = session
        self._adapter = adapter
        self._held = True

    def submit(self, request: GenerateRequest, sink: Sink, spend: Spend) -> None:
        """Sends the sequence; its events go to `sink`, the last has `finish`. spend: hears what it
        cost, also where it was abandoned. Raises WorkerLost.
        """
        self.session.submit(request, sink, spend)
        self._held = False

    def release(self) -> None:
        if self._held:
            self._held = False
            self.session.give_back(self._adapter)


class WorkerSession:
    """One connection to a worker, from its hello to its end.

    `on_change` is called, once a frame, when room, readiness or residency may have changed.
    `supply`: see `ConnectionLoads`. `bring` sends the worker the files of pictures. base: the name
    of the base that the worker serves.
    """

    def __init__(
        self,
        socket: ClientConnection,
        hello: WorkerHello,
        on_change: Callable[[], None],
        supply: Supply,
        bring: Bring,
        base: str = "",
    ) -> None:
        self.hello = hello
        self.base = base
        self.status: WorkerStatus | None = None
        self._reported_at = asyncio.get_running_loop().time()
        self.view = WorkerView(hello.worker_id, credits=hello.credits)
        self._socket = socket
        self._on_change = on_change
        self._live: dict[SequenceKey, _Live] = {}
        self._loads = ConnectionLoads(self._send, supply)
        self.view.admitted = self._loads.admitted
        self._orders = ConnectionOrders(self._send)
        self._bring = bring
        self._bringing: set[asyncio.Task[None]] = set()
        self._hinted: set[str] = set()  # since the last status
        self.pictures = WorkerPictures(self._send)
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._outbox_filled = asyncio.Event()
        self._closed = False
        self.liveness = Liveness(asyncio.get_running_loop().time())

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    @property
    def silent_s(self) -> float:
        """How long ago the worker last reported its state; it does so twice a second."""
        return asyncio.get_running_loop().time() - self._reported_at

    # Sequences

    def give_back(self, adapter: str) -> None:
        self.view.leave(adapter)
        self._on_change()

    def submit(self, request: GenerateRequest, sink: Sink, spend: Spend) -> None:
        frame = encode(request)
        if len(frame) > MAX_FRAME_BYTES:
            raise WorkerLost(f"the request is larger than a frame: {len(frame)} bytes")
        self._send_frame(frame)
        key = (request.request_id, request.attempt, request.choice)
        adapter = request.adapter or ""
        starting = not adapter or adapter in self.view.resident
        self.view.starting += starting
        self._live[key] = _Live(sink, spend, len(request.accepted_ids), adapter, starting)

    def abandon(self, request_id: str, attempt: int, choice: int) -> None:
        """Aborts a sequence and drops its further events. Its credit comes back with the last."""
        live = self._live.get((request_id, attempt, choice))
        if live is None or live.sink is None:
            return
        live.sink = None
        with contextlib.suppress(WorkerLost):  # then it ends with the connection
            self._send(Abort(request_id, attempt, choice))

    @property
    def epoch(self) -> int:
        """The epoch of the worker. Later lives of a worker or its engine have larger ones."""
        return self.hello.epoch if self.status is None else self.status.epoch

    def fence(self, why: str) -> None:
        """Ends the connection; what ran on it goes on elsewhere."""
        logger.warning("worker %s is left: %s", self.worker_id, why)
        self._socket.transport.abort()

    # Silence

    def listen(self, now: float, limit_s: float) -> Hearing:
        """Whether the worker was heard, and heard this router, in the last limit_s. It is silent,
        too, when it says that its engine is."""
        transport = self._socket.transport
        self.liveness.unsent(self._outbox_bytes + unsent_bytes(transport), now)
        self.liveness.unread(unread_bytes(transport), now)
        if self.liveness.judge(now, limit_s):
            self._update_ready()
            self._on_change()
        return "silent" if self._engine_silent else self.liveness.hearing

    @property
    def _engine_silent(self) -> bool:
        return self.status is not None and self.status.silent

    def hand_over(self, why: str) -> int:
        """Sequences and loads go on elsewhere. Should the worker wake up, it gets the order to stop
        them. Returns how many sequences there were."""
        keys = list(self._live)
        return self._leave(keys, "engine_lost" if self._engine_silent else "unheard", why)

    def take_back(self, why: str) -> int:
        """Send sequences that have not begun elsewhere; they may never have arrived. Nothing was
        tried yet. Returns how many sequences there were."""
        return self._leave(
            [key for key, one in self._live.items() if not one.begun], "overloaded", why
        )

    def _leave(self, keys: list[SequenceKey], code: ErrorCode, why: str) -> int:
        sinks = [(key, sink) for key in keys if (sink := self._live[key].sink) is not None]
        named = () if self.status is None else self.status.evidence
        evidence = {(*key,): found for *key, found in named}
        for key, _ in sinks:
            self.abandon(*key)
        for key, sink in sinks:
            sink(lost(*key, why, code, evidence.get(key, "weak")))
        self._loads.fail_all(WorkerLost(why))
        return len(sinks)

    # Adapters

    def tier(self, digest: str | None) -> Tier:
        """How the worker has an adapter, as far as is known here."""
        if digest is None:
            return "none"
        if digest in self.view.resident:
            return "device"
        if digest in self.view.loading:
            return "loading"
        return "fetched" if digest in self._loads.admitted else "absent"

    def knows(self, digest: str) -> bool:
        return self.view.knows(digest)

    def forget(self, digest: str) -> None:
        """The worker said that it does not have it (any more)."""
        self._loads.forget(digest)
        self.view.resident -= {digest}
        self.view.coming.pop(digest, None)

    async def admit(self, origin: Origin, token: str | None, digest: str) -> None:
        """Makes sure that the worker has this adapter. Raises AdapterError, WorkerLost."""
        if not self.knows(digest):
            await self._loads.admit(origin, token, digest)

    async def load(self, origin: Origin, token: str | None) -> AdapterManifest:
        """Asks the worker to fetch or merge an adapter. Raises AdapterError, WorkerLost."""
        return await self._loads.load(origin, token)

    async def order(self, action: OrderAction, *digests: str) -> AdapterReport:
        """Moves admitted adapters between the worker's tiers. Raises AdapterError, WorkerLost."""
        return await self._orders.order(action, digests)

    def prefetch(self, digest: str) -> None:
        """Hints that this adapter will be wanted, once between two reports. Raises WorkerLost."""
        if digest not in self._hinted:
            self._hinted.add(digest)
            self._send(AdapterPrefetch((digest,)))

    def pin(self, digests: Iterable[str]) -> None:
        """Keep these adapters, and no others, on the device. Raises WorkerLost."""
        self._send(AdapterPins(tuple(sorted(digests))))

    # The connection

    async def run(self) -> None:
        """Serves the connection until it ends, always by an exception; then fails all who wait."""
        tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._probe())]
        try:
            await self._read()
        finally:
            self._close("the connection to the worker was lost")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(self) -> None:
        """Asks the worker again and again if it hears this router: frames do not show that."""
        loop = asyncio.get_running_loop()
        while True:
            self.liveness.asked(loop.time())
            await (await self._socket.ping())
            self.liveness.answered()
            await asyncio.sleep(_PROBE_INTERVAL_S)

    async def _write(self) -> None:
        while True:
            await self._outbox_filled.wait()
            while self._outbox:
                frame = self._outbox.popleft()
                self._outbox_bytes -= len(frame)
                await self._socket.send(frame)
            self._outbox_filled.clear()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            message = await self._socket.recv()
            self.liveness.heard(loop.time())
            if isinstance(message, str):
                raise ProtocolFault("a text frame")
            try:
                frame = decode_worker_frame(message)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ProtocolFault(f"a frame that cannot be read: {error}") from error
            if isinstance(frame, StepEvents):
                self._on_step(frame)
            elif isinstance(frame, WorkerStatus):
                self._on_status(frame)
            elif isinstance(frame, AdapterState):
                self._loads.on_state(frame)
            elif isinstance(frame, AdapterReport):
                self._orders.on_report(frame)
            elif isinstance(frame, WorkerPicture):
                self.pictures.on_picture(frame)
            elif isinstance(frame, PicturesMissing):
                bringing = asyncio.create_task(self._bring_pictures(frame))
                self._bringing.add(bringing)
                bringing.add_done_callback(self._bringing.discard)
            else:
                raise ProtocolFault("a second hello")

    def _on_step(self, step: StepEvents) -> None:
        freed = False
        for event in step.events:
            key = (event.request_id, event.attempt, event.choice)
            live = self._live.get(key)
            if live is None:
                continue  # a late attempt
            if event.error is None and event.index != live.next_index:
                self._break(key, live, event)
                continue
            live.next_index += len(event.token_ids)
            if not live.begun:
                live.begun = True
                self.view.begin(live.starting)
                freed = True
            if event.finish is not None:
                self._end(key, live, event)
                freed = True
            if live.sink is not None:
                live.sink(event)
        if freed:
            self._on_change()

    async def _bring_pictures(self, frame: PicturesMissing) -> None:
        """Sends pictures that a sequence waits for. Without them it goes on elsewhere."""
        key = (frame.request_id, frame.attempt, frame.choice)
        try:
            await self._bring(frame.pictures)
        except AdapterError as error:
            live = self._live.get(key)
            if live is not None and live.sink is not None:
                sink = live.sink
                self.abandon(*key)
                sink(lost(*key, error.message, "overloaded"))

    def _break(self, key: SequenceKey, live: _Live, event: TokenEvent) -> None:
        """Ends an attempt whose tokens were lost or repeated on the way; the next one resumes."""
        sink = live.sink
        self.abandon(*key)
        if event.finish is not None:
            self._end(key, live, event)
        if sink is not None:
            sink(lost(*key, f"expected token {live.next_index}, got token {event.index}"))

    def _on_status(self, status: WorkerStatus) -> None:
        self.status = status
        self._reported_at = asyncio.get_running_loop().time()
        self._update_ready()
        view = self.view
        view.draining = status.draining
        view.credits = status.credits or self.hello.credits
        view.rows = status.rows
        view.load = status.running + status.waiting
        view.free_kv = status.free_pages / status.total_pages if status.total_pages else 1.0
        view.resident, view.loading = frozenset(status.resident), frozenset(status.loading)
        view.load_bytes_s = status.load_bytes_s or view.load_bytes_s
        view.arrived(self._reported_at)
        self._hinted.clear()
        self._on_change()

    def _update_ready(self) -> None:
        there = not self._closed and self.liveness.hearing == "good"
        self.view.ready = there and self.status is not None and self.status.ready

    def _end(self, key: SequenceKey, live: _Live, event: TokenEvent) -> None:
        del self._live[key]
        if event.cost is not None:
            live.spend(event.cost)
        if live.begun:
            self.view.begun -= 1
        else:
            self.view.starting -= live.starting
        self.view.leave(live.adapter)

    def _send(self, frame: RouterFrame) -> None:
        self._send_frame(encode(frame))

    def _send_frame(self, frame: bytes) -> None:
        if self._closed:
            raise WorkerLost("the connection to the worker was lost")
        if self._outbox_bytes + len(frame) > MAX_OUTBOX_BYTES:
            self._socket.transport.abort()  # it has not read for long: no use in waiting
            raise WorkerLost("the worker does not read")
        self._outbox.append(frame)
        self._outbox_bytes += len(frame)
        self._outbox_filled.set()

    def _close(self, why: str) -> None:
        self._closed = True
        self._update_ready()
        live, self._live = self._live, {}
        for key, sequence in live.items():
            if sequence.sink is not None:
                sequence.sink(lost(*key, why))
        self._loads.fail_all(WorkerLost(why))
        self._orders.fail_all(WorkerLost(why))
        self.pictures.fail(WorkerLost(why))
        self._on_change()


def lost(
    request_id: str,
    attempt: int,
    choice: int,
    why: str,
    code: ErrorCode = "engine_lost",
    evidence: Evidence | None = None,
) -> TokenEvent:
    """The terminal event of an attempt whose worker cannot send one any more."""
    identity = (request_id, attempt, choice)
    return TokenEvent(*identity, 0, (), finish="error", error=code, message=why, evidence=evidence)
