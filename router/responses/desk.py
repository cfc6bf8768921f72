"""Stored answers: kept, followed, shown and deleted, for their tenant alone."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.router.api.request.body import require
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.responses import request as responses
from loraplex.router.api.responses.input import InputItem
from loraplex.router.api.responses.stored import (
    StoredResponse,
    answer_in,
    own_items,
    unpack,
    unstored,
)
from loraplex.router.call import RequestError
from loraplex.router.files.disk import off_loop
from loraplex.router.files.disk_shelf import DiskShelf
from loraplex.router.files.stored_file import RESPONSE_ID, is_id, new_id
from loraplex.router.generation.answerer import Answerer
from loraplex.router.http.body import read_json_body
from loraplex.router.http.idempotency import with_body
from loraplex.router.http.long_answer import LongAnswer
from loraplex.router.http.sse import EventStream
from loraplex.router.policy.batch_limits import ResponsesLimits

logger = logging.getLogger(__name__)

_SWEEP_S = 60.0


class _Ask(msgspec.Struct, frozen=True):
    """What a body says of storing."""

    store: bool | None = None
    previous_response_id: str | None = None


class _Place(msgspec.Struct, frozen=True):
    """Of an answer that may be stored. earlier: items of the conversation. body: its request's."""

    tenant: str
    name: str
    earlier: list[dict[str, Any]]
    body: bytes

    def parse(self, body: bytes, limits: ApiLimits, bearer: str | None) -> ApiRequest:
        items = msgspec.convert(self.earlier, list[InputItem])
        return responses.parse(body, limits, bearer, self.name.removeprefix(RESPONSE_ID), items)


@dataclass(frozen=True, slots=True)
class ResponseDesk:
    """clock: Unix seconds."""

    shelf: DiskShelf
    limits: ResponsesLimits
    answerer: Answerer
    clock: Callable[[], float]

    @property
    def _least(self) -> str:
        """The name of the oldest answer that may be there."""
        return new_id(RESPONSE_ID, self.clock() - self.limits.keep_s, "")

    async def answer(self, request: Request) -> Response:
        """What is posted to the route. Raises RequestError, ClientGone."""
        caller = await self.answerer.tenancy.identify(request.headers.get("authorization"))
        body = await read_json_body(request, self.answerer.body_limits)
        request = with_body(request, body)
        if caller.is_batch:  # thousands of lines would take the place of all else
            return await self.answerer.answer(request, responses.parse)
        ask = _ask_of(body)
        place = await self._place(caller.tenant, body, ask.previous_response_id)
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
        """Raises RequestError (response_not_found), also for one that has expired."""
        is_name = is_id(RESPONSE_ID, name) and name >= self._least
        blob = await self.shelf.shelved(tenant, name) if is_name else b""
        if not blob:
            raise RequestError("response_not_found", f"no response {name[:80]!r}", param=param)
        return await off_loop(unpack, blob)

    async def delete(self, tenant: str, name: str) -> None:
        await self.get(tenant, name)
        await self.shelf.remove(tenant, name)

    async def sweep(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(RequestError):
                await off_loop(self.shelf.sweep, self._least)
            await asyncio.sleep(_SWEEP_S)

    async def _place(self, tenant: str, body: bytes, previous: str | None) -> _Place:
        """Raises RequestError."""
        earlier: list[dict[str, Any]] = []
        if previous is not None:
            stored = await self.get(tenant, previous, "previous_response_id")
            earlier = stored.items + stored.answer["output"]
            nbytes, most = len(msgspec.json.encode(earlier)), self.answerer.body_limits.max_bytes
            too_long = f"the conversation has {nbytes} bytes, and may have {most}"
            require(nbytes <= most, too_long, "previous_response_id")
        name = new_id(RESPONSE_ID, self.clock(), secrets.token_hex(6))
        return _Place(tenant, name, earlier, body)

    async def _kept(self, place: _Place, answer: dict[str, Any], said: bytes) -> bytes:
        """said: as it is to be sent; it comes back, and says whether it was stored."""
        stored = StoredResponse(answer, place.earlier + own_items(place.body, place.name))
        try:
            blob = await off_loop(stored.pack)
            await self.shelf.shelve(place.tenant, place.name, blob, self._least)
        except RequestError as error:
            logger.warning("response %s is not stored: %s", place.name, error.message)
            return unstored(said)
        return said

    async def _through(self, place: _Place, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """A stream, whose answer is stored before its last event is sent."""
        async for piece in rest:
            answer = answer_in(piece)
            yield piece if answer is None else await self._kept(place, answer, piece)


def _ask_of(body: bytes) -> _Ask:
    try:
        return msgspec.json.decode(body, type=_Ask)
    except (msgspec.MsgspecError, RecursionError):  # it will be refused
        return _Ask()
