"""SGLang's routes about the server."""

from starlette.requests import Request
from starlette.responses import Response

from loraplex.router.api.sglang.info import FleetState, served_model, served_settings
from loraplex.router.api.sglang.request import aborted_by
from loraplex.router.call import RequestError
from loraplex.router.http.body import read_json_body
from loraplex.router.routes.info import json_response
from loraplex.router.service import Service
from loraplex.router.version import VERSION


class SglangRoutes:
    """Each method answers one route. None of them shows an adapter."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def model(self, request: Request) -> Response:
        return json_response(served_model(self._service.base.require().card))

    async def settings(self, request: Request) -> Response:
        fleet = self._service.fleet
        state = FleetState(
            workers=len(fleet.clients),
            workers_ready=sum(view.able for view in fleet.views),
            max_running_requests=self._service.config.max_requests,
        )
        return json_response(served_settings(self._service.base.require().card, VERSION, state))

    async def abort(self, request: Request) -> Response:
        """An id that nothing has is no error: the answer may just have ended."""
        service = self._service
        caller = await service.tenancy.identify(request.headers.get("authorization"))
        rid = aborted_by(await read_json_body(request, service.answerer.body_limits))
        service.dispatcher.abort(caller.tenant, rid)
        return Response()

    async def flush(self, request: Request) -> Response:
        """Nothing can be flushed: SGLang's answer to that is a 400, too."""
        await self._service.tenancy.identify(request.headers.get("authorization"))
        raise RequestError(
            "unsupported",
            "nothing was flushed: workers keep cached prefixes until others need the room; a new "
            "`cache_salt` finds none of them",
        )
