"""A port of this process alone, for those who watch it: which requests came by it."""

from starlette.types import ASGIApp, Receive, Scope, Send


class ByPort:
    """Divides requests by port (ASGI): `own` answers on `port`, `app` the rest and lifespan."""

    def __init__(self, app: ASGIApp, own: ASGIApp, port: int) -> None:
        self._app = app
        self._own = own
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_own = scope["type"] == "http" and scope["server"][1] == self._port
        await (self._own if is_own else self._app)(scope, receive, send)
