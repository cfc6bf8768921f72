"""The outermost layer of the HTTP face: request ids, one count a request, no error without JSON."""

import logging
import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.errors import dialect_of_path, error_answer
from router.generation import RequestError
from router.http_body import ClientGone
from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

_ID_HEADER = b"x-request-id"
_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\Z")


class Edge:
    """Wraps the application. The request's id lies in `scope["state"]["request_id"]`.

    routes: paths that get a metrics label of their own; all others share `other`.
    """

    def __init__(self, app: ASGIApp, metrics: RouterMetrics, routes: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, _request_id(scope))
        scope.setdefault("state", {})["request_id"] = answer.request_id
        try:
            await self._app(scope, receive, answer.send)
        except ClientGone:
            self._metrics.disconnects.inc()
            answer.status = 499
        except Exception:  # the process edge: whatever happened, the client gets JSON
            logger.exception("request %s failed", answer.request_id)
            await _send_internal_error(scope["path"], answer)
        finally:
            path = scope["path"]
            self._metrics.request(path if path in self._routes else "other", answer.status)


class _Answer:
    """Remembers what was sent, and adds the request's id to the head."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.status = 0
        self.started = False
        self._send = send

    async def send(self, message: Message) -> None:
        if not self.started and message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            message["headers"] = [
                *message.get("headers", ()),
                (_ID_HEADER, self.request_id.encode()),
            ]
        await self._send(message)


async def _send_internal_error(path: str, answer: _Answer) -> None:
    if answer.started:
        return  # too late: the server cuts the connection, the client sees a broken answer
    error = RequestError("internal", f"internal error; request id {answer.request_id}")
    whole = error_answer(error, dialect_of_path(path))
    headers = [(name.encode(), value.encode()) for name, value in whole.headers.items()]
    headers.append((b"content-length", str(len(whole.body)).encode()))
    await answer.send({"type": "http.response.start", "status": whole.status, "headers": headers})
    await answer.send({"type": "http.response.body", "body": whole.body})


def _request_id(scope: Scope) -> str:
    """The caller's, if it is one that may stand in logs and headers; else a new one."""
    for name, value in scope["headers"]:
        if name == _ID_HEADER and _ID.match(value):
            return bytes(value).decode()
    return uuid.uuid4().hex
