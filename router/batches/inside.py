"""A line's way into this router: the request that it is, through all that HTTP requests meet."""

import contextlib
from typing import Any

import httpx
import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

_NAME = "loraplex-batch"


class InsideAnswer(msgspec.Struct, frozen=True):
    """The router's answer to a line. retry_after_s: None = the header is not there."""

    status: int
    request_id: str | None
    retry_after_s: float | None
    content: bytes


class InsideDoor:
    """Sends lines of batches through the router as HTTP requests. app: the router's, with its edge;
    there once it is built.
    """

    app: ASGIApp

    async def ask(self, path: str, body: bytes, authorization: str, **state: Any) -> InsideAnswer:
        """Sends one line through the router and returns the answer. authorization: the header; "" =
        without one. state: for the route, in `request.state`.
        """

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self.app({**scope, "state": state, "client": None}, receive, send)
            raise EOFError  # so that what broke off, or was never said, is an answer to httpx, too

        headers = {
            b"user-agent": _NAME.encode(),
            b"content-type": b"application/json",
            b"authorization": authorization.encode("latin-1"),  # as servers decode it
        }
        request = httpx.Request("POST", f"http://{_NAME}{path}", headers=headers, content=body)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        answer = await transport.handle_async_request(request)
        retry_after_s: float | None = None
        with contextlib.suppress(KeyError, ValueError):
            retry_after_s = float(answer.headers["retry-after"])
        content, request_id = await answer.aread(), answer.headers.get("x-request-id")
        return InsideAnswer(answer.status_code, request_id, retry_after_s, content)
