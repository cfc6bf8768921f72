"""The worker's HTTP face: model card, uploads, pictures, WebSocket for routers, health, metrics."""

import asyncio
import hashlib
import hmac
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from loraplex.adapters.common.disk import disk_errors
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.uploads.archive import unpack_archive
from loraplex.adapters.uploads.body import BodyBroken, BodyStream
from loraplex.adapters.uploads.shelf import UploadShelf
from loraplex.adapters.uploads.sink import FileSink
from loraplex.server.protocol import MAX_PICTURE_BYTES
from loraplex.server.worker.connections import RouterConnection
from loraplex.server.worker.pictures.service import PictureService
from loraplex.server.worker.worker import Worker

log = logging.getLogger(__name__)

_MOST_UPLOADS = 16  # at once
_UPLOAD_IDLE_S = 30.0

MAX_ROUTERS = 256
_RETRY = {"Retry-After": "1"}
# A router that connects meanwhile waits so long for the start, and is served at once then.
_START_WAIT_S = 2.0
_PICTURE_LIMIT_S = 60.0


class UploadFace:
    """Puts uploads on a shelf, where the adapter store finds them. max_bytes: of one upload."""

    def __init__(self, shelf: UploadShelf, max_bytes: int) -> None:
        self._shelf = shelf
        self._max_bytes = max_bytes
        self._threads = ThreadPoolExecutor(_MOST_UPLOADS, "uploads")

    async def receive(self, request: Request) -> Response:
        """Answers a PUT of `/uploads/DIGEST`. The digest must be that of the files."""
        digest = request.path_params["digest"]
        body = BodyStream(request.receive, _UPLOAD_IDLE_S)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, self._keep, body, digest)
        except AdapterError as error:
            status = 503 if error.code == "unavailable" else 400
            return JSONResponse({"error": error.message}, status, {"connection": "close"})
        except BodyBroken as error:
            log.warning("upload %.12s broke off: %s", digest, error.why)
            return Response(status_code=408, headers={"connection": "close"})
        return Response(status_code=204)

    def _keep(self, body: BodyStream, digest: str) -> None:
        with disk_errors(self._shelf.root), self._shelf.staging() as folder:
            sink = FileSink(folder, self._max_bytes)
            with closing(sink):
                unpack_archive(body, sink)
                found = sink.finish()
            if found != digest:
                message = f"the files are not those of upload {digest[:64]}: {found}"
                raise AdapterError("invalid", message)
            self._shelf.keep(folder, digest)


class WorkerApp:
    """Routes. Those of routers need the secret; health and metrics show no secrets."""

    def __init__(self, worker: Worker, secret: str, uploads: UploadFace) -> None:
        self._worker = worker
        self._uploads = uploads
        self._secret = secret.encode()
        self._connections = 0
        self._next_number = 0

    def build(self, *watched_ports: int) -> ASGIApp:
        """Build the application. watched_ports: those with health and metrics alone."""
        open_to_all = [
            Route("/health/live", self.live),
            Route("/health/ready", self.ready),
            Route("/metrics", self.metrics),
        ]
        own = [
            Route("/card", self.card),
            Route("/uploads/{digest}", self.upload, methods=["PUT"]),
            Route("/pictures/{digest}", self.picture, methods=["PUT"]),
            WebSocketRoute("/connect", self.connect),
        ]
        app, watched = Starlette(routes=[*open_to_all, *own]), Starlette(routes=open_to_all)

        async def by_port(scope: Scope, receive: Receive, send: Send) -> None:
            is_watched = scope["server"][1] in watched_ports
            await (watched if is_watched else app)(scope, receive, send)

        return by_port

    def _refusal(self, connection: HTTPConnection) -> Response | None:
        """Why this peer may not come in, or None."""
        if not self._secret:
            # Bound to the loopback only; a browser's page on this machine is still a stranger.
            if "origin" in connection.headers:
                return JSONResponse({"error": "browsers are not served"}, 403)
            return None
        expected = b"Bearer " + self._secret
        given = connection.headers.get("authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, expected):
            return JSONResponse({"error": "wrong or missing secret"}, 401)
        return None

    async def card(self, request: Request) -> Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        if self._worker.card is None:
            return JSONResponse({"error": "the engine is starting"}, 503, _RETRY)
        etag = f'"{self._worker.card_digest}"'
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers={"ETag": etag})
        body = self._worker.card
        return Response(body, media_type="application/json", headers={"ETag": etag})

    async def upload(self, request: Request) -> Response:
        return self._refusal(request) or await self._uploads.receive(request)

    async def picture(self, request: Request) -> Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        if self._worker.pictures is None:
            return JSONResponse({"error": "the model reads no pictures"}, 404)
        return await receive_picture(request, self._worker.pictures)

    async def connect(self, websocket: WebSocket) -> None:
        refusal = self._refusal(websocket)
        if refusal is None and not await self._has_started():
            refusal = JSONResponse({"error": "the engine is starting"}, 503, _RETRY)
        if refusal is None and self._worker.draining:
            refusal = JSONResponse({"error": "the worker is draining"}, 503, _RETRY)
        if refusal is None and self._connections >= MAX_ROUTERS:
            refusal = JSONResponse({"error": "too many routers are connected"}, 503, _RETRY)
        if refusal is not None:
            await websocket.send_denial_response(refusal)
            return
        self._connections += 1
        self._next_number += 1
        try:
            await websocket.accept()
            await RouterConnection(self._next_number, websocket, self._worker).serve()
        finally:
            self._connections -= 1

    async def _has_started(self) -> bool:
        """Wait a while for the start. Whether the engine has been ready."""
        if self._worker.card is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._worker.became_ready.wait(), _START_WAIT_S)
        return self._worker.card is not None

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        state = self._worker.state
        if self._worker.takes_work:
            return JSONResponse({"status": state})
        shown = "engine_silent" if state == "ready" else state
        facts = self._worker.start_facts() if state in ("starting", "engine_lost") else {}
        return JSONResponse({"status": shown, **facts}, 503, _RETRY)

    async def metrics(self, request: Request) -> Response:
        body, content_type = self._worker.render_metrics(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})


async def receive_picture(request: Request, service: PictureService) -> Response:
    """Answers a PUT of `/pictures/DIGEST`. The digest must be the SHA-256 of the body."""
    body = bytearray()
    try:
        async with asyncio.timeout(_PICTURE_LIMIT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_PICTURE_BYTES:
                    words = f"a picture has at most {MAX_PICTURE_BYTES} bytes"
                    return JSONResponse({"error": words}, 413, {"connection": "close"})
    except (ClientDisconnect, TimeoutError):
        return Response(status_code=408, headers={"connection": "close"})
    data, digest = bytes(body), request.path_params["digest"]
    if (await asyncio.to_thread(hashlib.sha256, data)).hexdigest() != digest:
        return JSONResponse({"error": "the bytes are not those of this picture"}, 400)
    service.arrived(digest, data)
    return Response(status_code=204)
