"""A request's body: read within limits of bytes and time, whatever the client sends."""

import asyncio
import codecs
from dataclasses import dataclass

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.requests import Request

from loraplex.router.call import RequestError

CLIENT_GONE_STATUS = 499  # as nginx counts it
_CHARSETS = ("", "utf-8", "utf8", "us-ascii", "ascii")  # "" = none is said


class ClientGone(Exception):
    """The client left: nobody is there to answer."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits on a request's body. timeout_s: from the end of the head to the end of the body."""

    max_bytes: int
    timeout_s: float


async def read_json_body(request: Request, limits: BodyLimits) -> bytes:
    """The body of a request that carries JSON. Raises RequestError, ClientGone.

    Empty if there is none: then it has no type, whatever a client's header says. A byte order mark
    is left out.
    """
    if not _has_body(request):
        return b""
    max_bytes, timeout_s = limits.max_bytes, limits.timeout_s
    _check_headers(request, max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise RequestError("too_large", f"the body may have at most {max_bytes} bytes")
                if not message.get("more_body", False):
                    return bytes(body).removeprefix(codecs.BOM_UTF8)
    except TimeoutError as error:
        raise RequestError(
            "body_timeout", f"the body did not arrive within {timeout_s:g} s"
        ) from error


def _has_body(request: Request) -> bool:
    """Whether a request has a body, as RFC 9112 (6.3) defines it."""
    headers = request.headers
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _check_headers(request: Request, max_bytes: int) -> None:
    # A browser's page may post forms, text and bytes without a type to any address without asking;
    # JSON it may not.
    unstated = "" if "origin" in request.headers else "application/json"
    kind, options = parse_options_header(request.headers.get("content-type", unstated))
    media_type = kind.decode("latin-1")
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise RequestError(
            "media_type", f"expected content-type application/json, got {media_type[:100]!r}"
        )
    charset = options.get(b"charset", b"").decode("latin-1")
    if charset.strip("'").lower() not in _CHARSETS:
        raise RequestError("media_type", f"charset {charset[:100]!r} is not supported: send UTF-8")
    check_plain(request.headers, max_bytes)


def check_plain(headers: Headers, max_bytes: int) -> None:
    """Checks a body's head: uncompressed, no length beyond the limit. Raises RequestError."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise RequestError(
            "media_type", f"content-encoding {encoding[:100]!r} is not supported: send plain"
        )
    coding = ", ".join(headers.getlist("transfer-encoding")).strip().lower()
    if coding not in ("", "chunked"):
        raise RequestError(
            "media_type", f"transfer-encoding {coding[:100]!r} is not supported: send plain"
        )
    length = headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > max_bytes:
        raise RequestError(
            "too_large", f"the body may have at most {max_bytes} bytes, got {length[:20]}"
        )
