"""The routes that generate: each finds the shape of a body, and `Answerer` does the rest."""

from functools import partial

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from loraplex.router.api import sagemaker
from loraplex.router.api.cohere import request as cohere
from loraplex.router.api.load_report import LOAD_FORMAT, load_headers
from loraplex.router.api.lorax import request as lorax
from loraplex.router.api.messages import request as messages
from loraplex.router.api.openai import chat as openai_chat
from loraplex.router.api.openai import completions as openai_completions
from loraplex.router.api.request.body import decode_plain
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.sglang import lmdeploy
from loraplex.router.api.sglang import request as sglang
from loraplex.router.generation.way_in import Parse
from loraplex.router.http.sse import takes_events
from loraplex.router.operations.compat_metrics import kv_usage, waiting
from loraplex.router.routes.info import InfoRoutes
from loraplex.router.routes.operator import Endpoint
from loraplex.router.service import Service


class GenerateRoutes:
    """Each endpoint answers one route."""

    def __init__(self, service: Service, info: InfoRoutes) -> None:
        self._service = service
        self._info = info
        self.generate_stream = self._fixed(partial(lorax.parse, route="/generate_stream"))
        self.completions = self._with_load(self._fixed(openai_completions.parse))
        self.chat = self._with_load(self._fixed(openai_chat.parse))
        self.chat_batch = self._fixed(openai_chat.parse_batch)
        self.messages = self._fixed(messages.parse)
        self.chat_of_cohere = self._fixed(cohere.parse)
        self._generate_or_stream = self._fixed(partial(lorax.parse, route="/"))

    async def root(self, request: Request) -> Response:
        """LoRAX's: a health check, or a request whose body says whether it streams. A browser is
        led to the console."""
        if request.method == "POST":
            return await self._generate_or_stream(request)
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("console", 307)
        return await self._info.health(request)

    async def generate(self, request: Request) -> Response:
        """LoRAX's shape, or SGLang's or LMDeploy's, whose errors are as OpenAI's."""

        def parse(body: bytes, limits: ApiLimits, bearer: str | None) -> ApiRequest:
            plain = decode_plain(body)
            is_lmdeploys = lmdeploy.is_native(plain)
            if not is_lmdeploys and not sglang.is_native(plain):
                return lorax.parse_plain(plain, limits, bearer, route="/generate")
            request.state.dialect = "openai"
            native = lmdeploy.parse if is_lmdeploys else sglang.parse
            return native(plain, limits, bearer)

        return await self._answer(request, parse)

    async def invocations(self, request: Request) -> Response:
        """SageMaker's: the body says whose shape it has, and so its errors have."""
        adapter = request.headers.get(sagemaker.ADAPTER_HEADER)
        has_session = sagemaker.SESSION_HEADER in request.headers
        said = sagemaker.Invocation(adapter or None, takes_events(request), has_session)

        def parse(body: bytes, limits: ApiLimits, bearer: str | None) -> ApiRequest:
            plain = decode_plain(body)
            request.state.dialect = sagemaker.dialect_of(sagemaker.shape_of(plain))
            return sagemaker.parse(plain, said, limits, bearer)

        return await self._answer(request, parse)

    def _fixed(self, parse: Parse) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            return await self._answer(request, parse)

        return endpoint

    def _with_load(self, endpoint: Endpoint) -> Endpoint:
        """With the workers' load in a header, where the caller asks for one."""

        async def answer(request: Request) -> Response:
            response = await endpoint(request)
            fleet, form = self._service.fleet, request.headers.get(LOAD_FORMAT, "")
            response.headers.update(load_headers(form, waiting(fleet), kv_usage(fleet)))
            return response

        return answer

    async def _answer(self, request: Request, parse: Parse) -> Response:
        return await answered(self._service, request, parse)


async def answered(service: Service, request: Request, parse: Parse) -> Response:
    """Once for each idempotency key."""

    async def run(unread: Request) -> Response:
        return await service.answerer.answer(unread, parse)

    return await service.idempotency.answer(request, run)
