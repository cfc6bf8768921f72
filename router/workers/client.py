"""Keeps one WebSocket to one worker: connects, checks its hello, connects again. The worker's card
is fetched over HTTP, checked against its digest and kept on disk."""

import asyncio
import contextlib
import hashlib
import logging
import os
import random
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import httpx
import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from loraplex.adapters.errors import CommandError
from loraplex.router.http.client import http_client
from loraplex.router.workers.loads import ProtocolFault
from loraplex.router.workers.session import WorkerSession
from loraplex.server.protocol import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    ModelCard,
    RouterHello,
    WorkerHello,
    decode_worker_frame,
    encode,
)

MAX_CARD_BYTES = 64 << 20
MAX_KEPT_CARDS = 16
_FETCH_TIMEOUT_S = 30.0
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_decode = msgspec.json.Decoder(ModelCard).decode

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_HELLO_TIMEOUT_S = 5.0
_PING_INTERVAL_S = 5.0
_PING_TIMEOUT_S = 15.0
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 1.0
_STARTING_STATUS = 503  # its engine is not ready yet
_STABLE_S = 10.0  # a connection that held so long starts the back-off anew


class CardError(CommandError):
    """A model card cannot be had, or is not what its digest says."""


def digest_of(payload: bytes) -> str:
    """sha256 hex of the card's JSON bytes, as a worker's hello carries it."""
    return hashlib.sha256(payload).hexdigest()


def parse_card(payload: bytes, expected_digest: str | None = None) -> ModelCard:
    """The card in these JSON bytes. Raises CardError."""
    if expected_digest is not None and digest_of(payload) != expected_digest:
        raise CardError(f"the model card's bytes do not match its digest {expected_digest}")
    try:
        return _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CardError(f"not a model card: {error}") from error


class CardStore:
    """Cards on disk by digest. A folder that cannot be read or written only costs a fetch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.expanduser() / "cards"

    def load(self, digest: str) -> ModelCard | None:
        path = self._path(digest)
        try:
            if path.stat().st_size > MAX_CARD_BYTES:
                return None
            return parse_card(path.read_bytes(), digest)
        except (OSError, CardError):
            return None

    def save(self, digest: str, payload: bytes) -> None:
        path = self._path(digest)
        staging = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            staging.write_bytes(payload)
            staging.replace(path)
            self._drop_oldest()
        except OSError:
            with contextlib.suppress(OSError):
                staging.unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        if not _DIGEST.match(digest):
            raise CardError(f"not a digest: {digest[:80]!r}")
        return self._folder / f"{digest}.json"

    def _drop_oldest(self) -> None:
        cards = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in cards[:-MAX_KEPT_CARDS]:
            path.unlink(missing_ok=True)


async def fetch_card(url: str, secret: str) -> bytes:
    """The card's JSON bytes from a worker (`url`: http://host:port). Raises CardError."""
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    payload = bytearray()
    try:
        async with (
            http_client(_FETCH_TIMEOUT_S) as client,
            client.stream("GET", f"{url}/card", headers=headers) as response,
        ):
            if response.status_code != 200:
                raise CardError(f"{url}/card answered {response.status_code}")
            async for chunk in response.aiter_bytes():
                payload += chunk
                if len(payload) > MAX_CARD_BYTES:
                    raise CardError(f"{url}/card: larger than {MAX_CARD_BYTES} bytes")
    except httpx.HTTPError as error:
        raise CardError(f"{url}/card: {error or type(error).__name__}") from error
    return bytes(payload)


class Courier(Protocol):
    """Brings the files of uploads, or of pictures, to workers."""

    async def deliver(self, worker: str, secret: str, digests: Sequence[str]) -> None:
        """Sends files to a worker's HTTP address. Raises AdapterError."""
        ...


class WorkerListener(Protocol):
    """Hears of a worker's comings and goings."""

    def base_of(self, card: ModelCard) -> str:
        """The name of the base that has this card. Raises CardError where the router has none."""

    async def accept_card(self, base: str, card: ModelCard) -> str | None:
        """Judges a worker's model card. Asked at each connection: None = welcome, else why this
        model cannot be served from.
        """

    def accept_worker(self, hello: WorkerHello) -> str | None:
        """Judges a worker at each connection: None = welcome, else why it is not."""

    def worker_gone(self, base: str) -> None:
        """A connection that had begun is over."""

    def worker_connected(self, session: WorkerSession) -> None:
        """A connection begins. It may be sent frames; what comes back is read from now on."""

    def worker_changed(self, base: str) -> None:
        """Room, readiness or residency of some worker of this base may have changed."""


class WorkerClient:
    """Keeps a connection to one worker: `run` keeps it connected until it is cancelled.

    `url`: ws://host:port or wss://host:port. base: the name of the base that the worker serves, or
    served when it was last connected; "" = not known yet, or the router's only one.
    """

    def __init__(
        self,
        url: str,
        router_id: str,
        secret: str,
        cards: CardStore,
        listener: WorkerListener,
        courier: Courier,
        pictures: Courier,
    ) -> None:
        self.url = url.rstrip("/")
        self.session: WorkerSession | None = None
        self.card: ModelCard | None = None  # while it is connected; without its texts
        self.base = ""
        self.problem: str | None = "not connected yet"
        self._was_there = False
        self._router_id = router_id
        self._secret = secret
        self._cards = cards
        self._listener = listener
        self._courier = courier
        self._pictures = pictures

    async def run(self) -> None:
        delay = _FIRST_DELAY_S
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            problem = await self._serve_once()
            if problem != self.problem:
                if self._was_there:
                    logger.warning("worker %s: %s", self.url, problem)
                else:  # it is only starting
                    logger.info("waiting for worker %s: %s", self.url, problem)
            self.problem = problem
            if loop.time() - started > _STABLE_S:
                delay = _FIRST_DELAY_S
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))
            delay = min(delay * 2, _LONGEST_DELAY_S)

    async def _serve_once(self) -> str:
        """Serves one connection, from its opening to its end. Returns why it ended."""
        try:
            await self._serve_connection()
        except OSError as error:
            return f"cannot be reached: {error.strerror or type(error).__name__}"
        except InvalidStatus as error:
            status = error.response.status_code
            self._was_there |= status != _STARTING_STATUS
            if status == _STARTING_STATUS:
                return "it takes no connection yet"
            return f"it answered {status} to the attempt to connect"
        except (TimeoutError, WebSocketException, CardError, ProtocolFault) as error:
            self._was_there = True
            return str(error) or type(error).__name__
        except Exception:  # supervision: one connection's fault must not end the others
            logger.exception("worker %s: unforeseen error", self.url)
            return "an unforeseen error; see the log"
        finally:
            self.session = None
            self._listener.worker_changed(self.base)
            if self.card is not None:
                self.card = None
                self._listener.worker_gone(self.base)
        return "the worker closed the connection"

    async def _serve_connection(self) -> None:
        headers = {"Authorization": f"Bearer {self._secret}"} if self._secret else {}
        async with connect(
            f"{self.url}/connect",
            additional_headers=headers,
            compression=None,
            max_size=MAX_FRAME_BYTES,
            open_timeout=_CONNECT_TIMEOUT_S,
            ping_interval=_PING_INTERVAL_S,
            ping_timeout=_PING_TIMEOUT_S,
            close_timeout=1.0,
            proxy=None,
            logger=_frame_logger(),
        ) as socket:
            hello = await self._greet(socket)
            card = await self._card(hello.card_digest)
            base = self._listener.base_of(card)
            refusal = await self._listener.accept_card(base, card)
            if refusal is None:
                refusal = self._listener.accept_worker(hello)
            if refusal is not None:
                raise CardError(refusal)
            place = (_http(self.url), self._secret)
            supply = partial(self._courier.deliver, *place)
            bring = partial(self._pictures.deliver, *place)
            changed = partial(self._listener.worker_changed, base)
            session = WorkerSession(socket, hello, changed, supply, bring, base)
            self.base, self.session = base, session
            self.card = msgspec.structs.replace(
                card, tokenizer_json="", chat_template=None, named_templates={}
            )
            self.problem = None
            self._was_there = True
            logger.info("worker %s: connected to %s", self.url, hello.worker_id)
            self._listener.worker_connected(self.session)
            await self.session.run()

    async def _greet(self, socket: ClientConnection) -> WorkerHello:
        await socket.send(encode(RouterHello(self._router_id)))
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            message = await socket.recv()
        try:
            hello = decode_worker_frame(message) if isinstance(message, bytes) else None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolFault(f"a hello that cannot be read: {error}") from error
        if not isinstance(hello, WorkerHello):
            raise ProtocolFault("expected a hello first")
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolFault(
                f"it speaks protocol version {hello.version}, this router {PROTOCOL_VERSION}: "
                "run the same release on both"
            )
        if hello.credits < 1:
            raise ProtocolFault("it grants this router no sequences")
        return hello

    async def _card(self, digest: str) -> ModelCard:
        card = await asyncio.to_thread(self._cards.load, digest)
        if card is not None:
            return card
        payload = await fetch_card(_http(self.url), self._secret)
        card = await asyncio.to_thread(parse_card, payload, digest)
        await asyncio.to_thread(self._cards.save, digest, payload)
        return card


def _http(url: str) -> str:
    """The address of the worker's HTTP face."""
    return "http" + url.removeprefix("ws")


def _frame_logger() -> logging.Logger:
    """A logger that is never at DEBUG: there the library shows frames, with credentials."""
    quiet = logging.getLogger(f"{__name__}.websocket")
    quiet.setLevel(logging.WARNING)
    return quiet
