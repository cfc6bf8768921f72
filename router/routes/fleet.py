"""`GET /v1/fleet`: the whole picture as JSON, or followed as server-sent events."""

from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.router.api.admin.fleet import FleetObject
from loraplex.router.http.sse import EventStream, takes_events, until_disconnect
from loraplex.router.operations.fleet_watch import Changes, FleetWatch, next_look
from loraplex.router.routes.info import json_response

_NO_STORE = {"cache-control": "no-store"}


class FleetRoute:
    """One of the operator's routes."""

    def __init__(self, watch: FleetWatch) -> None:
        self._watch = watch

    async def fleet(self, request: Request) -> Response:
        """With `Accept: text/event-stream` an event a second, until the client leaves."""
        if not takes_events(request):
            whole = await until_disconnect(request, self._watch.look())
            return json_response(whole, headers=_NO_STORE)
        leave = self._watch.enter()
        try:
            first = await until_disconnect(request, self._watch.look())
        except BaseException:
            leave()
            raise
        changes = Changes()
        return EventStream(_event(changes.of(first)), self._follow(changes), leave, _NO_STORE)

    async def _follow(self, changes: Changes) -> AsyncIterator[bytes]:
        while await next_look(self._watch.closing):
            yield _event(changes.of(await self._watch.look()))


def _event(fleet: FleetObject) -> bytes:
    return b"event: fleet\ndata: " + msgspec.json.encode(fleet) + b"\n\n"
