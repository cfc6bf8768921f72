"""vLLM's routes that trainers call between their steps."""

import logging

from starlette.requests import Request
from starlette.responses import Response

from loraplex.router.api.vllm.control import (
    IsPaused,
    PauseState,
    WorldSize,
    check_alone,
    pause_mode,
)
from loraplex.router.http.sse import until_disconnect
from loraplex.router.routes.info import json_response
from loraplex.router.service import Service

logger = logging.getLogger(__name__)


class TrainerRoutes:
    """Each method answers one route. A pause is this router's own."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def pause(self, request: Request) -> Response:
        """Holds new sequences. Answers at once with `keep`, else when no sequence runs."""
        mode, bases = pause_mode(request.query_params), self._service.bases
        check_alone(self._service.config.router_processes)
        request.state.target = mode
        bases.pause()
        logger.info("paused (%s): sequences wait in the queue until POST /resume", mode)
        if mode == "abort":
            self._service.dispatcher.abort(None, None)
        if mode != "keep":
            await until_disconnect(request, bases.until_idle())
        return json_response(PauseState("paused" if bases.paused else "resumed"))

    async def resume(self, request: Request) -> Response:
        self._service.bases.resume()
        logger.info("resumed")
        return json_response(PauseState("resumed"))

    async def is_paused(self, request: Request) -> Response:
        return json_response(IsPaused(self._service.bases.paused))

    async def world_size(self, request: Request) -> Response:
        base = self._service.bases.first
        base.require()
        return json_response(WorldSize(base.fleet.shards))
