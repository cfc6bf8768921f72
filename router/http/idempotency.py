"""`Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header): a retry never runs twice.

While a request runs, its like waits for its answer here and is refused by other routers; afterwards
the answer is kept for a while. A request that failed, or whose client left, leaves nothing behind.
"""

import asyncio
import contextlib
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from loraplex.router.call import RequestError
from loraplex.router.http.body import BodyLimits, read_json_body
from loraplex.router.http.sse import EventStream, takes_events, until_disconnect
from loraplex.router.shared.divided_room import DividedRoom
from loraplex.router.shared.store import Store, StoreDown
from loraplex.router.tenancy.keys import Caller

logger = logging.getLogger(__name__)

HEADER = "idempotency-key"
REPLAYED = "idempotency-replayed"
MAX_KEPT_BYTES = 64 << 10
MAX_KEPT = 1024
_SWEPT = 16  # kept answers looked at when one is added
# Of a claim: a router that dies leaves its requests to others after so long.
LEASE_S = 6.0
_RENEW_S = 2.0
_RETRY_S = 1.0
# A claim lasts at least so long, and so do writes that a late store has not received yet.
_LATE_S = LEASE_S - _RENEW_S
_LATE_STEP_S = 0.1
_KEY = re.compile(r"[\x21-\x7e]{1,255}")

Run = Callable[[Request], Awaitable[Response]]
# Of the header `Authorization`.
Identify = Callable[[str | None], Awaitable[Caller]]


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """The store's record of an idempotency key. mark: hash of route and body. body None: it was
    streamed, or is too large to be kept.
    """

    mark: bytes
    state: Literal["running", "done"]
    owner: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None


class _Ask(msgspec.Struct, frozen=True):
    """The body's wish for its answer."""

    stream: bool | None = None


_read_ask = msgspec.json.Decoder(_Ask).decode
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Record).decode


class _Flight:
    """A request that runs here. done: its answer, or None when its like has to try for itself.

    tenant: its caller's. streams: it asks for a stream; known from the start, for its first token
    may be long in coming.
    """

    def __init__(self, tenant: str, mark: bytes, streams: bool) -> None:
        self.tenant = tenant
        self.mark = mark
        self.streams = streams
        self.done: asyncio.Future[_Record | None] = asyncio.get_running_loop().create_future()


class Idempotency:
    """Answers a repeated request with the first one's answer, by its `Idempotency-Key`.

    identify: raises RequestError for a caller who may not come in (any more).

    owner: this router's id. ttl_s: how long answers are kept. body_limits: of a request. strict:
    without the store a key is refused; else it holds within this process alone.
    """

    def __init__(
        self,
        store: Store,
        identify: Identify,
        owner: str,
        ttl_s: float,
        body_limits: BodyLimits,
        strict: bool,
    ) -> None:
        self._store = store
        self._identify = identify
        self._owner = owner
        self._ttl_s = ttl_s
        self._body_limits = body_limits
        self._strict = strict
        self._late: set[asyncio.Task[None]] = set()
        self._flights: dict[str, _Flight] = {}
        self._kept = DividedRoom()

    async def answer(self, request: Request, run: Run) -> Response:
        """Runs a request, or repeats the answer that its key has already. Raises what `run` raises,
        and RequestError for a key that cannot be honoured.
        """
        given = request.headers.get(HEADER)
        if given is None:
            return await run(request)
        key = given.strip().removeprefix('"').removesuffix('"')
        if not _KEY.fullmatch(key):
            raise RequestError("invalid", "Idempotency-Key: expected 1 to 255 visible characters")
        authorization = request.headers.get("authorization")
        caller = await self._identify(authorization)
        body = await read_json_body(request, self._body_limits)
        name = _name(caller.tenant, authorization or "", key)
        mark = hashlib.sha256(request.url.path.encode() + b"\0" + body).digest()
        while (flight := self._flights.get(name)) is not None:
            record = await self._follow(request, flight, mark)
            if record is not None:
                return _replay(record)
        flight = _Flight(caller.tenant, mark, _asks_for_stream(request, body))
        return await self._lead(name, flight, with_body(request, body), run)

    async def _follow(self, request: Request, flight: _Flight, mark: bytes) -> _Record | None:
        _check_mark(flight.mark, mark)
        if flight.streams:
            raise _running()
        return await until_disconnect(request, asyncio.shield(flight.done))

    async def _lead(self, name: str, flight: _Flight, request: Request, run: Run) -> Response:
        self._flights[name] = flight
        mark = flight.mark
        try:
            claim = _encode(_Record(mark, "running", self._owner))
            known = await self._claim(name, claim)
            if known is not None:
                return self._known(name, known, flight)
            renewing = asyncio.create_task(self._renew(name, claim))
        except BaseException:
            self._land(name, flight, None)
            raise
        try:
            response = await run(request)
        except BaseException:
            await self._settle(name, claim, flight, renewing, None)
            raise
        if isinstance(response, EventStream):
            finish = self._finisher(name, claim, flight, renewing)
            return _Watched(response, finish)
        await self._settle(name, claim, flight, renewing, _record_of(response, mark, self._owner))
        return response

    def _known(self, name: str, known: bytes, flight: _Flight) -> Response:
        """The response for a key that another request has left in the store."""
        record = _decode(known)
        _check_mark(record.mark, flight.mark)
        if record.state == "running":
            raise _running()
        response = _replay(record)
        self._land(name, flight, record)
        return response

    def _finisher(
        self, name: str, claim: bytes, flight: _Flight, renewing: "asyncio.Task[None]"
    ) -> Callable[[bool], Awaitable[None]]:
        async def finish(whole: bool) -> None:
            record = _Record(flight.mark, "done", self._owner) if whole else None
            await self._settle(name, claim, flight, renewing, record)

        return finish

    # The store: without it a key still holds within this process

    async def _claim(self, name: str, claim: bytes) -> bytes | None:
        try:
            return await self._store.add(name, claim, LEASE_S)
        except StoreDown as error:
            if self._strict:
                raise RequestError(
                    "unavailable",
                    "whether this Idempotency-Key was used cannot be known now; try again soon",
                    retry_after_s=_RETRY_S,
                ) from error
            logger.debug("no store: idempotency keys hold within this process alone")
        return None

    async def _renew(self, name: str, claim: bytes) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            with contextlib.suppress(StoreDown):
                await self._store.swap(name, claim, claim, LEASE_S)

    async def _settle(
        self,
        name: str,
        claim: bytes,
        flight: _Flight,
        renewing: "asyncio.Task[None]",
        record: _Record | None,
    ) -> None:
        renewing.cancel()
        try:
            if not await self._record_end(name, claim, flight, record):
                task = asyncio.create_task(self._record_end_late(name, claim, flight, record))
                self._late.add(task)
                task.add_done_callback(self._late.discard)
        finally:
            self._land(name, flight, record)

    async def _record_end(
        self, name: str, claim: bytes, flight: _Flight, record: _Record | None
    ) -> bool:
        """Record the request's end. Returns whether the store has it now."""
        try:
            new = None if record is None else _encode(record)
            await self._store.swap(name, claim, new, self._ttl_s)
            if record is not None and record.body is not None:
                await self._keep(flight.tenant, name)
        except StoreDown:
            return False
        return True

    async def _record_end_late(
        self, name: str, claim: bytes, flight: _Flight, record: _Record | None
    ) -> None:
        """Records the end later: a store that was late must not let the request run again."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _LATE_S
        while loop.time() < until:
            await asyncio.sleep(_LATE_STEP_S)
            if await self._record_end(name, claim, flight, record):
                return

    async def _keep(self, tenant: str, name: str) -> None:
        """Notes a kept answer, and bounds what this router has the store keep: the oldest answer of
        the tenant that has most is forgotten.
        """
        now = asyncio.get_running_loop().time()
        self._kept.put(tenant, name, now + self._ttl_s)
        self._kept.expired(now, _SWEPT)
        if len(self._kept) > MAX_KEPT:
            oldest = self._kept.pop()
            stored = await self._store.get(oldest)
            if stored is not None:
                bare = msgspec.structs.replace(_decode(stored), headers=(), body=None)
                await self._store.swap(oldest, stored, _encode(bare), self._ttl_s)

    def _land(self, name: str, flight: _Flight, record: _Record | None) -> None:
        self._flights.pop(name, None)
        if not flight.done.done():
            flight.done.set_result(record if record is not None and record.body else None)


class _Watched(Response):
    """A stream; `finish` receives whether it ended without an error."""

    def __init__(self, inner: EventStream, finish: Callable[[bool], Awaitable[None]]) -> None:
        self._inner = inner
        self._finish = finish
        self.status_code = inner.status_code
        self.raw_headers = inner.raw_headers
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        whole = False

        async def watched(message: Message) -> None:
            nonlocal whole
            await send(message)
            ended = message["type"] == "http.response.body" and not message.get("more_body")
            whole = ended and not self._inner.has_failed

        try:
            await self._inner(scope, receive, watched)
        finally:
            await self._finish(whole)


def _name(tenant: str, authorization: str, key: str) -> str:
    """The store's name of a key, among its tenant's. One caller's keys mean nothing to another;
    neither shows in the store.
    """
    digest = hashlib.sha256(f"{authorization}\0{key}".encode("utf-8", "surrogateescape"))
    return f"idempotency:{tenant}:{digest.hexdigest()}"


def _asks_for_stream(request: Request, body: bytes) -> bool:
    """Whether a stream is asked for: by the route's name, the body, or SageMaker's header."""
    if request.url.path == "/generate_stream":
        return True
    try:
        stated = _read_ask(body).stream
    except (msgspec.MsgspecError, RecursionError):  # it will be refused
        return False
    if stated is None:
        return request.url.path == "/invocations" and takes_events(request)
    return stated


def with_body(request: Request, body: bytes) -> Request:
    """The request as it was before its body was read."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return unread.pop() if unread else await request.receive()

    return Request(request.scope, receive)


def _check_mark(theirs: bytes, mine: bytes) -> None:
    if theirs != mine:
        raise RequestError(
            "idempotency_mismatch", "this Idempotency-Key belongs to another request: use a new one"
        )


def _running() -> RequestError:
    return RequestError(
        "idempotency_conflict",
        "a request with this Idempotency-Key is being answered",
        retry_after_s=_RETRY_S,
    )


def _record_of(response: Response, mark: bytes, owner: str) -> _Record | None:
    if response.status_code != 200:
        return None
    if int(response.headers["content-length"]) > MAX_KEPT_BYTES:
        return _Record(mark, "done", owner)
    return _Record(mark, "done", owner, tuple(response.headers.items()), bytes(response.body))


def _replay(record: _Record) -> Response:
    if record.body is None:
        raise RequestError(
            "idempotency_conflict",
            "the request with this Idempotency-Key has been answered, in a stream or at a length "
            "that is not kept; it is not run again",
        )
    response = Response(record.body, 200)
    for name, value in record.headers:
        response.headers[name] = value
    response.headers[REPLAYED] = "true"
    return response
