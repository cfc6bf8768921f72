"""A line's way into this router: the request that it is, through all that HTTP requests meet."""

import asyncio
import contextlib
from collections.abc import MutableMapping
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

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
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            if not unread:
                await asyncio.Event().wait()  # it stays until it is answered
            return unread.pop()

        async def send(message: Message) -> None:
            sent.append(message)

        scope = _scope(path, len(body), authorization)
        await self.app({**scope, "state": state}, receive, send)
        return _answer(sent)


def _scope(path: str, nbytes: int, authorization: str) -> MutableMapping[str, Any]:
    headers = {
        "host": _NAME,
        "user-agent": _NAME,
        "content-type": "application/json",
        "content-length": str(nbytes),
        "authorization": authorization,
    }
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": (_NAME, 0),
    }


def _answer(sent: list[Message]) -> InsideAnswer:
    if not sent:  # it failed before anything could be said
        return InsideAnswer(500, None, None, b"")
    head = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    retry_after_s: float | None = None
    with contextlib.suppress(KeyError, ValueError):
        retry_after_s = float(head["retry-after"])
    content = b"".join(message.get("body", b"") for message in sent[1:])
    return InsideAnswer(sent[0]["status"], head.get("x-request-id"), retry_after_s, content)
