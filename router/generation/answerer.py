"""Answers the generation routes: a body in, an answer or a stream of events out.

A stream's first event or failure is awaited before its headers go out, so that an error before the
first token is a real HTTP status.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.api.lorax.answer import count_headers, head_headers
from router.api.request.formatter import ApiLimits, ApiRequest, Formatter
from router.call import DIGEST_HEADER, AnswerHead, GenerationCall, PromptInfo, RequestError
from router.generation.dispatcher import Dispatcher
from router.generation.generation import Generation, Part
from router.http.body import BodyLimits, read_json_body
from router.http.intake import Intake
from router.http.sse import EventStream, until_disconnect
from router.telemetry.told_errors import ToldErrors
from router.tenancy.keys import Caller
from router.tenancy.metering import Charge
from router.tenancy.scope import Registered, check_scope
from router.tenancy.tenancy import Tenancy
from router.workers.base_model import BaseModel

logger = logging.getLogger(__name__)

# `parse` of an API's module: body, limits, the value of `Authorization: Bearer …`.
Parse = Callable[[bytes, ApiLimits, str | None], ApiRequest]


@dataclass(frozen=True, slots=True)
class Answerer:
    """One generation route's work, whatever its API."""

    base: BaseModel
    dispatcher: Dispatcher
    tenancy: Tenancy
    registered: Registered
    body_limits: BodyLimits
    errors: ToldErrors
    intake: Intake

    async def answer(self, request: Request, parse: Parse) -> Response:
        """Raises RequestError for what fails before the first byte; ClientGone."""
        await self.intake.enter()
        caller = await self.tenancy.identify(request.headers.get("authorization"))
        body = await read_json_body(request, self.body_limits)
        if self.base.text is None:  # without a model's names nothing can be told of the body
            until = self.dispatcher.until_ready(caller.tenant, len(body), "chat")
            await until_disconnect(request, until)
        api_request = self._parse(body, request, parse)
        call = self.authorised(api_request.call, caller)
        charge = self.tenancy.metering.charge(caller, request.state.request_id)
        start = self._start(call, charge, len(body))
        if not call.stream:
            return await until_disconnect(request, _whole(start, api_request.formatter, call))
        generation = await until_disconnect(request, start)
        try:
            formatter = api_request.formatter(generation.head)
            told = partial(self.errors.note, request)
            return await _stream(request, generation, formatter, call, told)
        except BaseException:
            generation.close()
            raise

    async def _start(self, call: GenerationCall, charge: Charge, nbytes: int) -> Generation:
        await self.dispatcher.until_ready(call.tenant, nbytes, call.api)
        return await self.dispatcher.start(call, charge)

    def _parse(self, body: bytes, request: Request, parse: Parse) -> ApiRequest:
        """Raises RequestError."""
        self.base.require()
        return parse(body, self.base.limits, self.bearer(request))

    def bearer(self, request: Request) -> str | None:
        """Where callers have keys, the bearer is one: no source of adapters is shown it."""
        return None if self.tenancy.needs_keys else _bearer(request)

    def authorised(self, call: GenerationCall, caller: Caller) -> GenerationCall:
        """As this caller's. Raises RequestError for what the caller's key does not open."""
        adapter = None if call.adapter is None else call.adapter.asked_by(caller.tenant)
        param = "adapter_id" if call.api == "lorax" else "model"
        names = self.base.require().card.names
        check_scope(caller, adapter, names, self.registered, param)
        return msgspec.structs.replace(
            call,
            adapter=adapter,
            tenant=caller.tenant,
            weight=caller.weight,
            priority=caller.priority + call.priority,
        )


async def _whole(
    start: Awaitable[Generation],
    make_formatter: Callable[[AnswerHead], Formatter],
    call: GenerationCall,
) -> Response:
    """An answer that is sent when it is complete."""
    generation = await start
    try:
        formatter = make_formatter(generation.head)
        results = await generation.finish()
        whole = formatter.whole(results, generation.prompts)
    finally:
        generation.close()
    headers = _head_headers(generation, call)
    if call.api == "lorax":
        headers |= count_headers(generation.prompts, results, generation.timings)
    return Response(whole, 200, headers, media_type="application/json")


async def _stream(
    request: Request,
    generation: Generation,
    formatter: Formatter,
    call: GenerationCall,
    told: Callable[[RequestError], None],
) -> Response:
    first = b""
    while not first and (parts := await until_disconnect(request, generation.next())):
        first = _write(formatter, parts)

    def failed(error: RequestError) -> None:
        stream.has_failed = True
        told(error)

    rest = _rest(generation, formatter, failed)
    stream = EventStream(first, rest, generation.close, _head_headers(generation, call))
    return stream


async def _rest(
    generation: Generation, formatter: Formatter, told: Callable[[RequestError], None]
) -> AsyncIterator[bytes]:
    """What follows the first event, to the one end or error. told: hears of the error."""
    try:
        while parts := await generation.next():
            chunk = _write(formatter, parts)
            if chunk:
                yield chunk
        last = formatter.end()
    except RequestError as error:
        told(error)
        last = formatter.error(error)
    except Exception:  # the process edge: a client that has headers still gets an answer
        logger.exception("request %s failed in its stream", generation.head.request_id)
        internal = RequestError("internal", "internal error")
        told(internal)
        last = formatter.error(internal)
    if last:
        yield last


def _write(formatter: Formatter, parts: list[Part]) -> bytes:
    return b"".join(
        formatter.prompt(part) if isinstance(part, PromptInfo) else formatter.chunk(part)
        for part in parts
    )


def _head_headers(generation: Generation, call: GenerationCall) -> dict[str, str]:
    """What is known with the first token."""
    head, card = generation.head, generation.model.card
    headers = dict(generation.charge.headers)
    if call.api == "lorax":
        source = None if call.adapter is None else call.adapter.source
        headers |= head_headers(head, card.names[0], card.device, source)
    if head.adapter_digest is not None:
        headers[DIGEST_HEADER] = head.adapter_digest
    if generation.start is not None:
        headers["x-loraplex-start"] = generation.start
    return headers


def _bearer(request: Request) -> str | None:
    scheme, _, credential = request.headers.get("authorization", "").partition(" ")
    return credential.strip() or None if scheme.lower() == "bearer" else None
