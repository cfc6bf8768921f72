"""Answers the generation routes: a body in, an answer or a stream of events out.

A stream's first event or failure is awaited before its headers go out, so that an error before the
first token is a real HTTP status.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.router.api.lorax.generated import Timings, count_headers, head_headers
from loraplex.router.api.request.formatter import ApiRequest, Formatter
from loraplex.router.api.sglang.generate import joined
from loraplex.router.call import (
    DIGEST_HEADER,
    SCALE_HEADER,
    UNBOUND_HEADER,
    ChoiceResult,
    GenerationCall,
    PromptInfo,
    RequestError,
)
from loraplex.router.generation.body_reader import ParseBody
from loraplex.router.generation.dispatcher import ArrivedRequest, Dispatcher
from loraplex.router.generation.generation import Generation, Part
from loraplex.router.http.body import BodyLimits, read_json_body
from loraplex.router.http.sse import EventStream, LongAnswer, until_disconnect
from loraplex.router.telemetry.caller_errors import CallerErrors
from loraplex.router.telemetry.metrics import RouterMetrics
from loraplex.router.telemetry.observer import RequestObserver
from loraplex.router.telemetry.request import in_hand
from loraplex.router.tenancy.metering import Charge
from loraplex.router.tenancy.tenancy import Tenancy
from loraplex.server.protocol import SamplingParams

# Of a list of places; those behind are counted.
_HEADER_CHARS = 2_000
_SESSION_HEADER = "x-session-id"
# Of a vector's number in JSON.
_NUMBER_CHARS = 20

PartsOf = Callable[[bytes], Sequence[bytes]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answerer:
    """One generation route's work, whatever its API."""

    dispatcher: Dispatcher
    tenancy: Tenancy
    body_limits: BodyLimits
    metrics: RouterMetrics
    errors: CallerErrors

    async def answer(
        self, request: Request, parse: ParseBody[ApiRequest], parts_of: PartsOf | None = None
    ) -> Response:
        """Answers for text or vectors. parts_of: bodies that are answered each by itself, and as
        one list; none = the body is one. Raises RequestError before the first byte; ClientGone."""
        caller = await self.tenancy.identify(request.headers.get("authorization"))
        body = await read_json_body(request, self.body_limits)
        session = request.headers.get(_SESSION_HEADER, "")
        arrived = ArrivedRequest(
            request.state.request_id, caller, body, parse, self.bearer(request), session
        )
        parts = [] if parts_of is None else parts_of(body)
        answering = self._each(request, arrived, parts) if parts else self._answer(request, arrived)
        del body, arrived, parts  # a body may be large, and an answer long
        return await until_disconnect(request, answering)

    async def _each(
        self, request: Request, arrived: ArrivedRequest, parts: Sequence[bytes]
    ) -> Response:
        """Answers parts of a request at once. The first that fails ends all."""
        tasks = [
            asyncio.create_task(
                self._answer(
                    request,
                    msgspec.structs.replace(
                        arrived, request_id=f"{arrived.request_id}_{i}", body=part
                    ),
                )
            )
            for i, part in enumerate(parts)
        ]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        wholes = (answer.whole for answer in answers if isinstance(answer, LongAnswer))
        return LongAnswer([joined(wholes)])

    async def _answer(self, request: Request, arrived: ArrivedRequest) -> Response:
        charge = self.tenancy.metering.charge(arrived.caller, arrived.request_id)
        observer = self.observer(request, charge)
        generation, api_request = await self.dispatcher.start(arrived, charge, observer)
        del arrived
        call = api_request.call
        try:
            formatter = api_request.formatter(generation.head)
            if call.stream:
                return await _stream(generation, formatter, call, charge, observer)
            return await _whole(generation, formatter, call, charge, observer)
        except BaseException:
            generation.close()
            raise

    def observer(self, request: Request, charge: Charge) -> RequestObserver:
        """The observer of the request that this task works for."""
        return RequestObserver(
            in_hand(),
            self.metrics,
            charge,
            report=partial(self.errors.note, request),
            clock=asyncio.get_running_loop().time,
        )

    def bearer(self, request: Request) -> str | None:
        """The bearer, for sources of adapters; None where it is a key of this router's."""
        return None if self.tenancy.needs_keys else _bearer(request)


async def _whole(
    generation: Generation,
    formatter: Formatter,
    call: GenerationCall,
    charge: Charge,
    observer: RequestObserver,
) -> Response:
    """Makes an answer that is sent when it is complete."""
    results = await generation.finish()
    pieces = await generation.model.turns.written(
        _size(results, generation.prompts, call.sampling),
        lambda: formatter.whole(results, generation.prompts),
    )
    generation.close()
    headers = _head_headers(generation, call, charge, observer)
    if call.api == "lorax":
        timings = Timings(observer.elapsed_s, first_token_s=observer.first_token_s)
        headers |= count_headers(generation.prompts, results, timings)
    return LongAnswer(pieces, headers)


def _size(
    results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo], sampling: SamplingParams
) -> int:
    """Characters of an answer, about. Alternatives of a token count, text does not: it is short."""
    numbers = sum(len(result.vector) for result in results)
    least = 2 + len(sampling.logprob_token_ids)
    tokens = sum(len(result.tokens) for result in results) * (least + (sampling.logprobs or 0))
    tokens += sum(len(info.tokens) for info in prompts) * (least + (sampling.prompt_logprobs or 0))
    routed = sum(4 * len(result.routed.chosen) for result in results if result.routed is not None)
    return _NUMBER_CHARS * (numbers + 2 * tokens) + routed


async def _stream(
    generation: Generation,
    formatter: Formatter,
    call: GenerationCall,
    charge: Charge,
    observer: RequestObserver,
) -> Response:
    """Makes a stream, once its first event is there."""
    first = b""
    while not first and (parts := await generation.next()):
        first = _write(formatter, parts)

    def failed(error: RequestError) -> None:
        stream.has_failed = True
        observer.broke_off(error)

    rest = _rest(generation, formatter, failed)
    headers = _head_headers(generation, call, charge, observer)
    stream = EventStream(first, rest, generation.close, headers)
    return stream


async def _rest(
    generation: Generation, formatter: Formatter, report: Callable[[RequestError], None]
) -> AsyncIterator[bytes]:
    """Bytes of the answer after its first event, up to the one end or error. report: receives the
    error."""
    try:
        while parts := await generation.next():
            chunk = _write(formatter, parts)
            if chunk:
                yield chunk
        last = formatter.end()
    except RequestError as error:
        report(error)
        last = formatter.error(error)
    except Exception:  # the process edge: a client that has headers still gets an answer
        logger.exception("request %s failed in its stream", generation.head.request_id)
        internal = RequestError("internal", "internal error")
        report(internal)
        last = formatter.error(internal)
    if last:
        yield last


def _write(formatter: Formatter, parts: list[Part]) -> bytes:
    return b"".join(
        formatter.prompt(part) if isinstance(part, PromptInfo) else formatter.chunk(part)
        for part in parts
    )


def _head_headers(
    generation: Generation, call: GenerationCall, charge: Charge, observer: RequestObserver
) -> dict[str, str]:
    """Headers whose values are known with the first token."""
    head, card = generation.head, generation.model.card
    headers = dict(charge.headers)
    if call.api == "lorax":
        source = None if call.adapter is None else call.adapter.source
        headers |= head_headers(head, card.names[0], card.device, source)
    if head.adapter_digest is not None:
        headers[DIGEST_HEADER] = head.adapter_digest
    if head.adapter_scale != 1:
        headers[SCALE_HEADER] = f"{head.adapter_scale:g}"
    if observer.start is not None:
        headers["x-loraplex-start"] = observer.start
    if head.unbound:
        headers[UNBOUND_HEADER] = _listed(head.unbound)
    return headers


def _listed(places: tuple[str, ...]) -> str:
    """Lists places as a header's value: parted by commas, in visible ASCII."""
    coded = [quote(place, safe="[]$/:;=?@!'()*+&") for place in dict.fromkeys(places)]
    lengths = accumulate(len(place) + 2 for place in coded)
    kept = [place for place, length in zip(coded, lengths, strict=True) if length <= _HEADER_CHARS]
    left = len(coded) - len(kept)
    return ", ".join([*kept, f"+{left}"] if left else kept)


def _bearer(request: Request) -> str | None:
    scheme, _, credential = request.headers.get("authorization", "").partition(" ")
    return credential.strip() or None if scheme.lower() == "bearer" else None
