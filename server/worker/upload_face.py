"""Receives the files of uploaded adapters from routers, as a tar each."""

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from loraplex.adapters.common.disk import disk_errors
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.uploads.archive import unpack_archive
from loraplex.adapters.uploads.body import BodyBroken, BodyStream
from loraplex.adapters.uploads.shelf import UploadShelf
from loraplex.adapters.uploads.sink import FileSink

log = logging.getLogger(__name__)

MAX_AT_ONCE = 16
IDLE_S = 30.0


class UploadFace:
    """Puts uploads on a shelf, where the adapter store finds them. max_bytes: of one upload."""

    def __init__(self, shelf: UploadShelf, max_bytes: int) -> None:
        self._shelf = shelf
        self._max_bytes = max_bytes
        self._threads = ThreadPoolExecutor(MAX_AT_ONCE, "uploads")

    async def receive(self, request: Request) -> Response:
        """Answers a PUT of `/uploads/DIGEST`. The digest must be that of the files."""
        digest = request.path_params["digest"]
        body = BodyStream(request.receive, IDLE_S)
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
            with contextlib.closing(sink):
                unpack_archive(body, sink)
                found = sink.finish()
            if found != digest:
                message = f"the files are not those of upload {digest[:64]}: {found}"
                raise AdapterError("invalid", message)
            self._shelf.keep(folder, digest)
