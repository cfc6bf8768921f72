"""Stored answers, for their tenant alone: kept, followed, shown, deleted, made in background."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import convert
from starlette.requests import Request
from starlette.responses import Response

from loraplex.router.api.request.body import require
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.responses import request as responses
from loraplex.router.api.responses.input_items import InputItem
from loraplex.router.api.responses.items import Answer
from loraplex.router.api.responses.stored import (
    StoredResponse,
    answer_in,
    own_items,
    unpack,
    unstored,
)
from loraplex.router.background import Background
from loraplex.router.batches.inside import InsideDoor
from loraplex.router.call import AnswerHead, RequestError
from loraplex.router.files.store import DiskShelf, off_loop
from loraplex.router.files.stored_file import RESPONSE_ID, is_id, new_id
from loraplex.router.generation.answerer import Answerer
from loraplex.router.generation.body_reader import Unread
from loraplex.router.http.body import read_json_body
from loraplex.router.http.idempotency import with_body
from loraplex.router.http.sse import EventStream, LongAnswer
from loraplex.router.policy.batch_limits import ResponsesLimits
from loraplex.router.shared.store import Shelf, StoreDown
from loraplex.router.tenancy.keys import Caller

logger = logging.getLogger(__name__)

# So often a router says that it works on an answer. After the lease it is taken for dead.
_BEAT_S = 5.0
_LEASE_S = 20.0
_SWEEP_S = 60.0
_MAX_RUNNING = 256
_MAX_OF_TENANT = 64
_TRIES = 4
_DOWN = (RequestError, StoreDown)


class _Ask(msgspec.Struct, frozen=True):
    """Fields of a body that concern storing."""

    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None


class _Place(msgspec.Struct, frozen=True):
    """A place for an answer. earlier: items of the conversation. body: the request's."""

    tenant: str
    name: str
    earlier: list[dict[str, Any]]
    body: bytes

    def parse(self, body: bytes, limits: ApiLimits, bearer: str | None) -> ApiRequest:
        name, items = self.name.removeprefix(RESPONSE_ID), convert(self.earlier, list[InputItem])
        return responses.parse(body, limits, bearer, name, items)

    def stored(self, answer: dict[str, Any], alive_until: float = 0.0) -> StoredResponse:
        return StoredResponse(answer, self.earlier + own_items(self.body, self.name), alive_until)


@dataclass
class ResponseDesk:
    """Answers requests for responses, and stores the answers. stop_s: seconds that answers in the
    background have when the router stops. clock: Unix seconds. door: the way in of their
    requests. works: their tasks, by tenant and id.
    """

    shelf: Shelf
    limits: ResponsesLimits
    answerer: Answerer
    stop_s: float
    clock: Callable[[], float]
    door: InsideDoor = field(default_factory=InsideDoor)
    works: dict[tuple[str, str], asyncio.Task[None]] = field(default_factory=dict)

    @property
    def _least(self) -> str:
        """The name of the oldest answer that may be there."""
        return new_id(RESPONSE_ID, self.clock() - self.limits.keep_s, "")

    async def answer(self, request: Request) -> Response:
        """Answers a request to the route. Raises RequestError, ClientGone."""
        inside: _Place | None = getattr(request.state, "place", None)
        if inside is not None:
            return await self.answerer.answer(request, inside.parse)
        authorization = request.headers.get("authorization")
        caller = await self.answerer.tenancy.identify(authorization)
        body = await read_json_body(request, self.answerer.body_limits)
        request = with_body(request, body)
        if caller.is_batch:  # thousands of lines would take the place of all else
            return await self.answerer.answer(request, responses.parse)
        ask = _ask_of(body)
        place = await self._place_of(caller.tenant, body, ask.previous_response_id)
        if ask.background:
            return await self._begin(caller, place, authorization or "")
        response = await self.answerer.answer(request, place.parse)
        if ask.store is False:
            return response
        if isinstance(response, EventStream):
            response.through(partial(self._through, place))
        elif isinstance(response, LongAnswer):
            answer = msgspec.json.decode(response.whole)
            return LongAnswer([await self._kept(place, answer, response.whole)], response.headers)
        return response

    async def get(self, tenant: str, name: str, param: str | None = None) -> StoredResponse:
        """A stored answer. Raises RequestError (response_not_found), if expired, too; StoreDown."""
        return (await self._read(tenant, name, param))[1]

    async def delete(self, tenant: str, name: str) -> None:
        while not await self._swap(tenant, name, (await self._read(tenant, name))[0], b""):
            pass  # its router gave a sign of life in between
        self._stop(tenant, name)

    async def cancel(self, tenant: str, name: str) -> StoredResponse:
        """Returns the answer as it is then. One that is over stays so. Raises RequestError."""
        blob, stored = await self._read(tenant, name)
        require(stored.answer["background"], "only answers in the background end early", "id")
        if not stored.alive_until:
            return stored
        cancelled = stored.over("cancelled")
        if not await self._swap(tenant, name, blob, cancelled.pack()):
            return await self.cancel(tenant, name)
        self._stop(tenant, name)
        return cancelled

    @asynccontextmanager
    async def running(self, background: Background) -> AsyncIterator[None]:
        """Sweeps while inside. At the end answers in the background have `stop_s`."""
        async with background.running(self._sweep()):
            yield
        works = set(self.works.values())
        if works:
            await asyncio.wait(works, timeout=self.stop_s)
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)

    # One answer

    async def _place_of(self, tenant: str, body: bytes, previous: str | None) -> _Place:
        """Makes a place for a new answer, with the conversation before it. Raises RequestError."""
        earlier: list[dict[str, Any]] = []
        if previous is not None:
            stored = await self.get(tenant, previous, "previous_response_id")
            require(not stored.alive_until, "it is not over yet", "previous_response_id")
            earlier = stored.items + stored.answer["output"]
            nbytes, most = len(msgspec.json.encode(earlier)), self.answerer.body_limits.max_bytes
            too_long = f"the conversation has {nbytes} bytes, and may have {most}"
            require(nbytes <= most, too_long, "previous_response_id")
        name = new_id(RESPONSE_ID, self.clock(), secrets.token_hex(6))
        return _Place(tenant, name, earlier, body)

    async def _kept(self, place: _Place, answer: dict[str, Any], said: bytes) -> bytes:
        """Stores an answer, if the store is up. said: as it is to be sent; it comes back, and says
        whether it was stored.
        """
        try:
            blob = await off_loop(place.stored(answer).pack)
            await self._swap(place.tenant, place.name, b"", blob)
        except _DOWN as error:
            logger.warning("response %s is not stored: %s", place.name, error)
            return unstored(said)
        return said

    async def _through(self, place: _Place, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Passes a stream on, whose answer is stored before its last event is sent."""
        async for piece in rest:
            answer = answer_in(piece)
            yield piece if answer is None else await self._kept(place, answer, piece)

    # In the background

    async def _begin(self, caller: Caller, place: _Place, authorization: str) -> Response:
        """Stores an open answer, and starts work on it. Raises RequestError."""
        of_tenant = sum(tenant == place.tenant for tenant, _ in self.works)
        if len(self.works) >= _MAX_RUNNING or of_tenant >= _MAX_OF_TENANT:
            raise RequestError("overloaded", "too many answers in the background; let some end")
        unread = Unread(place.body, place.parse, caller, None, attrgetter("call"))
        dispatcher = self.answerer.dispatcher
        read = await dispatcher.reader.read(unread, waits=False)
        asked = read.parsed
        dispatcher.authorise(read, asked.call, caller, place.name)
        choice, now = asked.call.adapter, self.clock()
        names = read.base.require().card.names
        name = names[0] if choice is None else choice.adapter_id
        head = AnswerHead(place.name, int(now), name, None, None, 0)
        begun = msgspec.to_builtins(Answer(head, asked.options).response("in_progress", []))
        stored = place.stored(begun, now + _LEASE_S)
        await self._swap(place.tenant, place.name, b"", await off_loop(stored.pack))
        work = asyncio.create_task(self._work(place, stored, authorization))
        self.works[place.tenant, place.name] = work
        work.add_done_callback(lambda _: self.works.pop((place.tenant, place.name), None))
        return Response(msgspec.json.encode(begun), media_type="application/json")

    async def _work(self, place: _Place, stored: StoredResponse, authorization: str) -> None:
        """Answers as a request of the same caller, and stores how that ends."""
        asking = asyncio.ensure_future(
            self.door.ask("/v1/responses", place.body, authorization, place=place)
        )
        try:
            while not (await asyncio.wait((asking,), timeout=_BEAT_S))[0]:
                alive = msgspec.structs.replace(stored, alive_until=self.clock() + _LEASE_S)
                with contextlib.suppress(*_DOWN):
                    if not await self._advance(place, alive):
                        return
            over = stored.answered(asking.result().status, asking.result().content)
            for _ in range(_TRIES):
                with contextlib.suppress(*_DOWN):
                    await self._advance(place, over)
                    return
                await asyncio.sleep(_BEAT_S)
        except asyncio.CancelledError:
            with contextlib.suppress(*_DOWN):
                await self._advance(place, stored.over("failed", "the router was stopped"))
            raise
        finally:
            asking.cancel()

    async def _advance(self, place: _Place, stored: StoredResponse) -> bool:
        """Stores an open answer's state. False = it was cancelled or deleted. Raises as a shelf."""
        new = await off_loop(stored.pack)
        while blob := await self.shelf.shelved(place.tenant, place.name):
            if not unpack(blob).alive_until:
                break
            if await self._swap(place.tenant, place.name, blob, new):
                return True
        return False

    def _stop(self, tenant: str, name: str) -> None:
        work = self.works.get((tenant, name))
        if work is not None:
            work.cancel()

    # The shelf

    async def _read(
        self, tenant: str, name: str, param: str | None = None
    ) -> tuple[bytes, StoredResponse]:
        """Reads a stored answer, as bytes and decoded. Raises RequestError, StoreDown."""
        is_name = is_id(RESPONSE_ID, name) and name >= self._least
        blob = await self.shelf.shelved(tenant, name) if is_name else b""
        if not blob:
            raise RequestError("response_not_found", f"no response {name[:80]!r}", param=param)
        stored = await off_loop(unpack, blob)
        if 0 < stored.alive_until <= self.clock():
            over = stored.over("failed", "the router that worked on it has died").pack()
            await self._swap(tenant, name, blob, over)
            return await self._read(tenant, name, param)
        return blob, stored

    async def _swap(self, tenant: str, name: str, old: bytes, new: bytes) -> bool:
        return await self.shelf.shelve(tenant, name, old, new, self.limits, self._least)

    async def _sweep(self) -> None:
        """Runs until cancelled. Redis forgets by itself."""
        while isinstance(self.shelf, DiskShelf):
            with contextlib.suppress(RequestError):
                await off_loop(self.shelf.sweep, self.limits, self._least)
            await asyncio.sleep(_SWEEP_S)


def _ask_of(body: bytes) -> _Ask:
    try:
        return msgspec.json.decode(body, type=_Ask)
    except (msgspec.MsgspecError, RecursionError):  # it will be refused
        return _Ask()
