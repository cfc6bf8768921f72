"""Routes about the router: health, models, info, version, metrics, the fleet, SGLang's."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.adapters.common.nearest import did_you_mean, one_edit_away
from loraplex.adapters.ref import format_ref, shown_name
from loraplex.router.api.about import (
    FleetState,
    Health,
    Info,
    ModelList,
    ModelObject,
    VersionAnswer,
    served_model,
    served_settings,
)
from loraplex.router.api.admin.adapters import end_tokens
from loraplex.router.api.admin.fleet import FleetObject
from loraplex.router.api.openapi import Access, openapi_document
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.api.sglang.generate import aborted_by
from loraplex.router.api.vllm.control import vllm_config
from loraplex.router.call import RequestError
from loraplex.router.http.body import read_json_body
from loraplex.router.http.sse import EventStream, takes_events, until_disconnect
from loraplex.router.names.registration import Registration
from loraplex.router.operations.fleet_watch import Changes, FleetWatch, next_look
from loraplex.router.routes.operator import AdminGate
from loraplex.router.service import Service
from loraplex.router.tenancy.keys import Caller
from loraplex.router.version import VERSION
from loraplex.router.workers.bases import BaseModel

_RETRY = {"retry-after": "2"}
T = TypeVar("T")

_NO_STORE = {"cache-control": "no-store"}


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


class InfoRoutes:
    """Each method answers one route. None of them shows a secret."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._gate = AdminGate(service.config)
        self._described: tuple[ApiLimits, bytes] | None = None

    async def live(self, request: Request) -> Response:
        return json_response(Health("live"))

    async def ready(self, request: Request) -> Response:
        """Says if a request would find a worker, and the operator's adapters their names."""
        why = self._service.why_not_ready()
        if why is None:
            return json_response(Health("ready"))
        body = {"status": "not ready", "error": why, "error_type": "healthcheck"}
        return json_response(body, 503, _RETRY)

    async def health(self, request: Request) -> Response:
        """Answers LoRAX's health check: an empty 200, or 503 in JSON."""
        answer = await self.ready(request)
        return Response(status_code=200) if answer.status_code == 200 else answer

    async def metrics(self, request: Request) -> Response:
        accept = request.headers.get("accept", "")
        body, content_type = self._service.metrics.meters.render(accept)
        return Response(body, headers={"content-type": content_type})

    async def metrics_of_port(self, request: Request) -> Response:
        """Metrics of the process, if the port is its alone: it knows nothing of others."""
        count = self._service.config.router_processes
        if count > 1:
            raise RequestError(
                "conflict",
                f"{count} router processes share this port, and each counts for itself: scrape "
                "the ports of --metrics-port, one for each process",
            )
        return await self.metrics(request)

    async def info(self, request: Request) -> Response:
        bases = self._service.bases
        model = bases.first.require()
        card, config = model.card, self._service.config
        ends = await self._service.tokeniser.ends.of(model, None)
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
            workers_ready=sum(view.able for view in self._service.roster.views),
            workers=len(self._service.roster.clients),
            adapters=await self._names_for_anyone(request),
            version=VERSION,
            message_forms=model.templates.forms,
            ends=end_tokens(ends, model.token_text),
        )
        return json_response(info)

    async def version(self, request: Request) -> Response:
        return json_response(VersionAnswer(VERSION))

    async def openapi(self, request: Request) -> Response:
        """Shows the API's description, made anew when the limits of a model change it."""
        limits = self._service.bases.limits()
        if self._described is None or self._described[0] != limits:
            access = Access(
                operators=bool(self._service.config.admin_key),
                callers=self._service.tenancy.needs_keys,
            )
            document = openapi_document(VERSION, access, limits)
            self._described = (limits, msgspec.json.encode(document))
        return Response(self._described[1], media_type="application/json")

    async def models(self, request: Request) -> Response:
        """Lists each base under each name that the operator gave it, then adapters."""
        self._check_known()
        caller = await self._caller(request)
        bases = [
            _base_object(base, name)
            for base in self._service.bases
            for name in base.listed
            if self._meant(name, caller) is base
        ]
        shows_paths = self._gate.opens(request.headers)
        show = partial(self._adapter_object, shows_paths=shows_paths)
        adapters = await self._good(caller, show)
        return json_response(ModelList([*bases, *adapters]))

    async def model(self, request: Request) -> Response:
        self._check_known()
        name = request.path_params["name"]
        caller = await self._caller(request)
        base = self._meant(name, caller)
        if base is not None:
            return json_response(_base_object(base, name))
        name = name.removeprefix("alias:")  # another spelling, which requests may have
        rules = self._service.catalog.rules
        one = rules.usable(name, caller)
        if one is not None:
            if one.is_broken:
                message = f"adapter {name!r} cannot be served: {one.error}"
                raise RequestError("adapter_invalid", message, param="model")
            return json_response(self._adapter_object(one, self._gate.opens(request.headers)))
        close = one_edit_away(name, lambda other: rules.usable(other, caller) is not None)
        hint = did_you_mean(close)
        raise RequestError("adapter_not_found", f"no model {name[:200]!r}{hint}", param="model")

    async def _caller(self, request: Request) -> Caller:
        """Finds who calls. Raises RequestError."""
        return await self._service.tenancy.identify(request.headers.get("authorization"))

    def _check_known(self) -> None:
        """Checks that the only base, or one of several, is known. Raises RequestError."""
        if all(base.text is None for base in self._service.bases):
            self._service.bases.first.require()

    def _meant(self, name: str, caller: Caller) -> BaseModel | None:
        """The base that a name means to a caller. A key to one of a base's names opens them all."""
        base = self._service.bases.named(name)
        return base if base is not None and caller.may_use(base.names) else None

    async def _good(self, caller: Caller, show: Callable[[Registration], T]) -> list[T]:
        """Shows registered adapters that serve the caller, by name. Raises RequestError."""
        rules = self._service.catalog.rules

        def shown(name: str) -> T | None:
            one = rules.usable(name, caller)
            return None if one is None or one.is_broken else show(one)

        turns = self._service.bases.first.turns_of(caller)
        return await turns.listed(rules.aliases.names_for(caller.tenant), shown)

    def _adapter_object(self, adapter: Registration, shows_paths: bool) -> ModelObject:
        """Describes an adapter in a list of models. shows_paths: where a folder or bucket lies is
        for the operator to know.
        """
        root = format_ref(adapter.ref) if shows_paths else shown_name(adapter.ref)
        bases = self._service.bases
        base = bases.of(adapter.base or "")
        of_base = _base_object(base, base.names[0])
        if adapter.base is None:
            is_known = not bases.are_several
        else:
            is_known = bases.find(adapter.base) is not None
        parent = of_base.id if is_known else ""
        return msgspec.structs.replace(of_base, id=adapter.name, root=root, parent=parent)

    async def _names_for_anyone(self, request: Request) -> list[str]:
        """Names of adapters for a caller: none without a good key, who sees the limits alone."""
        try:
            caller = await self._caller(request)
        except RequestError:
            return []
        return await self._good(caller, attrgetter("name"))


def _base_object(base: BaseModel, name: str) -> ModelObject:
    """Describes a base in a list of models. One without a card had no workers yet."""
    if base.text is None:
        return ModelObject(name, 0, "loraplex", name, None, 0)
    card = base.text.card
    root = card.root or card.names[0]
    return ModelObject(name, card.created, "loraplex", root, None, card.max_context)


class FleetRoute:
    """Shows the fleet. It is one of the operator's routes."""

    def __init__(self, watch: FleetWatch) -> None:
        self._watch = watch

    async def fleet(self, request: Request) -> Response:
        """Shows the fleet; as `text/event-stream` once a second, until the client leaves."""
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


class SglangRoutes:
    """Each method answers one route. None of them shows an adapter."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def model(self, request: Request) -> Response:
        return json_response(served_model(self._service.bases.first.require().card))

    async def settings(self, request: Request) -> Response:
        base = self._service.bases.first
        fleet = base.fleet
        state = FleetState(
            workers=len(fleet.clients),
            workers_ready=sum(view.able for view in fleet.views),
            max_running_requests=self._service.config.max_requests,
        )
        card = base.require().card
        processed = base.limits.processed_logprobs
        config = vllm_config(card, processed, fleet.adapter_slots, fleet.shards)
        return json_response(served_settings(card, VERSION, state, config))

    async def abort(self, request: Request) -> Response:
        """Aborts answers. An id that nothing has is no error: the answer may just have ended."""
        service = self._service
        caller = await service.tenancy.identify(request.headers.get("authorization"))
        rid = aborted_by(await read_json_body(request, service.answerer.body_limits))
        service.dispatcher.abort(caller.tenant, rid)
        return Response()

    async def flush(self, request: Request) -> Response:
        """Refuses: nothing can be flushed. SGLang's answer to that is a 400, too."""
        await self._service.tenancy.identify(request.headers.get("authorization"))
        raise RequestError(
            "unsupported",
            "nothing was flushed: workers keep cached prefixes until others need the room; a new "
            "`cache_salt` finds none of them",
        )
