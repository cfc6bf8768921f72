"""`/tokenize`, `/detokenize`, `/tokenizer_info` and `/v1/messages/count_tokens`: the tokens of a
generation, without running it."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.router.api.messages.request import TokenCount, parse_count
from loraplex.router.api.openai import chat, completions
from loraplex.router.api.request.body import decode_plain, only_one_of
from loraplex.router.api.request.fields import MAX_INT32
from loraplex.router.api.request.formatter import ApiRequest
from loraplex.router.api.request.pictures import lie_elsewhere
from loraplex.router.api.tokenize import (
    SHAPES,
    DetokenizedText,
    IdsAsked,
    TokenizedPrompt,
    drawn,
    parse_detokenize,
    parse_inputs,
    parse_messages,
    parse_prompt,
    tokenizer_info,
)
from loraplex.router.call import GenerationCall
from loraplex.router.generation.body_reader import ParseBody, Read, Unread
from loraplex.router.generation.prompts import Prompt, check_ids, resolve_sampling
from loraplex.router.http.body import read_json_body
from loraplex.router.http.sse import LongAnswer
from loraplex.router.routes.info import json_response
from loraplex.router.service import Service
from loraplex.router.tenancy.keys import Caller
from loraplex.router.text.model import TextModel
from loraplex.router.text.turn_taking import DECODED_SIZE

# An object for each token takes longer than the token itself.
_SPAN_WEIGHT = 4
_KEPT = ("model", "stream", "stream_options", "cache_salt", "priority")

T = TypeVar("T")


class TokenizeRoutes:
    """Each method answers one route. Callers need a key where generations need one."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._body_limits = service.answerer.body_limits
        self.render_chat = partial(self._render, parse=chat.parse, prefix="chatcmpl")
        self.render_texts = partial(self._render, parse=completions.parse, prefix="cmpl")

    async def tokenize(self, request: Request) -> Response:
        """Tokenises a text or a chat, in LoRAX's shape, errors too, or in one of vLLM's two."""
        caller = await self._caller(request)
        body = await read_json_body(request, self._body_limits)
        base = self._service.bases.likeliest.require_for(caller)
        plain = await base.turns.parsed(body, decode_plain)
        shape = only_one_of(plain, SHAPES)
        if shape == "inputs":
            return await _spans(plain, self._service.bases.first.require_for(caller))
        request.state.dialect = "openai"
        parse: ParseBody[IdsAsked] = parse_messages if shape == "messages" else parse_prompt
        read = await self._read(request, caller, body, parse, attrgetter("call"))
        asked = read.parsed
        model, (prompt,) = await self._prompts(request, caller, read, _uncut(asked.call))
        return await _ids(prompt.ids, model, asked.with_strings)

    async def detokenize(self, request: Request) -> Response:
        caller = await self._caller(request)
        body = await read_json_body(request, self._body_limits)
        read = await self._read(request, caller, body, parse_detokenize, itemgetter(1))
        ids, call = read.parsed
        model, _ = await self._prompts(request, caller, read, call)
        check_ids(ids, model, "tokens")

        def answer() -> DetokenizedText:
            return DetokenizedText(model.decode(ids, skip_special_tokens=False))

        return LongAnswer(await model.turns.written(len(ids) * DECODED_SIZE, answer))

    async def _render(
        self, request: Request, parse: ParseBody[ApiRequest], prefix: str
    ) -> Response:
        """Answers as vLLM: the prompt and sampling of a generation, and the body's own words."""
        caller = await self._caller(request)
        body = await read_json_body(request, self._body_limits)
        read = await self._read(request, caller, body, parse, attrgetter("call"))
        call = read.parsed.call
        model, prompts = await self._prompts(request, caller, read, call)
        said = msgspec.json.decode(body)
        kept = {name: said[name] for name in _KEPT if name in said}
        kept["request_id"] = f"{prefix}-{said.get('request_id') or request.state.request_id}"

        def one(prompt: Prompt) -> dict[str, Any]:
            sampling = drawn(call, resolve_sampling(call, model, prompt))
            text = prompt.text or model.decode(prompt.ids, call.skip_special_tokens)
            return kept | {"prompt": text, "token_ids": prompt.ids, **sampling}

        def answer() -> Any:
            return one(prompts[0]) if call.messages else [one(prompt) for prompt in prompts]

        size = sum(len(p.ids) for p in prompts) * DECODED_SIZE
        return LongAnswer(await model.turns.written(size, answer))

    async def count_messages(self, request: Request) -> Response:
        caller = await self._caller(request)
        body = await read_json_body(request, self._body_limits)
        read = await self._read(request, caller, body, parse_count, lambda call: call)
        _, (prompt,) = await self._prompts(request, caller, read, _uncut(read.parsed))
        return json_response(TokenCount(len(prompt.ids)))

    async def info(self, request: Request) -> Response:
        await self._caller(request)
        model = self._service.bases.first.require()
        return json_response(tokenizer_info(model.card, model.added_tokens()))

    async def _read(
        self,
        request: Request,
        caller: Caller,
        body: bytes,
        parse: ParseBody[T],
        call_of: Callable[[T], GenerationCall],
    ) -> Read[T]:
        """Reads a body in its turn among the other bodies. Raises RequestError."""
        bearer = self._service.answerer.bearer(request)
        unread = Unread(body, parse, caller, bearer, call_of)
        return await self._service.dispatcher.reader.read(unread, waits=False)

    async def _caller(self, request: Request) -> Caller:
        """Finds who calls. Raises RequestError."""
        return await self._service.tenancy.identify(request.headers.get("authorization"))

    async def _prompts(
        self, request: Request, caller: Caller, read: Read[T], call: GenerationCall
    ) -> tuple[TextModel, list[Prompt]]:
        """Builds the prompts of a call, authorised and resolved as a generation. One whose pictures
        lie elsewhere counts as a request of its key. Raises RequestError.
        """
        service, request_id = self._service, request.state.request_id
        asked = service.dispatcher.authorise(read, call, caller, request_id)
        charge = service.tenancy.metering.charge(caller, request_id)  # nothing is run
        observer = service.answerer.observer(request, charge)
        if not lie_elsewhere(call):
            return await service.dispatcher.prompts(asked, read.base, observer)
        try:
            await charge.enter()
            found = await service.dispatcher.prompts(asked, read.base, observer)
            charge.outcome = "ok"
        finally:
            charge.close()
        return found


def _uncut(call: GenerationCall) -> GenerationCall:
    """The call with a prompt of any length, unless it is cut: counting must not refuse."""
    return call if call.truncate else msgspec.structs.replace(call, truncate=MAX_INT32)


async def _spans(plain: dict[str, Any], model: TextModel) -> Response:
    text, add_special_tokens = parse_inputs(plain)
    size = _SPAN_WEIGHT * len(text)
    pieces = await model.turns.written(size, lambda: model.spans(text, add_special_tokens))
    return LongAnswer(pieces)


async def _ids(ids: list[int], model: TextModel, with_strings: bool) -> Response:
    def answer() -> TokenizedPrompt:
        strings = [model.token(i) or "" for i in ids] if with_strings else None
        return TokenizedPrompt(len(ids), model.card.max_context, ids, strings)

    return LongAnswer(await model.turns.written(len(ids), answer))
