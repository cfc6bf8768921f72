"""The outermost ASGI middleware: request ids, one count a request, unforeseen errors."""

import logging
import re
import uuid
from collections.abc import Callable, Sequence
from urllib.parse import unquote

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.router.api.errors import dialect_of_path
from loraplex.router.api.missing_routes import MEANT
from loraplex.router.http.intake import Intake, caller_of
from loraplex.router.telemetry.metrics import RouterMetrics
from loraplex.router.telemetry.request import RequestInHand
from loraplex.router.telemetry.request_log import RequestLog

logger = logging.getLogger(__name__)

_ID_HEADER = b"x-request-id"
# As Anthropic's clients read it.
_ANTHROPIC_ID_HEADER = b"request-id"
# Below it paths have names of adapters.
_NAMED = ("/v1/adapters/", "/adapters/")
_CLOSE = ((b"connection", b"close"),)
_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\Z")


class Edge:
    """Wraps the application. The request's id lies in `scope["state"]["request_id"]`.

    routes: their paths are labels of metrics; requests that none of them takes share `other`.
    closing: whether connections are to end with their next answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: RouterMetrics,
        routes: Sequence[Route],
        log: RequestLog,
        intake: Intake,
        closing: Callable[[], bool],
    ) -> None:
        self._log = log
        self._intake = intake
        self._app = app
        self._closing = closing
        self._metrics = metrics
        self._paths: dict[object, str] = {route.endpoint: route.path for route in routes}
        for route in routes:  # a rate needs a zero to rise from
            metrics.requests.labels(route.path, "200")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        _keep_slashes(scope)
        if scope["path"] in MEANT:
            scope["path"] = MEANT[scope["path"]]
            scope["raw_path"] = scope["path"].encode()
        request = self._log.begin(_request_id(scope), scope)
        answer = _Answer(send, request, _id_headers(scope["path"]), self._closing)
        scope.setdefault("state", {})["request_id"] = answer.request_id
        try:
            await self._intake.enter(caller_of(scope))
            await self._app(scope, receive, answer.send)
        except Exception:  # the process edge; the application has answered if it still could
            logger.exception("request %s failed", answer.request_id)
        finally:
            self._metrics.request(self._route(scope), answer.status)
            self._log.end(request, answer.status)

    def _route(self, scope: Scope) -> str:
        """The route's name for metrics. `/` generates when posted to, else it is `/health`."""
        if scope["path"] == "/" and scope["method"] != "POST":
            return "/health"
        return self._paths.get(scope.get("endpoint"), "other")


class _Answer:
    """Remembers what was sent, and adds the request's id to the head, and its trace's."""

    def __init__(
        self,
        send: Send,
        request: RequestInHand,
        id_headers: tuple[bytes, ...],
        closing: Callable[[], bool],
    ) -> None:
        self._closing = closing
        self._id_headers = id_headers
        self.request_id = request.request_id
        self._traceparent = request.trace.traceparent
        self.status = 0
        self.started = False
        self._send = send

    async def send(self, message: Message) -> None:
        if not self.started and message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            message["headers"] = [
                *message.get("headers", ()),
                *((name, self.request_id.encode()) for name in self._id_headers),
                *(_CLOSE if self._closing() else ()),
            ]
            if self._traceparent is not None:
                message["headers"].append((b"traceparent", self._traceparent.encode()))
        await self._send(message)


def _keep_slashes(scope: Scope) -> None:
    """Keeps `%2F` in a path: so written, a slash belongs to an adapter's name."""
    raw: bytes = scope.get("raw_path") or b""
    if scope["path"].startswith(_NAMED) and b"%2f" in raw.lower():
        kept = re.sub(rb"%2f", b"%252F", raw, flags=re.I)
        scope["path"] = unquote(kept.decode("ascii"))


def path_name(request: Request) -> str:
    """The name of an adapter in a request's path."""
    name: str = request.path_params["name"]
    return name.replace("%2F", "/")


def _id_headers(path: str) -> tuple[bytes, ...]:
    is_anthropics = dialect_of_path(path) == "anthropic"
    return (_ID_HEADER, _ANTHROPIC_ID_HEADER) if is_anthropics else (_ID_HEADER,)


def _request_id(scope: Scope) -> str:
    """The request's id: the caller's, if logs and headers may have it; else a new one."""
    for name, value in scope["headers"]:
        if name == _ID_HEADER and _ID.match(value):
            return bytes(value).decode()
    return uuid.uuid4().hex
