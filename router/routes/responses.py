"""OpenAI's `/v1/responses`, and the routes of stored answers."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from loraplex.router.api.files_and_batches import parse_list
from loraplex.router.api.request.body import check_no_fields, check_query
from loraplex.router.api.responses import request as responses
from loraplex.router.api.responses import stored
from loraplex.router.call import RequestError
from loraplex.router.http.body import read_json_body
from loraplex.router.responses.desk import ResponseDesk
from loraplex.router.routes.generate import answered
from loraplex.router.routes.info import json_response
from loraplex.router.routes.operator import Endpoint
from loraplex.router.service import Service

# Takes the tenant, and the answer's id.
Answer = Callable[[ResponseDesk, str, str, Request], Awaitable[Any]]


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
