"""A caller's key in the header that Anthropic's clients use."""

from starlette.requests import Request
from starlette.responses import Response

from loraplex.router.routes.operator import Endpoint

HEADER = "x-api-key"


def with_api_key(endpoint: Endpoint) -> Endpoint:
    """The route takes a key as `x-api-key`, too; `Authorization` comes first."""

    async def answer(request: Request) -> Response:
        key = request.headers.get(HEADER)
        if key is None or "authorization" in request.headers:
            return await endpoint(request)
        header = (b"authorization", f"Bearer {key}".encode("latin-1"))
        scope = {**request.scope, "headers": [*request.scope["headers"], header]}
        return await endpoint(Request(scope, request.receive))

    return answer
