"""A worker in the test's own process: the real protocol on a WebSocket, scripted tokens, faults.

Its tokenizer is byte-level without merges: a token's id is its byte, so any text can be scripted.
"""

import asyncio
import hashlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import cache
from http import HTTPStatus

import msgspec
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import DIGEST_FORM, AdapterManifest
from loraplex.server.protocol import (
    PROTOCOL_VERSION,
    Abort,
    AdapterLoad,
    AdapterMerge,
    AdapterOrder,
    AdapterPins,
    AdapterPlace,
    AdapterReport,
    AdapterState,
    AdapterTiers,
    DeviceCost,
    ErrorCode,
    Evidence,
    GenerateRequest,
    Inspect,
    ModelCard,
    RouterFrame,
    RouterHello,
    StepEvents,
    TierState,
    TokenEvent,
    TokenLogprob,
    VectorForm,
    WorkerFrame,
    WorkerHello,
    WorkerPicture,
    WorkerStatus,
    decode_router_frame,
    encode,
)
from tests.ports import free_port

SECRET = "fake-worker-secret"
BASE_NAME = "fake-base"
MAX_CONTEXT = 512
STATUS_INTERVAL_S = 0.2
EOS = 256
BOS = 257
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The characters by which byte-level tokenizers write the bytes 0..255 (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]


def make_tokenizer() -> Tokenizer:
    vocabulary = {char: byte for byte, char in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<bos>"])
    return tokenizer


@cache
def _tokenizer_json() -> str:
    return make_tokenizer().to_str()


def make_card(**changes: object) -> ModelCard:
    card = ModelCard(
        base_digest="b" * 64,
        names=(BASE_NAME,),
        tokenizer_json=_tokenizer_json(),
        chat_template=CHAT_TEMPLATE,
        special_tokens={"eos_token": "<eos>", "bos_token": "<bos>"},
        eos_token_ids=(EOS,),
        vocab_size=258,
        max_context=MAX_CONTEXT,
        dtype="float32",
        device="cpu",
        max_lora_rank=64,
        vectors=VectorForm(size=4, max_tokens=MAX_CONTEXT),
    )
    return msgspec.structs.replace(card, **changes)


def make_manifest(name: str, **changes: object) -> AdapterManifest:
    digest = hashlib.sha256(name.encode()).hexdigest()
    manifest = AdapterManifest(digest, BASE_NAME, ("q_proj",), (8,), 1000, "F32", form=DIGEST_FORM)
    return msgspec.structs.replace(manifest, **changes)


def ids_of(text: str) -> list[int]:
    return list(text.encode())


Script = Callable[[GenerateRequest], list[int]]
# Called before each token with its index; it may wait, or return an error to end the sequence.
BeforeToken = Callable[["FakeWorker", GenerateRequest, int], Awaitable[ErrorCode | None]]
# Answers an AdapterLoad or an AdapterMerge; it may wait.
Loader = Callable[[AdapterLoad], Awaitable[AdapterManifest]]
Merger = Callable[[AdapterMerge], Awaitable[AdapterManifest]]


def echo_script(request: GenerateRequest) -> list[int]:
    """The adapter's first letters and the seed's last digit, then the model ends."""
    name = "base" if request.adapter is None else request.adapter[:6]
    return [*ids_of(f"{name} says hello {request.choice}"), EOS]


def numbers_of(request: GenerateRequest) -> list[float]:
    """A prompt's numbers: its bytes' sum and count, its last byte, the adapter's first digit."""
    ids = request.prompt_ids
    adapter = 0 if request.adapter is None else int(request.adapter[:2], 16)
    return [float(sum(ids)), float(len(ids)), float(ids[-1]), float(adapter)]


async def no_fault(worker: "FakeWorker", request: GenerateRequest, index: int) -> ErrorCode | None:
    await asyncio.sleep(0)
    return None


async def load_any(load: AdapterLoad) -> AdapterManifest:
    if "missing" in load.ref.name:
        raise AdapterError("not_found", f"no adapter {load.ref.name}")
    return make_manifest(load.ref.name)


async def merge_any(merge: AdapterMerge) -> AdapterManifest:
    return make_manifest("merged", digest=merge.recipe.digest)


class FakeWorker:
    """`frames`: all that routers sent, in order. `until` waits for what a test expects to see."""

    def __init__(self, card: ModelCard | None = None, worker_id: str = "fake-0") -> None:
        self.card = card or make_card()
        self.worker_id = worker_id
        self.credits = 64
        self.shards = 1
        self.epoch = 1
        self.version = PROTOCOL_VERSION
        self.ready = True
        self.script: Script = echo_script
        self.numbers: Callable[[GenerateRequest], list[float]] = numbers_of
        self.before_token: BeforeToken = no_fault
        self.evidence: Evidence | None = None  # of what `before_token` returns
        self.loader: Loader = load_any
        self.merger: Merger = merge_any
        self.frames: list[RouterFrame] = []
        self.finished: list[tuple[str, int, int]] = []
        self.card_fetches = 0
        self.port = free_port()
        # Faults: an index whose token is not sent; last tokens without the word that they are.
        self.skip_index: int | None = None
        self.load_s: float | None = None
        self.cost: DeviceCost | None = None  # of each sequence
        self.hold_finish = False
        self.held = 0
        self._seen = asyncio.Condition()
        self._admitted: set[str] = set()
        self.resident: set[str] = set()
        self.pins: frozenset[str] = frozenset()
        self.order_error: str | None = None
        self.places: tuple[AdapterPlace, ...] = ()
        self.places_version = 1
        self.output_tokens = 0
        self.hides = False  # it sends no pictures
        self._connections: set[ServerConnection] = set()
        self._server: Server | None = None
        # Fault: nothing is sent any more, though the connection stands.
        self.silent = False
        self._step = 0

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    @property
    def connected(self) -> bool:
        return bool(self._connections)

    @property
    def requests(self) -> list[GenerateRequest]:
        return [frame for frame in self.frames if isinstance(frame, GenerateRequest)]

    @property
    def aborts(self) -> list[Abort]:
        return [frame for frame in self.frames if isinstance(frame, Abort)]

    @property
    def loads(self) -> list[AdapterLoad]:
        return [frame for frame in self.frames if isinstance(frame, AdapterLoad)]

    @property
    def orders(self) -> list[tuple[str, tuple[str, ...]]]:
        """Orders that move something."""
        orders = [frame for frame in self.frames if isinstance(frame, AdapterOrder)]
        return [(o.action, o.digests) for o in orders if o.action != "status"]

    @property
    def merges(self) -> list[AdapterMerge]:
        return [frame for frame in self.frames if isinstance(frame, AdapterMerge)]

    async def start(self) -> None:
        self._server = await serve(
            self._serve,
            "127.0.0.1",
            self.port,
            process_request=self._http,
            compression=None,
            max_size=16 << 20,
        )

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    def drop_connections(self) -> None:
        """As a killed process does: without a close frame."""
        for connection in self._connections:
            connection.transport.abort()

    def forget_adapters(self) -> None:
        self._admitted.clear()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(240), self._seen:
            await self._seen.wait_for(condition)

    async def send_status(self, connection: ServerConnection) -> None:
        status = WorkerStatus(
            worker_id=self.worker_id,
            epoch=self.epoch,
            base_digest=self.card.base_digest,
            ready=self.ready,
            draining=False,
            free_pages=100,
            total_pages=100,
            running=0,
            waiting=0,
            resident=tuple(sorted(self.resident)),
            loading=(),
            step=self._step,
            adapter_slots=16,
            shards=self.shards,
        )
        await self._send(connection, status)

    async def _report(self, connection: ServerConnection) -> None:
        while True:
            await asyncio.sleep(STATUS_INTERVAL_S)
            await self.send_status(connection)

    async def announce(self, *, ready: bool) -> None:
        self.ready = ready
        for connection in list(self._connections):
            await self.send_status(connection)

    async def send_raw(self, message: bytes | str) -> None:
        for connection in list(self._connections):
            await connection.send(message)

    def _http(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.headers.get("Authorization") != f"Bearer {SECRET}":
            return connection.respond(HTTPStatus.UNAUTHORIZED, "wrong secret")
        if request.path == "/connect":
            return None
        self.card_fetches += 1
        return Response(200, "OK", Headers(), self.card_bytes)

    @property
    def card_bytes(self) -> bytes:
        return msgspec.json.encode(self.card)

    async def _serve(self, connection: ServerConnection) -> None:
        hello = decode_router_frame(await connection.recv(decode=False))
        assert isinstance(hello, RouterHello)
        digest = hashlib.sha256(self.card_bytes).hexdigest()
        await self._send(
            connection,
            WorkerHello(self.worker_id, self.epoch, digest, self.credits, self.version),
        )
        async with self._seen:
            self._connections.add(connection)
            self._seen.notify_all()
        tasks: dict[tuple[str, int, int], asyncio.Task[None]] = {}
        reporting = asyncio.create_task(self._report(connection))
        try:
            await self.send_status(connection)
            async for message in connection:
                assert isinstance(message, bytes)
                await self._take(connection, decode_router_frame(message), tasks)
        except ConnectionClosed:
            pass
        finally:
            async with self._seen:
                self._connections.discard(connection)
                self._seen.notify_all()
            for task in (*tasks.values(), reporting):
                task.cancel()
            await asyncio.gather(*tasks.values(), reporting, return_exceptions=True)

    async def _take(
        self,
        connection: ServerConnection,
        frame: RouterFrame,
        tasks: dict[tuple[str, int, int], asyncio.Task[None]],
    ) -> None:
        async with self._seen:
            self.frames.append(frame)
            self._seen.notify_all()
        if isinstance(frame, GenerateRequest):
            key = (frame.request_id, frame.attempt, frame.choice)
            tasks[key] = asyncio.create_task(self._generate(connection, frame))
        elif isinstance(frame, AdapterLoad | AdapterMerge):
            tasks[(frame.load_id, 0, 0)] = asyncio.create_task(self._load(connection, frame))
        elif isinstance(frame, AdapterPins):
            self.pins = frozenset(frame.digests)
            self.resident |= self.pins & self._admitted
        elif isinstance(frame, AdapterOrder):
            await self._order(connection, frame)
        elif isinstance(frame, Inspect):
            if not self.hides:
                await self._send(connection, self._picture(frame))
        elif isinstance(frame, Abort):
            for key, task in list(tasks.items()):
                meant = key[:2] == (frame.request_id, frame.attempt)
                if meant and frame.choice in (None, key[2]) and not task.done():
                    task.cancel()
                    await self._finish(connection, key)

    def _picture(self, asked: Inspect) -> WorkerPicture:
        return WorkerPicture(
            order_id=asked.order_id,
            device="cpu",
            page_size=16,
            extent_bytes=1 << 16,
            device_extents=64,
            host_extents=128,
            prompt_tokens=0,
            output_tokens=self.output_tokens,
            evictions=0,
            preemptions=0,
            restarts=0,
            in_use=(),
            version=self.places_version,
            places=None if asked.known == self.places_version else self.places,
        )

    def place(self, *places: AdapterPlace) -> None:
        """From now on its arenas look so."""
        self.places = places
        self.places_version += 1

    async def _finish(self, connection: ServerConnection, key: tuple[str, int, int]) -> None:
        await self._emit(connection, TokenEvent(*key, 0, (), finish="abort", cost=self.cost))
        await self._note_finished(key)

    async def _note_finished(self, key: tuple[str, int, int]) -> None:
        async with self._seen:
            self.finished.append(key)
            self._seen.notify_all()

    async def _note_held(self) -> None:
        async with self._seen:
            self.held += 1
            self._seen.notify_all()

    async def _generate(self, connection: ServerConnection, request: GenerateRequest) -> None:
        key = (request.request_id, request.attempt, request.choice)
        if request.adapter is not None and request.adapter not in self._admitted:
            error = TokenEvent(*key, 0, (), finish="error", error="adapter_unavailable")
            await self._emit(connection, error)
            return
        if request.vector is not None:
            await self._read(connection, request)
            return
        if not request.sampling.max_tokens:
            await self._emit(connection, prompt_alone(request))
            return
        output = self.script(request)
        for index in range(len(request.accepted_ids), len(output)):
            error_code = await self.before_token(self, request, index)
            if error_code is not None:
                failed = TokenEvent(*key, index, (), finish="error", error=error_code)
                await self._emit(
                    connection, msgspec.structs.replace(failed, evidence=self.evidence)
                )
                return
            event = token_event(request, index, output[index], self.cost)
            if index == 0:
                event = msgspec.structs.replace(event, load_s=self.load_s)
            if index == self.skip_index:
                continue
            if event.finish is not None and self.hold_finish:
                await self._emit(connection, msgspec.structs.replace(event, finish=None))
                await self._note_held()
                return
            await self._emit(connection, event)
            if event.finish is not None:
                await self._note_finished(key)
                return
        raise AssertionError("the script must end with a stop token or reach max_tokens")

    async def _read(self, connection: ServerConnection, request: GenerateRequest) -> None:
        key = (request.request_id, request.attempt, request.choice)
        error = await self.before_token(self, request, 0)
        if error is not None:
            await self._emit(connection, TokenEvent(*key, 0, (), finish="error", error=error))
            return
        numbers = self.numbers(request)
        vector = struct.pack(f"<{len(numbers)}f", *numbers) if numbers else None
        event = TokenEvent(*key, 0, (), finish="length", cached_tokens=0, vector=vector)
        await self._emit(connection, msgspec.structs.replace(event, load_s=self.load_s))
        await self._note_finished(key)

    async def _load(self, connection: ServerConnection, load: AdapterLoad | AdapterMerge) -> None:
        await self._send(connection, AdapterState(load.load_id, "fetching"))
        try:
            if isinstance(load, AdapterMerge):
                manifest = await self.merger(load)
            else:
                manifest = await self.loader(load)
        except AdapterError as error:
            failed = AdapterState(
                *(load.load_id, "failed", None, error.code, error.message, error.violations),
                error.retry_after_s,
                error.trained_for,
            )
            await self._send(connection, failed)
            return
        self._admitted.add(manifest.digest)
        await self._send(connection, AdapterState(load.load_id, "ready", manifest))

    async def _order(self, connection: ServerConnection, order: AdapterOrder) -> None:
        error = None if order.action == "status" else self.order_error
        if error is None and order.action == "load":
            if not self._admitted.issuperset(order.digests):
                error = "not in the store"
            else:
                self.resident.update(order.digests)
        elif error is None and order.action == "evict":
            self.resident.difference_update(order.digests)
        await self._send(
            connection,
            AdapterReport(order.order_id, tuple(map(self._tiers, order.digests)), error),
        )

    def _tiers(self, digest: str) -> AdapterTiers:
        state: TierState = "ready" if digest in self.resident else "absent"
        on_disk = digest in self._admitted
        return AdapterTiers(digest, on_disk, state, state, digest in self.pins, 4096, 0.5, 1.0)

    async def _emit(self, connection: ServerConnection, event: TokenEvent) -> None:
        self._step += 1
        await self._send(connection, StepEvents(self._step, (event,)))

    async def _send(self, connection: ServerConnection, frame: WorkerFrame) -> None:
        if self.silent:
            return
        with suppress(ConnectionClosed):
            await connection.send(encode(frame))


def token_event(
    request: GenerateRequest, index: int, token_id: int, cost: DeviceCost | None = None
) -> TokenEvent:
    sampling = request.sampling
    finish = None
    is_end = token_id in (EOS, *sampling.end_token_ids) and not sampling.ignore_eos
    if is_end or token_id in sampling.stop_token_ids:
        finish = "stop"
    elif index + 1 >= sampling.max_tokens:
        finish = "length"
    top = tuple((token_id + n, -0.5 - n) for n in range(sampling.logprobs or 0))
    logprobs = None
    if sampling.logprobs is not None:
        logprobs = (TokenLogprob(token_id, -0.5 - request.choice, top),)
    return TokenEvent(
        request.request_id,
        request.attempt,
        request.choice,
        index,
        (token_id,),
        finish=finish,  # type: ignore[arg-type]
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs_of(request) if index == 0 else None,
        cached_tokens=0 if index == 0 else None,
        cost=None if finish is None else cost,
    )


def prompt_alone(request: GenerateRequest) -> TokenEvent:
    key = (request.request_id, request.attempt, request.choice)
    scored = prompt_logprobs_of(request)
    return TokenEvent(*key, 0, (), finish="length", prompt_logprobs=scored)


def prompt_logprobs_of(request: GenerateRequest) -> tuple[TokenLogprob, ...] | None:
    if request.sampling.prompt_logprobs is None:
        return None
    return tuple(
        TokenLogprob(token, None if at == 0 else -0.25, rank=None if at == 0 else 2)
        for at, token in enumerate(request.prompt_ids)
    )


@asynccontextmanager
async def running_worker(worker: FakeWorker) -> AsyncIterator[FakeWorker]:
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()
