"""OpenAI's `/v1/responses`, and stored answers."""

from starlette.requests import Request
from starlette.responses import Response

from loraplex.router.api.files.requests import parse_list
from loraplex.router.api.request.body import check_no_fields, check_query
from loraplex.router.api.responses import request as responses
from loraplex.router.api.responses.stored import (
    MAX_ITEMS_LISTED,
    USUAL_ITEMS_LISTED,
    DeletedResponse,
    page_of_items,
)
from loraplex.router.call import RequestError
from loraplex.router.http.body import read_json_body
from loraplex.router.responses.desk import ResponseDesk
from loraplex.router.routes.generate import answered
from loraplex.router.routes.info import json_response
from loraplex.router.service import Service


class ResponseRoutes:
    """Each method answers one route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        desk = self._service.responses
        if desk is None:
            return await answered(self._service, request, responses.parse)
        return await self._service.idempotency.answer(request, desk.answer)

    async def one(self, request: Request) -> Response:
        desk, tenant, name = await self._asked(request)
        if request.method == "DELETE":
            await desk.delete(tenant, name)
            return json_response(DeletedResponse(name))
        return json_response((await desk.get(tenant, name)).answer)

    async def items(self, request: Request) -> Response:
        desk, tenant, name = await self._asked(request, "limit", "order", "after")
        query = parse_list(request.query_params, USUAL_ITEMS_LISTED, MAX_ITEMS_LISTED)
        return json_response(page_of_items((await desk.get(tenant, name)).items, query))

    async def _asked(self, request: Request, *query: str) -> tuple[ResponseDesk, str, str]:
        """Also the tenant, and the answer's id. Raises RequestError."""
        service = self._service
        check_query(request.query_params.multi_items(), query)
        caller = await service.tenancy.identify(request.headers.get("authorization"))
        if service.responses is None:
            message = "no answers are stored: the router was started without --responses-keep-s"
            raise RequestError("not_served", message)
        check_no_fields(await read_json_body(request, service.answerer.body_limits), ())
        return service.responses, caller.tenant, request.path_params["id"]
