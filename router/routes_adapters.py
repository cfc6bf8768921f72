"""The lifecycle routes: `/v1/adapters…` and vLLM's two. All of them want the admin key."""

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from router.adapter_admin import Tiers
from router.adapter_wish import Wish
from router.api.adapters import (
    DEFAULT_WAIT_S,
    AdapterList,
    AdapterObject,
    Deleted,
    LoadLoraBody,
    Refreshed,
    UnloadLoraBody,
    adapter_object,
    check_name,
    parse_register,
    parse_target,
    parse_unload,
)
from router.api.body import decode_body
from router.generation import RequestError, Secret
from router.http_body import read_json_body
from router.operator_routes import Endpoint
from router.registration import Registration
from router.routes_info import json_response
from router.service import Service

MAX_BODY_BYTES = 64 << 10


class AdapterRoutes:
    """Each method answers one route."""

    def __init__(self, service: Service) -> None:
        self._admin = service.admin
        self._service = service

    def by_one_process(self, endpoint: Endpoint) -> Endpoint:
        """A change is refused where other processes would not learn of it."""
        count = self._service.config.router_processes
        if count == 1:
            return endpoint

        async def answer(request: Request) -> Response:
            if request.method not in ("GET", "HEAD"):
                raise RequestError(
                    "conflict",
                    f"this router is {count} processes (--router-processes), of which one would "
                    "learn of this: write adapters into --adapters-file, which all of them follow",
                )
            return await endpoint(request)

        return answer

    async def collection(self, request: Request) -> Response:
        if request.method == "POST":
            return await self._register(request)
        registrations = self._admin.all()
        tiers = await self._admin.tiers(r.digest for r in registrations if r.digest)
        file = self._service.adapters_file
        problems = [] if file is None else file.problems
        return json_response(AdapterList([self._object(r, tiers) for r in registrations], problems))

    async def one(self, request: Request) -> Response:
        name = request.path_params["name"]
        if request.method == "DELETE":
            return json_response(Deleted((await self._admin.delete(name)).name))
        return await self._told(self._admin.get(name))

    async def load(self, request: Request) -> Response:
        return await self._told(await self._admin.load(request.path_params["name"]))

    async def pin(self, request: Request) -> Response:
        return await self._told(await self._admin.pin(request.path_params["name"]))

    async def unpin(self, request: Request) -> Response:
        return await self._told(await self._admin.unpin(request.path_params["name"]))

    async def unload(self, request: Request) -> Response:
        """200 when all is freed, 202 while requests still run."""
        wait_s = parse_unload(await read_json_body(request, MAX_BODY_BYTES))
        registration = await self._admin.unload(request.path_params["name"], wait_s)
        return await self._told(registration, 202 if registration.state == "unloading" else 200)

    async def refresh(self, request: Request) -> Response:
        old, registration = await self._admin.refresh(request.path_params["name"])
        shown = await self._shown(registration)
        new = registration.digest
        return json_response(Refreshed(old, new, old != new, shown))

    async def load_lora(self, request: Request) -> Response:
        body, _ = decode_body(await read_json_body(request, MAX_BODY_BYTES), LoadLoraBody)
        check_name(body.lora_name, "lora_name")
        request.state.target = body.lora_name
        source = self._service.config.default_source
        ref = parse_target(body.lora_path, "lora_path", source)
        wish = Wish(body.lora_name, ref, "api", replace=body.load_inplace)
        await self._admin.register(wish)
        await self._admin.load(body.lora_name)
        text = f"Success: LoRA adapter '{body.lora_name}' added successfully."
        return PlainTextResponse(text)

    async def unload_lora(self, request: Request) -> Response:
        body, _ = decode_body(await read_json_body(request, MAX_BODY_BYTES), UnloadLoraBody)
        request.state.target = body.lora_name
        await self._admin.unload(body.lora_name, DEFAULT_WAIT_S)
        await self._admin.delete(body.lora_name)
        text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
        return PlainTextResponse(text)

    async def _register(self, request: Request) -> Response:
        raw = await read_json_body(request, MAX_BODY_BYTES)
        body, ref = parse_register(raw, self._service.config.default_source)
        request.state.target = body.name
        token = None if body.token is None else Secret(body.token)
        wish = Wish(body.name, ref, "api", body.pin, token, body.replace)
        return await self._told(await self._admin.register(wish))

    async def _told(self, registration: Registration, status: int = 200) -> Response:
        return json_response(await self._shown(registration), status)

    async def _shown(self, registration: Registration) -> AdapterObject:
        tiers = await self._admin.tiers([registration.digest] if registration.digest else [])
        return self._object(registration, tiers)

    def _object(self, registration: Registration, tiers: Tiers) -> AdapterObject:
        use, digest = self._admin.use, registration.digest
        if digest is None:
            return adapter_object(registration, {}, use.running(registration.name))
        workers = {worker: told[digest] for worker, told in tiers.items() if digest in told}
        running, last = use.running(registration.name), use.last_used(digest)
        return adapter_object(registration, workers, running, last)
