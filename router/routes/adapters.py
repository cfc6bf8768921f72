"""The lifecycle routes: `/v1/adapters…`, vLLM's two and SGLang's. All want the admin key."""

import asyncio
import contextlib
from functools import partial

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from loraplex.adapters.ref import format_ref
from loraplex.router.api.about import LoadedAdapters
from loraplex.router.api.admin.adapters import (
    DEFAULT_WAIT_S,
    AdapterHistory,
    AdapterList,
    AdapterObject,
    Deleted,
    EndToken,
    LoadLoraBody,
    Refreshed,
    SagemakerAdapters,
    SagemakerBody,
    SglangLoadBody,
    UnloadLoraBody,
    adapter_object,
    change_objects,
    check_name,
    check_versions_alone,
    end_tokens,
    format_named,
    parse_digest,
    parse_register,
    parse_rollout,
    parse_target,
    parse_tenant,
    parse_unload,
    partial_note,
    rollout_object,
    rollout_request,
)
from loraplex.router.api.admin.pages import parse_page
from loraplex.router.api.admin.uploads import Received, Uploaded, parse_upload
from loraplex.router.api.request.body import decode_body, require
from loraplex.router.call import RequestError, Secret
from loraplex.router.http.body import BodyLimits, read_json_body
from loraplex.router.http.edge import path_name
from loraplex.router.names.aliases import MAX_LISTED
from loraplex.router.names.registration import (
    PublishRequest,
    Registration,
    RegistrationRequest,
)
from loraplex.router.names.rollout_moves import running
from loraplex.router.names.served import OwnedName
from loraplex.router.operations.workers import Tiers
from loraplex.router.policy.rollout import HeldContent
from loraplex.router.routes.info import json_response
from loraplex.router.routes.operator import Endpoint, who
from loraplex.router.service import Service
from loraplex.router.shared.store import StoreDown
from loraplex.router.tenancy.keys import NOBODY, Caller
from loraplex.router.uploads.receiver import PartReceived, read_head


class AdapterRoutes:
    """Each method answers one route."""

    def __init__(self, service: Service, body_limits: BodyLimits) -> None:
        self._admin = service.admin
        self._aliases = service.catalog.rules.aliases
        self._rollouts = service.rollouts
        self._service = service
        self._turns = service.bases.first.turns_of(NOBODY)
        self._body_limits = body_limits

    def current(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint, whose answer has what other routers registered before the request."""

        async def answer(request: Request) -> Response:
            with contextlib.suppress(StoreDown):  # then what is known is shown
                await self._aliases.refresh()
            return await endpoint(request)

        return answer

    async def collection(self, request: Request) -> Response:
        if request.method == "POST":
            return await self._register(request)
        asked = parse_page(request.query_params)
        if asked.is_whole and self._aliases.count <= MAX_LISTED:
            registrations, more = await self._listed(asked.tenant), None
        else:
            registrations, more = self._aliases.page(*asked)
        tiers = await self._admin.workers.tiers(h for r in registrations for h in r.held)
        problems = self._service.declarations.problems
        shown = await self._turns.listed(registrations, lambda r: self._object(r, tiers))
        return json_response(AdapterList(shown, problems, more or UNSET))

    async def one(self, request: Request) -> Response:
        name = _named(request)
        if request.method == "DELETE":
            self._admin.check_free(name)
            await self._admin.delete(name)
            return json_response(Deleted(name.name, name.tenant or None))
        return await self._answer(self._admin.get(name))

    async def put(self, request: Request) -> Response:
        """Takes an upload, and makes it what its name means: 200, or 308 for a part of it."""
        name, options = _named(request), self._service.config.upload
        check_name(name.name, "name")
        keep, replace = parse_upload(request.query_params)
        caller = _key_holder(request)
        own = None if caller is None else caller.owner.upload_bytes
        head = read_head(request.headers, options.max_bytes)
        self._admin.check_uploadable(name, replace)
        try:
            digest = await self._service.uploads.receive(request.receive, head, name)
        except PartReceived as part:
            headers = {"range": f"bytes=0-{part.nbytes - 1}"} if part.nbytes else {}
            return json_response(Received(part.nbytes), 308, headers)
        wanted = PublishRequest(
            name=name,
            digest=digest,
            keep=keep,
            replace=replace,
            by=who(request),
            most_bytes=options.tenant_bytes if own is None else own,
        )
        # The files become safe on the disk while workers judge and load them.
        (registration, problems), _ = await asyncio.gather(
            self._admin.publish(wanted), self._service.uploads.settle(digest)
        )
        shown = await self._shown(registration)
        ref = format_ref(registration.ref)
        return json_response(Uploaded(registration.last_version, ref, problems, shown))

    async def load(self, request: Request) -> Response:
        return await self._answer(await self._admin.load(_named(request)))

    async def pin(self, request: Request) -> Response:
        return await self._answer(await self._admin.pin(self._unpinned_by_file(request)))

    async def unpin(self, request: Request) -> Response:
        return await self._answer(await self._admin.unpin(self._unpinned_by_file(request)))

    async def unload(self, request: Request) -> Response:
        """Unloads an adapter: 200 when all is freed, 202 while requests still run."""
        name = _named(request)
        wait_s = parse_unload(await read_json_body(request, self._body_limits))
        registration = await self._admin.unload(name, wait_s)
        return await self._answer(registration, 202 if registration.state == "unloading" else 200)

    async def refresh(self, request: Request) -> Response:
        name = _named(request)
        old, registration = await self._admin.refresh(name, who(request))
        shown = await self._shown(registration)
        new = registration.digest
        return json_response(Refreshed(old, new, old != new, shown))

    async def rollout(self, request: Request) -> Response:
        """Shows it, sets it, or ends it."""
        name = _named(request)
        if request.method == "DELETE":
            return await self._answer(await self._rollouts.end(name, who(request)))
        if request.method == "POST":
            raw = await read_json_body(request, self._body_limits)
            wanted = parse_rollout(raw, self._service.config.default_source, who(request))
            return await self._answer(await self._rollouts.roll_out(name, wanted))
        registration = self._admin.get(name)
        running(registration)
        measured = await self._service.keeper.measured(registration)
        tiers = await self._admin.workers.tiers(registration.held)
        resident = partial(_resident, tiers, registration.base or "")
        return json_response(rollout_object(registration, measured, resident))

    async def promote(self, request: Request) -> Response:
        name = _named(request)
        digest = parse_digest(await read_json_body(request, self._body_limits))
        return await self._answer(await self._rollouts.promote(name, digest, who(request)))

    async def rollback(self, request: Request) -> Response:
        """Ends a rollout, while one has shares; else goes back to the name's meaning before."""
        name = _named(request)
        digest = parse_digest(await read_json_body(request, self._body_limits))
        return await self._answer(await self._rollouts.back(name, digest, who(request)))

    async def history(self, request: Request) -> Response:
        name = _named(request)
        changes = change_objects(self._admin.get(name))[::-1]
        return json_response(AdapterHistory(name.name, name.tenant or None, changes))

    async def load_lora(self, request: Request) -> Response:
        """Loads an adapter, as vLLM's route does."""
        body, _ = decode_body(await read_json_body(request, self._body_limits), LoadLoraBody)
        loaded = await self._load(request, body, again=body.load_inplace)
        text = f"Success: LoRA adapter '{body.lora_name}' added successfully."
        return PlainTextResponse(text + partial_note(loaded))

    async def load_sglang(self, request: Request) -> Response:
        body, _ = decode_body(await read_json_body(request, self._body_limits), SglangLoadBody)
        loaded = await self._load(request, body, pin=body.pinned)
        return json_response(await self._loaded(loaded.tenant))

    async def unload_lora(self, request: Request) -> Response:
        """Unloads an adapter, as vLLM's route does: at once, while requests still run on it."""
        name = await self._unload_named(request, wait_s=0.0)
        text = f"Success: LoRA adapter '{name.name}' removed successfully."
        return PlainTextResponse(text)

    async def unload_sglang(self, request: Request) -> Response:
        name = await self._unload_named(request)
        return json_response(await self._loaded(name.tenant))

    async def of_sagemaker(self, request: Request) -> Response:
        if request.method == "GET":
            shown: list[dict[str, str | bool]] = [
                {"name": r.name, "src": format_ref(r.ref), "pin": r.pinned}
                for r in await self._listed(parse_tenant(request.query_params))
            ]
            return json_response(SagemakerAdapters(shown))
        body, _ = decode_body(await read_json_body(request, self._body_limits), SagemakerBody)
        check_name(body.name, "name")
        name = _named_in_body(request, body.name, body.tenant)
        ref = parse_target(body.src, "src", self._service.config.default_source)
        pin, by = body.pin or None, who(request)
        wanted = RegistrationRequest(name, ref, "api", pin=pin, load=body.preload, by=by)
        loaded = await self._admin.register(wanted)
        return PlainTextResponse(f"Adapter {body.name} registered" + partial_note(loaded))

    async def unregister(self, request: Request) -> Response:
        """Unregisters an adapter, as SageMaker's route does."""
        name = _named(request)
        await self._remove(name, DEFAULT_WAIT_S)
        return PlainTextResponse(f"Adapter {name.name} unregistered")

    async def _listed(self, tenant: str | None) -> list[Registration]:
        """Lists a tenant's registrations; None = everybody's."""
        names = self._aliases.names(MAX_LISTED, tenant)
        found = await self._turns.listed(names, self._aliases.get)
        return [one for one in found if one.state != "deleted"]

    async def _load(
        self,
        request: Request,
        body: LoadLoraBody | SglangLoadBody,
        *,
        again: bool = False,
        pin: bool | None = None,
    ) -> Registration:
        """Registers it and brings it to every worker's device. again: also what is served."""
        check_name(body.lora_name, "lora_name")
        name = _named_in_body(request, body.lora_name, body.tenant)
        ref = parse_target(body.lora_path, "lora_path", self._service.config.default_source)
        wanted = RegistrationRequest(
            name, ref, "api", pin=pin, replace=again, once=not again, load=True, by=who(request)
        )
        return await self._admin.register(wanted)

    async def _unload_named(self, request: Request, wait_s: float = DEFAULT_WAIT_S) -> OwnedName:
        body, _ = decode_body(await read_json_body(request, self._body_limits), UnloadLoraBody)
        name = _named_in_body(request, body.lora_name, body.tenant)
        await self._remove(name, wait_s)
        return name

    async def _remove(self, name: OwnedName, wait_s: float) -> None:
        self._admin.check_free(name)
        await self._admin.unload(name, wait_s)
        await self._admin.delete(name)

    async def _loaded(self, tenant: str) -> LoadedAdapters:
        """Lists names of the tenant's that are served, and what they mean."""
        own = [one for one in await self._listed(tenant) if one.in_service]
        return LoadedAdapters({one.name: format_ref(one.ref) for one in own})

    async def _register(self, request: Request) -> Response:
        raw = await read_json_body(request, self._body_limits)
        body, ref = parse_register(raw, self._service.config.default_source)
        name = _named_in_body(request, body.name, body.tenant)
        token = None if body.token is None else Secret(body.token)
        by = who(request)
        wanted = RegistrationRequest(
            name=name,
            ref=ref,
            origin="api",
            pin=body.pin,
            token=token,
            replace=body.replace,
            by=by,
            tool_format=format_named(body.tool_format),
        )
        if body.versions is None:
            return await self._answer(await self._admin.register(wanted))
        source = self._service.config.default_source
        rollout = rollout_request(body.versions, body.guards, source, by)
        if self._admin.is_registered(name):
            check_versions_alone(body)
        else:
            registration = await self._admin.register(wanted)
            if len(body.versions) == 1:
                return await self._answer(registration)
        return await self._answer(await self._rollouts.roll_out(name, rollout))

    def _unpinned_by_file(self, request: Request) -> OwnedName:
        """The name to pin or unpin. Raises AdapterError where the adapters file decides that."""
        name = _named(request)
        self._admin.check_free(name, "file")
        return name

    async def _answer(self, registration: Registration, status: int = 200) -> Response:
        return json_response(await self._shown(registration), status)

    async def _shown(self, registration: Registration) -> AdapterObject:
        tiers = await self._admin.workers.tiers(registration.held)
        return self._object(registration, tiers, await self._ends(registration))

    async def _ends(self, registration: Registration) -> list[EndToken] | None:
        """Tokens that end an adapter's answers; None where they cannot be found now."""
        content = registration.content
        model = None if content is None else self._service.bases.of(content.base).text
        if model is None or content is None:
            return None
        try:
            model = await self._service.tokeniser.model_of(model, content.manifest)
            ends = await self._service.tokeniser.ends.own(model, content.manifest)
        except RequestError:
            return None
        return end_tokens(ends, model.token_text)

    def _object(
        self, registration: Registration, tiers: Tiers, ends: list[EndToken] | None = None
    ) -> AdapterObject:
        use, content = self._admin.use, registration.content
        if content is None:
            return adapter_object(registration, {}, use.running(registration.key))
        own = content.held
        workers = {worker: there[own] for worker, there in tiers.items() if own in there}
        running, last = use.running(registration.key), use.last_used(own)
        resident = partial(_resident, tiers, content.base)
        return adapter_object(registration, workers, running, last, resident, ends)


def _key_holder(request: Request) -> Caller | None:
    """The caller who came in by the right of a key; None for the operator."""
    caller: Caller | None = getattr(request.state, "caller", None)
    return caller


def _named(request: Request) -> OwnedName:
    """Returns the name in the path, with the tenant that `?tenant` may say: a key's holder has only
    names of the own tenant. Raises RequestError.
    """
    said, name = parse_tenant(request.query_params), path_name(request)
    caller = _key_holder(request)
    request.state.tenant = tenant = said or "" if caller is None else caller.tenant
    request.state.target = name
    if caller is not None and (said not in (None, tenant) or not caller.may_use((name,))):
        raise RequestError("forbidden", f"this key does not open {name[:200]!r}")
    return OwnedName(name, tenant)


def _named_in_body(request: Request, name: str, tenant: str | None) -> OwnedName:
    """The name in a body. Raises RequestError for a tenant in the query, which would be lost."""
    require(parse_tenant(request.query_params) is None, "say it in the body", "tenant")
    request.state.target, request.state.tenant = name, tenant or ""
    return OwnedName(name, tenant or "")


def _resident(tiers: Tiers, base: str, digest: str) -> list[str]:
    """Ids of workers that have it on the device."""
    own = HeldContent(base, digest)
    return sorted(w for w, there in tiers.items() if own in there and there[own].device == "ready")
