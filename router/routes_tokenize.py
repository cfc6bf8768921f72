"""`POST /tokenize`: a text's tokens, as the base model's tokenizer cuts it."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.api.models import parse_tokenize
from router.http_body import BodyLimits, read_json_body
from router.service import Service
from router.text.model import TokenSpan

_PIECE = 1 << 14


class TokenizeRoute:
    def __init__(self, service: Service) -> None:
        self._service = service
        config = service.config
        self._body_limits = BodyLimits(config.max_body_bytes, config.body_timeout_s)

    async def tokenize(self, request: Request) -> Response:
        """LoRAX's shape: a list of {id, text, start, stop}."""
        await self._service.tenancy.identify(request.headers.get("authorization"))
        body = await read_json_body(request, self._body_limits)
        text, add_special_tokens = parse_tokenize(body)
        model = self._service.base.require()
        answer = await model.long_texts.run(
            len(text), lambda: _encode(model.spans(text, add_special_tokens))
        )
        return Response(answer, media_type="application/json")


def _encode(spans: list[TokenSpan]) -> bytes:
    """In pieces: while one is encoded no other thread runs."""
    pieces = (spans[first : first + _PIECE] for first in range(0, len(spans), _PIECE))
    return b"[" + b",".join(msgspec.json.encode(piece)[1:-1] for piece in pieces) + b"]"
