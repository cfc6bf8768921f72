"""`POST /tokenize`: a text's tokens, as the base model's tokenizer cuts it."""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.generation import RequestError
from router.http_body import read_json_body
from router.service import Service

_INLINE_CHARS = 16 << 10


class _Body(msgspec.Struct):
    inputs: str
    add_special_tokens: bool | None = True


_decode = msgspec.json.Decoder(_Body).decode


class TokenizeRoute:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        """LoRAX's shape: a list of {id, text, start, stop}."""
        body = _parse(await read_json_body(request, self._service.config.max_body_bytes))
        model = self._service.base.require()
        add_special_tokens = body.add_special_tokens is not False
        if len(body.inputs) <= _INLINE_CHARS:
            spans = model.spans(body.inputs, add_special_tokens)
        else:
            spans = await asyncio.to_thread(model.spans, body.inputs, add_special_tokens)
        return Response(msgspec.json.encode(spans), media_type="application/json")


def _parse(body: bytes) -> _Body:
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError("invalid", str(error)) from error
