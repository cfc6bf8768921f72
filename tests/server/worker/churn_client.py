"""A router's end for very many concurrent operations: every token is checked as it comes."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from loraplex.server import protocol
from tests.certifying.certificates import CertifyOptions, certified_output
from tests.server.worker.worker_process import VOCAB, Worker, dial

OPTIONS = CertifyOptions(vocab_size=VOCAB, eos_token_ids=(2,))


@dataclass
class Stream:
    """A sequence under way. expected: the only right output."""

    expected: list[int]
    tokens: list[int]
    ended: asyncio.Future[protocol.TokenEvent]
    started: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Findings:
    """What was counted, and everything that was wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)


class ChurnClient:
    """One connection. Answers are futures, by id."""

    def __init__(self, socket: ClientConnection, findings: Findings) -> None:
        self._socket = socket
        self._findings = findings
        self._numbers = itertools.count()
        self._streams: dict[str, Stream] = {}
        self._loads: dict[str, asyncio.Future[protocol.AdapterState]] = {}
        self._reports: dict[str, asyncio.Future[protocol.AdapterReport]] = {}
        self.status: protocol.WorkerStatus | None = None
        self.changed = asyncio.Event()

    async def send(self, frame: protocol.RouterFrame) -> None:
        await self._socket.send(protocol.encode(frame))

    async def load(self, frame: protocol.AdapterLoad) -> protocol.AdapterState:
        future: asyncio.Future[protocol.AdapterState]
        future = self._loads[frame.load_id] = asyncio.get_running_loop().create_future()
        await self.send(frame)
        return await future

    async def until_ready(self) -> None:
        """The next status that says so."""
        while True:
            self.changed.clear()
            await self.changed.wait()
            if self.status is not None and self.status.ready:
                return

    async def order(self, action: protocol.OrderAction, *digests: str) -> protocol.AdapterReport:
        order_id = f"order {next(self._numbers)}"
        future: asyncio.Future[protocol.AdapterReport]
        future = self._reports[order_id] = asyncio.get_running_loop().create_future()
        await self.send(protocol.AdapterOrder(order_id, action, digests))
        return await future

    async def generate(self, request: protocol.GenerateRequest, abort: bool) -> protocol.TokenEvent:
        """The terminal event. What came before it was right, or is among the findings."""
        expected = certified_output(
            request.adapter, request.prompt_ids, request.sampling.max_tokens, OPTIONS, 1 << 30
        )
        ended: asyncio.Future[protocol.TokenEvent] = asyncio.get_running_loop().create_future()
        stream = Stream(expected, list(request.accepted_ids), ended)
        self._streams[request.request_id] = stream
        await self.send(request)
        if abort:
            starting = asyncio.ensure_future(stream.started.wait())
            await asyncio.wait((starting, ended), return_when=asyncio.FIRST_COMPLETED)
            starting.cancel()
            await self.send(protocol.Abort(request.request_id, request.attempt))
        event = await ended
        self._check_end(request, stream, event)
        return event

    def accepted(self, request: protocol.GenerateRequest) -> list[int]:
        """All tokens that came for it, to resume it; it is forgotten."""
        return self._streams.pop(request.request_id).tokens

    def _check_end(
        self, request: protocol.GenerateRequest, stream: Stream, event: protocol.TokenEvent
    ) -> None:
        if event.finish == "length" and stream.tokens != stream.expected:
            self._findings.wrong.append(f"{request.request_id}: it ended early")
        if event.finish == "stop":
            self._findings.wrong.append(f"{request.request_id}: it stopped though it may not")

    async def read(self) -> None:
        """Until the connection ends."""
        try:
            while True:
                frame = protocol.decode_worker_frame(await self._socket.recv(decode=False))
                self._take(frame)
        except ConnectionClosed:
            return

    def _take(self, frame: protocol.WorkerFrame) -> None:
        if isinstance(frame, protocol.StepEvents):
            for event in frame.events:
                self._take_event(event)
        elif isinstance(frame, protocol.AdapterState):
            if frame.stage in ("ready", "failed"):
                self._loads.pop(frame.load_id).set_result(frame)
        elif isinstance(frame, protocol.AdapterReport):
            self._reports.pop(frame.order_id).set_result(frame)
        elif isinstance(frame, protocol.WorkerStatus):
            self.status = frame
            self.changed.set()

    def _take_event(self, event: protocol.TokenEvent) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None or stream.ended.done():
            self._findings.wrong.append(f"{event.request_id}: an event after its last")
            return
        at = len(stream.tokens)
        new = list(event.token_ids)
        if new and (event.index != at or stream.expected[at : at + len(new)] != new):
            fields = msgspec.structs.astuple(event)
            self._findings.wrong.append(f"{event.request_id}: a wrong token: {fields}")
        stream.tokens += new
        self._findings.tokens += len(new)
        stream.started.set()
        if event.finish is not None:
            stream.ended.set_result(event)


@asynccontextmanager
async def churn_client(worker: Worker, findings: Findings, name: str) -> AsyncIterator[ChurnClient]:
    async with dial(worker) as socket:
        await socket.send(protocol.encode(protocol.RouterHello(name)))
        await socket.recv()
        client = ChurnClient(socket, findings)
        reading = asyncio.create_task(client.read())
        try:
            yield client
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
