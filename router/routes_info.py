"""Routes that tell of the router: health, models, info, metrics."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.api.models import Health, Info, ModelList, ModelObject
from router.api.openapi import openapi_document
from router.generation import RequestError
from router.service import Service
from router.tenancy.keys import Caller
from router.version import VERSION
from server.protocol import ModelCard

_RETRY = {"retry-after": "2"}


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


class InfoRoutes:
    """Each method answers one route. None of them tells a secret."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def live(self, request: Request) -> Response:
        return json_response(Health("live"))

    async def ready(self, request: Request) -> Response:
        """Whether a new request would find a worker, and the operator's adapters their names."""
        why = self._service.why_not_ready()
        if why is None:
            return json_response(Health("ready"))
        body = {"status": "not ready", "error": why, "error_type": "healthcheck"}
        return json_response(body, 503, _RETRY)

    async def health(self, request: Request) -> Response:
        """LoRAX's: an empty 200, or 503 in JSON."""
        answer = await self.ready(request)
        return Response(status_code=200) if answer.status_code == 200 else answer

    async def metrics(self, request: Request) -> Response:
        accept = request.headers.get("accept", "")
        body, content_type = self._service.metrics.meters.render(accept)
        return Response(body, headers={"content-type": content_type})

    async def metrics_of_port(self, request: Request) -> Response:
        """Of the process, if the port is its alone: of others it knows nothing."""
        count = self._service.config.router_processes
        if count > 1:
            raise RequestError(
                "conflict",
                f"{count} router processes share this port, and each counts for itself: scrape "
                "the ports of --metrics-port, one for each process",
            )
        return await self.metrics(request)

    async def info(self, request: Request) -> Response:
        card = self._service.base.require().card
        config = self._service.config
        info = Info(
            model_id=card.names[0],
            model_sha=card.base_digest,
            model_dtype=card.dtype,
            model_device_type=card.device,
            max_concurrent_requests=config.max_requests,
            max_best_of=config.max_n,
            max_stop_sequences=config.max_stop_sequences,
            max_input_length=card.max_context - 1,
            max_total_tokens=card.max_context,
            max_lora_rank=card.max_lora_rank,
            max_queue=config.max_queue,
            workers_ready=sum(view.able for view in self._service.fleet.views),
            workers=len(self._service.fleet.clients),
            adapters=await self._names_for_anyone(request),
            version=VERSION,
            message_forms=self._service.base.require().templates.forms,
        )
        return json_response(info)

    async def openapi(self, request: Request) -> Response:
        return json_response(openapi_document(VERSION))

    async def models(self, request: Request) -> Response:
        card = self._service.base.require().card
        caller = await self._caller(request)
        base = [card.names[0]] if caller.may_use(card.names) else []
        names = [*base, *self._names(caller)]
        return json_response(ModelList([_model(card, name) for name in names]))

    async def model(self, request: Request) -> Response:
        card = self._service.base.require().card
        name = request.path_params["name"]
        caller = await self._caller(request)
        base = card.names if caller.may_use(card.names) else ()
        if name not in base:
            name = name.removeprefix("alias:")  # another spelling, which requests may have
            if name not in self._names(caller):
                raise RequestError("adapter_not_found", f"no model {name[:200]!r}", param="model")
        return json_response(_model(card, name))

    async def _caller(self, request: Request) -> Caller:
        """Raises RequestError."""
        return await self._service.tenancy.identify(request.headers.get("authorization"))

    def _names(self, caller: Caller) -> list[str]:
        """Registered adapters that the caller may use."""
        names = self._service.catalog.rules.aliases.names_for(caller.tenant)
        return [name for name in names if caller.may_use((name,))]

    async def _names_for_anyone(self, request: Request) -> list[str]:
        """Who shows no good key sees the model and the limits, and no adapter."""
        try:
            return self._names(await self._caller(request))
        except RequestError:
            return []


def _model(card: ModelCard, name: str) -> ModelObject:
    root = card.names[0]
    parent = None if name in card.names else root
    return ModelObject(name, card.created, "loraplex", root, parent)
