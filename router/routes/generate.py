"""The routes that generate text or give numbers of texts, and those of stored answers: each finds
the shape of a body, and `Answerer` does the rest."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from loraplex.router.api import cohere_chat, sagemaker
from loraplex.router.api.about import LOAD_FORMAT, load_headers
from loraplex.router.api.errors import Dialect
from loraplex.router.api.files_and_batches import parse_list
from loraplex.router.api.lorax import request as lorax
from loraplex.router.api.messages import request as messages
from loraplex.router.api.openai import chat, completions
from loraplex.router.api.request.body import check_no_fields, check_query, decode_plain
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.responses import request as responses
from loraplex.router.api.responses import stored
from loraplex.router.api.sglang import generate as sglang
from loraplex.router.api.sglang import lmdeploy
from loraplex.router.api.vectors import cohere, embed, fits, pooled
from loraplex.router.api.vllm import tokens
from loraplex.router.call import RequestError
from loraplex.router.generation.answerer import PartsOf
from loraplex.router.generation.body_reader import ParseBody
from loraplex.router.http.body import read_json_body
from loraplex.router.http.sse import takes_events
from loraplex.router.operations.compat_metrics import kv_usage, waiting
from loraplex.router.responses.desk import ResponseDesk
from loraplex.router.routes.info import InfoRoutes, json_response
from loraplex.router.routes.operator import Endpoint
from loraplex.router.service import Service

PlainParse = Callable[[dict[str, Any], ApiLimits, str | None], ApiRequest]
DialectOf = Callable[[dict[str, Any]], Dialect]

# Takes the tenant, and the answer's id.
Answer = Callable[[ResponseDesk, str, str, Request], Awaitable[Any]]


class GenerateRoutes:
    """Each endpoint answers one route. Errors have the shape of the body's API."""

    def __init__(self, service: Service, info: InfoRoutes) -> None:
        self._service = service
        self._info = info
        self.generate = self._plain(_generate, _dialect_of_generate, sglang.parts_of)
        self.generate_stream = self._fixed(partial(lorax.parse, route="/generate_stream"))
        self.completions = self._with_load(self._fixed(completions.parse))
        self.chat = self._with_load(self._fixed(chat.parse))
        self.chat_batch = self._fixed(chat.parse_batch)
        self.tokens = self._plain(tokens.parse)
        self.messages = self._fixed(messages.parse)
        self.chat_of_cohere = self._fixed(cohere_chat.parse)
        self._generate_or_stream = self._fixed(partial(lorax.parse, route="/"))
        self.embeddings = self._plain(pooled.parse_embeddings)
        self.embed = self._fixed(embed.parse)
        self.classify = self._plain(pooled.parse_classify, _dialect_of_classify)
        self.classify_batch = self._fixed(pooled.parse_classify_batch)
        self.pooling = self._plain(pooled.parse_pooling)
        self.embed_of_cohere = self._plain(cohere.parse)
        self.score = self._plain(_score)
        self.rerank = self._plain(partial(fits.parse_rerank, version=1), _dialect_of_rerank)
        of_cohere = partial(fits.parse_rerank, version=2)
        self.rerank_of_cohere = self._plain(of_cohere, _dialect_of_rerank)

    async def root(self, request: Request) -> Response:
        """Answers LoRAX's `/`: a health check, or a request whose body says whether it streams. A
        browser is led to the console.
        """
        if request.method == "POST":
            return await self._generate_or_stream(request)
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("console", 307)
        return await self._info.health(request)

    async def invocations(self, request: Request) -> Response:
        """Answers SageMaker's route: the body says whose shape it has, and so its errors have."""
        adapter = request.headers.get(sagemaker.ADAPTER_HEADER)
        has_session = sagemaker.SESSION_HEADER in request.headers
        said = sagemaker.Invocation(adapter or None, takes_events(request), has_session)

        def parse(plain: dict[str, Any], limits: ApiLimits, bearer: str | None) -> ApiRequest:
            return sagemaker.parse(plain, said, limits, bearer)

        return await self._plain(parse, _dialect_of_invocation)(request)

    def _fixed(self, parse: ParseBody[ApiRequest]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            return await self._answer(request, parse)

        return endpoint

    def _plain(
        self,
        parse: PlainParse,
        dialect_of: DialectOf | None = None,
        parts_of: PartsOf | None = None,
    ) -> Endpoint:
        """An endpoint for decoded JSON. dialect_of: of a body; None = the route's own. parts_of: as
        of `Answerer.answer`."""

        async def endpoint(request: Request) -> Response:
            def read(body: bytes, limits: ApiLimits, bearer: str | None) -> ApiRequest:
                plain = decode_plain(body)
                if dialect_of is not None:
                    request.state.dialect = dialect_of(plain)
                return parse(plain, limits, bearer)

            return await answered(self._service, request, read, parts_of)

        return endpoint

    def _with_load(self, endpoint: Endpoint) -> Endpoint:
        """Makes an endpoint add the workers' load in a header, where the caller asks for one."""

        async def answer(request: Request) -> Response:
            response = await endpoint(request)
            form, fleets = request.headers.get(LOAD_FORMAT, ""), self._service.bases.fleets
            response.headers.update(load_headers(form, waiting(fleets), kv_usage(fleets)))
            return response

        return answer

    async def _answer(self, request: Request, parse: ParseBody[ApiRequest]) -> Response:
        return await answered(self._service, request, parse)


async def answered(
    service: Service,
    request: Request,
    parse: ParseBody[ApiRequest],
    parts_of: PartsOf | None = None,
) -> Response:
    """Answers once for each idempotency key."""

    async def run(unread: Request) -> Response:
        return await service.answerer.answer(unread, parse, parts_of)

    return await service.idempotency.answer(request, run)


def _dialect_of_generate(plain: dict[str, Any]) -> Dialect:
    """The API whose form the errors of `/generate` have. Raises RequestError for a mixture."""
    is_native = lmdeploy.is_native(plain) or sglang.is_native(plain)
    return "openai" if is_native else "lorax"


def _generate(plain: dict[str, Any], limits: ApiLimits, bearer: str | None) -> ApiRequest:
    """Parses LoRAX's shape, SGLang's or LMDeploy's."""
    if lmdeploy.is_native(plain):
        return lmdeploy.parse(plain, limits, bearer)
    if sglang.is_native(plain):
        return sglang.parse(plain, limits, bearer)
    return lorax.parse_plain(plain, limits, bearer, route="/generate")


def _dialect_of_invocation(plain: dict[str, Any]) -> Dialect:
    return sagemaker.dialect_of(sagemaker.shape_of(plain))


def _dialect_of_classify(plain: dict[str, Any]) -> Dialect:
    return "lorax" if pooled.shape_of(plain) == "inputs" else "openai"


def _dialect_of_rerank(plain: dict[str, Any]) -> Dialect:
    return "lorax" if fits.shape_of(plain) == "texts" else "openai"


def _score(plain: dict[str, Any], limits: ApiLimits, bearer: str | None) -> ApiRequest:
    """Parses vLLM's shape or SGLang's."""
    if plain.get("label_token_ids") is not None:
        return fits.parse_labels(plain, limits, bearer)
    return fits.parse_score(plain, limits, bearer)


class ResponseRoutes:
    """Each attribute answers one route."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.one = self._asked(_one)
        self.cancel = self._asked(_cancel)
        self.items = self._asked(_items, "limit", "order", "after")

    async def create(self, request: Request) -> Response:
        desk = self._service.responses
        if desk is None:
            return await answered(self._service, request, responses.parse)
        return await self._service.idempotency.answer(request, desk.answer)

    def _asked(self, answer: Answer, *query: str) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            check_query(request.query_params.multi_items(), query)
            service = self._service
            caller = await service.tenancy.identify(request.headers.get("authorization"))
            if service.responses is None:
                message = "no answers are stored: the router was started without --responses-keep-s"
                raise RequestError("not_served", message)
            check_no_fields(await read_json_body(request, service.answerer.body_limits), ())
            name = request.path_params["id"]
            return json_response(await answer(service.responses, caller.tenant, name, request))

        return endpoint


async def _one(desk: ResponseDesk, tenant: str, name: str, request: Request) -> Any:
    if request.method == "DELETE":
        await desk.delete(tenant, name)
        return stored.DeletedResponse(name)
    return (await desk.get(tenant, name)).answer


async def _cancel(desk: ResponseDesk, tenant: str, name: str, request: Request) -> Any:
    return (await desk.cancel(tenant, name)).answer


async def _items(desk: ResponseDesk, tenant: str, name: str, request: Request) -> Any:
    usual, most = stored.USUAL_ITEMS_LISTED, stored.MAX_ITEMS_LISTED
    query = parse_list(request.query_params, usual, most)
    return stored.page_of_items((await desk.get(tenant, name)).items, query)
