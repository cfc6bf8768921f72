"""OpenAI's `/v1/files` and `/v1/batches`."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from loraplex.router.api.files_and_batches import (
    MAX_BATCHES_LISTED,
    MAX_FILES_LISTED,
    USUAL_BATCHES_LISTED,
    parse_create,
    parse_list,
)
from loraplex.router.api.request.body import check_no_fields, check_query
from loraplex.router.batches.desk import BatchDesk
from loraplex.router.call import RequestError
from loraplex.router.http.body import BodyLimits, read_json_body
from loraplex.router.lines.lines import PATHS
from loraplex.router.routes.info import json_response
from loraplex.router.routes.operator import Endpoint
from loraplex.router.service import Service
from loraplex.router.tenancy.keys import Caller

_MAX_BODY_BYTES = 64 << 10

Answer = Callable[[BatchDesk, Caller, Request], Awaitable[Response]]


class FileRoutes:
    """Each attribute answers one route."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._body_limits = BodyLimits(_MAX_BODY_BYTES, service.config.body_timeout_s)
        self.files = self._asked(self._files, "after", "limit", "order", "purpose")
        self.file = self._asked(self._file)
        self.content = self._asked(self._content)
        self.batches = self._asked(self._batches, "after", "limit")
        self.batch = self._asked(self._batch)
        self.cancel = self._asked(self._cancel)

    def _asked(self, answer: Answer, *query: str) -> Endpoint:
        """Makes an endpoint that finds the caller before it answers. query: parameters of a GET."""

        async def endpoint(request: Request) -> Response:
            known = query if request.method == "GET" else ()
            check_query(request.query_params.multi_items(), known)
            authorization = request.headers.get("authorization")
            caller = await self._service.tenancy.identify(authorization)
            return await answer(self._desk(), caller, request)

        return endpoint

    def _desk(self) -> BatchDesk:
        """Returns the desk for files and batches. Raises RequestError (not_served, unavailable)."""
        desk = self._service.batches
        if desk is None:
            raise RequestError(
                "not_served",
                "files and batches are off: the router was started without --files-dir",
            )
        refusal = desk.keeper.refusal
        if refusal is not None:
            raise RequestError("unavailable", refusal)
        return desk

    async def _files(self, desk: BatchDesk, caller: Caller, request: Request) -> Response:
        if request.method == "POST":
            self._check_origin(request)
            room = desk.room_of(caller.tenant)
            stored = await desk.uploads.receive(request, caller.tenant, room)
            return json_response(stored)
        query = parse_list(request.query_params, MAX_FILES_LISTED, MAX_FILES_LISTED)
        return json_response(await desk.files(caller, query))

    def _check_origin(self, request: Request) -> None:
        """Checks that a web page may upload: a browser's page may post a form to any address
        without asking. Raises RequestError.
        """
        origin = request.headers.get("origin")
        allowed = self._service.config.cors_origins
        if origin is None or self._service.tenancy.needs_keys:
            return
        if origin in allowed or "*" in allowed:
            return
        raise RequestError(
            "forbidden", "uploads from web pages need keys, or their origin in --cors-origin"
        )

    async def _file(self, desk: BatchDesk, caller: Caller, request: Request) -> Response:
        file_id = request.path_params["id"]
        if request.method == "DELETE":
            await self._check_empty(request)
            return json_response(await desk.delete(caller, file_id))
        return json_response(await desk.file(caller, file_id))

    async def _content(self, desk: BatchDesk, caller: Caller, request: Request) -> Response:
        stored = await desk.file(caller, request.path_params["id"])
        path = desk.store.content(caller.tenant, stored.id)
        is_text = stored.purpose in ("batch", "batch_output")
        kind = "text/plain" if is_text else "application/octet-stream"
        return FileResponse(path, media_type=kind, filename=stored.filename)

    async def _batches(self, desk: BatchDesk, caller: Caller, request: Request) -> Response:
        if request.method == "POST":
            body = await read_json_body(request, self._body_limits)
            return json_response(await desk.create(caller, *parse_create(body, PATHS)))
        query = parse_list(request.query_params, USUAL_BATCHES_LISTED, MAX_BATCHES_LISTED)
        return json_response(await desk.batches(caller, query))

    async def _batch(self, desk: BatchDesk, caller: Caller, request: Request) -> Response:
        return json_response(await desk.batch(caller, request.path_params["id"]))

    async def _cancel(self, desk: BatchDesk, caller: Caller, request: Request) -> Response:
        await self._check_empty(request)
        return json_response(await desk.cancel(caller, request.path_params["id"]))

    async def _check_empty(self, request: Request) -> None:
        """Checks that a request has no fields in its body. Raises RequestError."""
        check_no_fields(await read_json_body(request, self._body_limits), ())
