"""The router's HTTP face: which path is answered by what."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Lifespan

from loraplex.router.api.admin.pages import LIST_QUERY
from loraplex.router.api.admin.uploads import UPLOAD_QUERY
from loraplex.router.api.errors import Dialect, ErrorAnswer, dialect_of_path, error_answer
from loraplex.router.api.feedback import feedback_object, parse_feedback
from loraplex.router.api.missing_routes import hint
from loraplex.router.api.vllm.control import PAUSE_QUERY
from loraplex.router.batches.desk import running_batches
from loraplex.router.call import Cause, RequestError
from loraplex.router.http.body import CLIENT_GONE_STATUS, BodyLimits, ClientGone, read_json_body
from loraplex.router.http.by_port import ByPort
from loraplex.router.http.edge import Edge
from loraplex.router.http.intake import Intake
from loraplex.router.routes.adapters import AdapterRoutes
from loraplex.router.routes.console import ConsoleRoutes
from loraplex.router.routes.files import FileRoutes
from loraplex.router.routes.generate import GenerateRoutes, ResponseRoutes
from loraplex.router.routes.info import FleetRoute, InfoRoutes, SglangRoutes, json_response
from loraplex.router.routes.keys import KeyRoutes, UsageRoutes
from loraplex.router.routes.operator import MAX_BODY_BYTES, Endpoint, OperatorRoutes, with_api_key
from loraplex.router.routes.tokenize import TokenizeRoutes
from loraplex.router.routes.trainers import TrainerRoutes
from loraplex.router.service import Service
from loraplex.router.shared.store import StoreDown
from loraplex.router.telemetry.caller_errors import CallerErrors
from loraplex.router.telemetry.metrics import GENERATION_PATHS
from loraplex.router.telemetry.request_log import RequestLog

# A few milliseconds of an event loop's iteration.
_BEGIN_AT_ONCE = 16
_CAUSES: dict[int, Cause] = {404: "route_not_found", 405: "method_not_allowed"}


class FeedbackRoute:
    """Callers need a key where generations need one."""

    def __init__(self, service: Service) -> None:
        self._tenancy = service.tenancy
        self._feedback = service.feedback
        self._body_limits = BodyLimits(MAX_BODY_BYTES, service.config.body_timeout_s)

    async def answer(self, request: Request) -> Response:
        """Takes one score. Raises RequestError, StoreDown."""
        caller = await self._tenancy.identify(request.headers.get("authorization"))
        said = parse_feedback(await read_json_body(request, self._body_limits))
        counted = await self._feedback.take(caller, said.request_id, said.score)
        return json_response(feedback_object(said.request_id, counted))


def build_app(service: Service) -> ASGIApp:
    """Builds the application of one process. Its lifespan connects to the workers."""
    info = InfoRoutes(service)
    errors = _Errors(service.errors)
    routes = [
        *_generation_routes(service, info),
        *_adapter_routes(service),
        *_info_routes(service, info),
        *_sglang_routes(service, info),
        *_trainer_routes(service),
        *_file_routes(service),
        _post("/v1/feedback", FeedbackRoute(service).answer),
        _get("/v1/fleet", OperatorRoutes(service).guarded(FleetRoute(service.watch).fleet)),
        *ConsoleRoutes().routes,
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        background, desk = service.background, service.responses
        stored = nullcontext() if desk is None else desk.running(background)
        async with service.run(), running_batches(service.batches, background), stored:
            yield

    app: ASGIApp = _with_cors(_starlette(routes, errors, lifespan), service.config.cors_origins)
    if service.config.metrics_port:
        own = _starlette(_own_routes(info), errors)
        app = ByPort(app, own, service.config.metrics_port)
    dispatcher = service.dispatcher
    edge = Edge(
        app,
        service.metrics,
        [*routes, *_own_routes(info)],
        RequestLog(service.tracing, GENERATION_PATHS, service.config.log_requests),
        Intake(_BEGIN_AT_ONCE),
        lambda: dispatcher.draining,
    )
    if service.batches is not None:
        service.batches.door.app = edge
    if service.responses is not None:
        service.responses.door.app = edge
    return edge


def _starlette(
    routes: list[Route], errors: "_Errors", lifespan: Lifespan[Starlette] | None = None
) -> Starlette:
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            RequestError: errors.on_request_error,
            StoreDown: errors.on_store_down,
            HTTPException: errors.on_http_error,
            ClientGone: errors.on_client_gone,
            Exception: errors.on_unforeseen_error,
        },
    )
    app.router.redirect_slashes = False
    return app


def _with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """Pages of these origins may call; credentials are sent as headers, never as cookies."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "PUT", "PATCH", "DELETE"),
        allow_headers=("*",),  # clients add their own
        expose_headers=("*",),
    )


def _generation_routes(service: Service, info: InfoRoutes) -> list[Route]:
    routes, responses = GenerateRoutes(service, info), ResponseRoutes(service)
    return [
        Route("/", routes.root, methods=["GET", "POST"]),
        _post("/generate", routes.generate),
        _post("/generate_stream", routes.generate_stream),
        _post("/invocations", routes.invocations),
        _post("/v1/completions", routes.completions),
        _post("/v1/chat/completions", routes.chat),
        _post("/v1/chat/completions/batch", routes.chat_batch),
        _post("/inference/v1/generate", routes.tokens),
        _post("/v1/responses", responses.create),
        Route("/v1/responses/{id}", responses.one, methods=["GET", "DELETE"]),
        _post("/v1/responses/{id}/cancel", responses.cancel),
        _get("/v1/responses/{id}/input_items", responses.items),
        _post("/v1/messages", with_api_key(routes.messages)),
        _post("/v2/chat", routes.chat_of_cohere),
        _post("/cohere/v2/chat", routes.chat_of_cohere),
        _post("/v1/embeddings", routes.embeddings),
        _post("/embed", routes.embed),
        _post("/classify", routes.classify),
        _post("/classify_batch", routes.classify_batch),
        _post("/pooling", routes.pooling),
        _post("/v2/embed", routes.embed_of_cohere),
        _post("/score", routes.score),
        _post("/v1/score", routes.score),
        _post("/rerank", routes.rerank),
        _post("/v1/rerank", routes.rerank),
        _post("/v2/rerank", routes.rerank_of_cohere),
    ]


def _adapter_routes(service: Service) -> list[Route]:
    operator = OperatorRoutes(service)
    adapters = AdapterRoutes(service, operator.body_limits)

    def guarded(endpoint: Endpoint, *bodies: str) -> Endpoint:
        return operator.guarded(adapters.current(endpoint), *bodies, query=("tenant",))

    def held(endpoint: Endpoint, *bodies: str, query: tuple[str, ...] = ("tenant",)) -> Endpoint:
        return operator.guarded(adapters.current(endpoint), *bodies, query=query, right="upload")

    def listed(endpoint: Endpoint, *bodies: str) -> Endpoint:
        return operator.guarded(adapters.current(endpoint), *bodies, query=LIST_QUERY)

    one = "/v1/adapters/{name}"
    return [
        *_key_routes(service, operator),
        Route("/v1/adapters", listed(adapters.collection, "POST"), methods=["GET", "POST"]),
        Route(one, held(adapters.one), methods=["GET", "DELETE"]),
        Route(one, held(adapters.put, "PUT", query=UPLOAD_QUERY), methods=["PUT"]),
        _post(f"{one}/load", guarded(adapters.load)),
        _post(f"{one}/pin", guarded(adapters.pin)),
        _post(f"{one}/unpin", guarded(adapters.unpin)),
        _post(f"{one}/unload", guarded(adapters.unload, "POST")),
        _post(f"{one}/refresh", guarded(adapters.refresh)),
        Route(
            f"{one}/rollout", guarded(adapters.rollout, "POST"), methods=["GET", "POST", "DELETE"]
        ),
        _post(f"{one}/promote", guarded(adapters.promote, "POST")),
        _post(f"{one}/rollback", guarded(adapters.rollback, "POST")),
        _get(f"{one}/history", guarded(adapters.history)),
        _post("/v1/load_lora_adapter", guarded(adapters.load_lora, "POST")),
        _post("/v1/unload_lora_adapter", guarded(adapters.unload_lora, "POST")),
        _post("/load_lora_adapter", guarded(adapters.load_sglang, "POST")),
        _post("/unload_lora_adapter", guarded(adapters.unload_sglang, "POST")),
        Route("/adapters", guarded(adapters.of_sagemaker, "POST"), methods=["GET", "POST"]),
        Route("/adapters/{name}", guarded(adapters.unregister), methods=["DELETE"]),
    ]


def _key_routes(service: Service, operator: OperatorRoutes) -> list[Route]:
    keys, usage = KeyRoutes(service, operator.body_limits), UsageRoutes(service, operator)
    guarded = operator.guarded
    one = "/v1/keys/{id}"
    return [
        Route("/v1/keys", guarded(keys.collection, "POST"), methods=["GET", "POST"]),
        Route(one, guarded(keys.one, "PATCH"), methods=["GET", "PATCH", "DELETE"]),
        _post(f"{one}/rotate", guarded(keys.rotate, "POST")),
        _post(f"{one}/block", guarded(keys.block)),
        _post(f"{one}/unblock", guarded(keys.unblock)),
        _get("/v1/usage", usage.usage),
        _get("/v1/usage/requests", usage.requests),
        _get("/v1/organization/costs", usage.costs),
        _get("/v1/organization/usage/completions", usage.completions),
        _get("/v1/audit", guarded(usage.audit, query=("limit",))),
    ]


def _info_routes(service: Service, info: InfoRoutes) -> list[Route]:
    tokenizer = TokenizeRoutes(service)
    return [
        _post("/tokenize", tokenizer.tokenize),
        _post("/detokenize", tokenizer.detokenize),
        _post("/v1/chat/completions/render", tokenizer.render_chat),
        _post("/v1/completions/render", tokenizer.render_texts),
        _post("/v1/messages/count_tokens", with_api_key(tokenizer.count_messages)),
        _get("/tokenizer_info", tokenizer.info),
        _get("/v1/models", info.models),
        _get("/v1/models/{name:path}", info.model),
        _get("/info", info.info),
        _get("/version", info.version),
        Route("/ping", info.health, methods=["GET", "POST"]),
        *_health_routes(info),
        _get("/metrics", info.metrics_of_port),
        _get("/openapi.json", info.openapi),
    ]


def _sglang_routes(service: Service, info: InfoRoutes) -> list[Route]:
    """Lists routes by older and newer names of SGLang's."""
    sglang = SglangRoutes(service)
    return [
        _get("/health_generate", info.health),
        _get("/model_info", sglang.model),
        _get("/get_model_info", sglang.model),
        _get("/server_info", sglang.settings),
        _get("/get_server_info", sglang.settings),
        _post("/abort_request", sglang.abort),
        Route("/flush_cache", sglang.flush, methods=["GET", "POST"]),
    ]


def _trainer_routes(service: Service) -> list[Route]:
    """Lists vLLM's routes that trainers call between their steps."""
    routes, guarded = TrainerRoutes(service), OperatorRoutes(service).guarded
    return [
        _post("/pause", guarded(routes.pause, query=PAUSE_QUERY)),
        _post("/resume", guarded(routes.resume)),
        _get("/is_paused", guarded(routes.is_paused)),
        _get("/get_world_size", routes.world_size),
    ]


def _file_routes(service: Service) -> list[Route]:
    routes = FileRoutes(service)
    return [
        Route("/v1/files", routes.files, methods=["GET", "POST"]),
        Route("/v1/files/{id}", routes.file, methods=["GET", "DELETE"]),
        _get("/v1/files/{id}/content", routes.content),
        Route("/v1/batches", routes.batches, methods=["GET", "POST"]),
        _get("/v1/batches/{id}", routes.batch),
        _post("/v1/batches/{id}/cancel", routes.cancel),
    ]


def _own_routes(info: InfoRoutes) -> list[Route]:
    """Lists the routes that are on the port of this process alone."""
    return [*_health_routes(info), _get("/metrics", info.metrics)]


def _health_routes(info: InfoRoutes) -> list[Route]:
    return [
        _get("/health", info.health),
        _get("/health/live", info.live),
        _get("/health/ready", info.ready),
    ]


def _get(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, methods=["GET"])


def _post(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, methods=["POST"])


def _methods(request: Request) -> set[str]:
    """Methods of the request's path: those of all its routes."""
    found = set[str]()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return found


class _Errors:
    """Answers of requests that end before their first byte."""

    def __init__(self, errors: CallerErrors) -> None:
        self._errors = errors

    async def on_request_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        answer = self._answer(error, request)
        if error.cause == "body_timeout":
            answer.headers["connection"] = "close"
        return Response(answer.body, answer.status, answer.headers)

    async def on_store_down(self, request: Request, error: Exception) -> Response:
        message = "what routers share cannot be reached now; try again soon"
        return await self.on_request_error(request, RequestError("unavailable", message))

    async def on_http_error(self, request: Request, error: Exception) -> Response:
        """Answers what Starlette's router found: no such path, or another method."""
        assert isinstance(error, HTTPException)
        cause = _CAUSES.get(error.status_code, "invalid")
        path = request.scope["path"]
        said = hint(path) if cause == "route_not_found" else None
        message = f"{request.method} {path[:200]}: {error.detail}{f'; {said}' if said else ''}"
        answer = self._answer(RequestError(cause, message), request)
        headers = {**(error.headers or {}), **answer.headers}
        if cause == "method_not_allowed":
            headers["Allow"] = ", ".join(sorted(_methods(request)))
        return Response(answer.body, answer.status, headers)

    async def on_client_gone(self, request: Request, error: Exception) -> Response:
        """Answers where the client has gone: nobody reads it, the status is for counters."""
        return Response(status_code=CLIENT_GONE_STATUS)

    async def on_unforeseen_error(self, request: Request, error: Exception) -> Response:
        """Answers after an unforeseen error, which the log shows under the request's id."""
        message = f"internal error; request id {request.state.request_id}"
        return await self.on_request_error(request, RequestError("internal", message))

    def _answer(self, error: RequestError, request: Request) -> ErrorAnswer:
        self._errors.note(request, error)
        dialect: Dialect | None = getattr(request.state, "dialect", None)
        dialect = dialect or dialect_of_path(request.scope["path"])
        return error_answer(error, dialect, request.state.request_id)
