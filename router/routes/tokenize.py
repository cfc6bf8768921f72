"""`/tokenize`, `/detokenize`, `/tokenizer_info` and `/v1/messages/count_tokens`: the tokens of a
generation, without running it."""

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.api.messages.request import TokenCount, parse_count
from router.api.request.body import decode_plain
from router.api.request.fields import MAX_INT32
from router.api.request.formatter import ApiLimits
from router.api.tokenize import (
    DetokenizedText,
    IdsAsked,
    TokenizedPrompt,
    parse_detokenize,
    parse_inputs,
    parse_messages,
    parse_prompt,
    shape_of,
    tokenizer_info,
)
from router.call import GenerationCall
from router.generation.prompts import Prompt, check_ids
from router.http.body import BodyLimits, read_json_body
from router.routes.info import json_response
from router.service import Service
from router.tenancy.keys import Caller
from router.text.model import TextModel, TokenSpan

_PIECE = 1 << 14

ParseIds = Callable[[bytes, ApiLimits, str | None], IdsAsked]


class TokenizeRoutes:
    """Each method answers one route. Callers need a key where generations need one."""

    def __init__(self, service: Service) -> None:
        self._service = service
        config = service.config
        self._body_limits = BodyLimits(config.max_body_bytes, config.body_timeout_s)

    async def tokenize(self, request: Request) -> Response:
        """LoRAX's shape is answered in LoRAX's, errors too; vLLM's two in vLLM's."""
        caller = await self._caller(request)
        body = await read_json_body(request, self._body_limits)
        shape = shape_of(decode_plain(body))
        if shape == "inputs":
            return await _spans(body, self._service.base.require())
        request.state.dialect = "openai"
        parse: ParseIds = parse_messages if shape == "messages" else parse_prompt
        limits, answerer = self._service.base.limits, self._service.answerer
        asked = parse(body, limits, answerer.bearer(request))
        model, (prompt,) = await self._prompts(request, caller, _uncut(asked.call))
        return await _ids(prompt.ids, model, asked.with_strings)

    async def detokenize(self, request: Request) -> Response:
        caller = await self._caller(request)
        body = await read_json_body(request, self._body_limits)
        self._service.base.require()
        limits, bearer = self._service.base.limits, self._service.answerer.bearer(request)
        ids, call = parse_detokenize(body, limits, bearer)
        model, _ = await self._prompts(request, caller, call)
        check_ids(ids, model, "tokens")
        text = await model.long_texts.run(
            len(ids), lambda: model.decode(ids, skip_special_tokens=False)
        )
        return json_response(DetokenizedText(text))

    async def count_messages(self, request: Request) -> Response:
        caller = await self._caller(request)
        body = await read_json_body(request, self._body_limits)
        self._service.base.require()
        limits, bearer = self._service.base.limits, self._service.answerer.bearer(request)
        call = parse_count(body, limits, bearer)
        _, (prompt,) = await self._prompts(request, caller, _uncut(call))
        return json_response(TokenCount(len(prompt.ids)))

    async def info(self, request: Request) -> Response:
        await self._caller(request)
        model = self._service.base.require()
        return json_response(tokenizer_info(model.card, model.added_tokens()))

    async def _caller(self, request: Request) -> Caller:
        """Raises RequestError."""
        return await self._service.tenancy.identify(request.headers.get("authorization"))

    async def _prompts(
        self, request: Request, caller: Caller, call: GenerationCall
    ) -> tuple[TextModel, list[Prompt]]:
        """Authorised and resolved as a generation. Raises RequestError."""
        service, request_id = self._service, request.state.request_id
        asked = service.dispatcher.authorise(call, caller, request_id)
        charge = service.tenancy.metering.charge(caller, request_id)  # nothing is run: not closed
        return await service.dispatcher.prompts(asked, service.answerer.observer(request, charge))


def _uncut(call: GenerationCall) -> GenerationCall:
    """Of any length, unless it asks to be cut: what is counted may have to be shortened."""
    return call if call.truncate else msgspec.structs.replace(call, truncate=MAX_INT32)


async def _spans(body: bytes, model: TextModel) -> Response:
    text, add_special_tokens = parse_inputs(body)
    answer = await model.long_texts.run(
        len(text), lambda: _encode(model.spans(text, add_special_tokens))
    )
    return Response(answer, media_type="application/json")


async def _ids(ids: list[int], model: TextModel, with_strings: bool) -> Response:
    def encode() -> bytes:
        strings = [model.token(i) or "" for i in ids] if with_strings else None
        tokenized = TokenizedPrompt(len(ids), model.card.max_context, ids, strings)
        return msgspec.json.encode(tokenized)

    answer = await model.long_texts.run(len(ids), encode)
    return Response(answer, media_type="application/json")


def _encode(spans: list[TokenSpan]) -> bytes:
    """In pieces: while one is encoded no other thread runs."""
    pieces = (spans[first : first + _PIECE] for first in range(0, len(spans), _PIECE))
    return b"[" + b",".join(msgspec.json.encode(piece)[1:-1] for piece in pieces) + b"]"
