"""The routes that give numbers of texts: each finds the shape of a body, and `Answerer` does the
rest."""

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from loraplex.router.api.request.body import decode_plain
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.vectors import (
    classify,
    cohere,
    embed,
    embeddings,
    label_scores,
    pooling,
    rerank,
    score,
)
from loraplex.router.api.vectors.rerank import RerankVersion
from loraplex.router.generation.way_in import Parse
from loraplex.router.routes.generate import answered
from loraplex.router.routes.operator import Endpoint
from loraplex.router.service import Service

PlainParse = Callable[[dict[str, Any], ApiLimits, str | None], ApiRequest]


class VectorRoutes:
    """Each endpoint answers one route. Errors have the shape of the body's API."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.embeddings = self._read(embeddings.parse)
        self.embed = self._fixed(embed.parse)
        self.classify_batch = self._fixed(classify.parse_batch)
        self.pooling = self._read(pooling.parse)
        self.embed_of_cohere = self._read(cohere.parse)
        self.score = self._read(_score)
        self.rerank = partial(self._rerank, version=1)
        self.rerank_of_cohere = partial(self._rerank, version=2)

    async def classify(self, request: Request) -> Response:
        """vLLM's shape or LoRAX's."""

        def parse(body: bytes, limits: ApiLimits, bearer: str | None) -> ApiRequest:
            plain = decode_plain(body)
            is_lorax = classify.shape_of(plain) == "inputs"
            request.state.dialect = "lorax" if is_lorax else "openai"
            return classify.parse_plain(plain, limits, bearer)

        return await answered(self._service, request, parse)

    async def _rerank(self, request: Request, version: RerankVersion) -> Response:
        """The shape of Cohere, Jina and vLLM, or TEI's."""

        def parse(body: bytes, limits: ApiLimits, bearer: str | None) -> ApiRequest:
            plain = decode_plain(body)
            is_tei = rerank.shape_of(plain) == "texts"
            request.state.dialect = "lorax" if is_tei else "openai"
            return rerank.parse_plain(plain, limits, bearer, version)

        return await answered(self._service, request, parse)

    def _read(self, parse: PlainParse) -> Endpoint:
        return self._fixed(lambda body, *more: parse(decode_plain(body), *more))

    def _fixed(self, parse: Parse) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            return await answered(self._service, request, parse)

        return endpoint


def _score(plain: dict[str, Any], limits: ApiLimits, bearer: str | None) -> ApiRequest:
    """vLLM's shape or SGLang's."""
    if plain.get("label_token_ids") is not None:
        return label_scores.parse(plain, limits, bearer)
    return score.parse(plain, limits, bearer)
