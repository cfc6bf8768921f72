"""Receives pictures' files from routers."""

import asyncio
import hashlib

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from loraplex.server.protocol import MAX_PICTURE_BYTES
from loraplex.server.worker.pictures.service import PictureService

_LIMIT_S = 60.0


async def receive_picture(request: Request, service: PictureService) -> Response:
    """Answers a PUT of `/pictures/DIGEST`. The digest must be the SHA-256 of the body."""
    body = bytearray()
    try:
        async with asyncio.timeout(_LIMIT_S):
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
