"""Shared by the operator's routes: the admin key before anything, an audit record afterwards."""

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Collection, Mapping

from starlette.requests import Request
from starlette.responses import Response

from loraplex.adapters.common.loopback import is_loopback
from loraplex.adapters.errors import AdapterError
from loraplex.router.api.errors import dialect_of_path, from_adapter_error, status_of
from loraplex.router.api.request.body import check_no_fields, check_query
from loraplex.router.call import RequestError
from loraplex.router.config import RouterConfig
from loraplex.router.http.body import BodyLimits, read_json_body
from loraplex.router.service import Service
from loraplex.router.tenancy.audit import Audit, now
from loraplex.router.tenancy.keys import Right
from loraplex.router.tenancy.records import AuditRecord

API_KEY_HEADER = "x-api-key"
MAX_BODY_BYTES = 64 << 10
# They change nothing (RFC 9110 section 9.2.1); what has one of them has both.
_SAFE = ("GET", "HEAD")

Endpoint = Callable[[Request], Awaitable[Response]]


class AdminGate:
    """Guards the operator's routes: `check` is asked with the headers of each request."""

    def __init__(self, config: RouterConfig) -> None:
        self._key = _digest(config.admin_key) if config.admin_key else None
        self._is_local = is_loopback(config.host)

    def check(self, headers: Mapping[str, str]) -> None:
        """Checks that a request may use the operator's routes. headers: in lower case. Raises
        RequestError: unauthorized (401), forbidden (403).
        """
        if self._key is None:
            self._check_open(headers.get("origin"), headers.get("host"))
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(_digest(given.strip()), self._key)
        if scheme.lower() != "bearer" or not given.strip():
            message = "this route wants the admin key, as `Authorization: Bearer KEY`: none came"
            raise RequestError("unauthorized", message)
        if not is_right:
            raise RequestError("unauthorized", "the key is wrong: this route wants the admin key")

    def opens(self, headers: Mapping[str, str]) -> bool:
        """Checks whether `check` lets this request in."""
        try:
            self.check(headers)
        except RequestError:
            return False
        return True

    def _check_open(self, origin: str | None, host: str | None) -> None:
        if not self._is_local:
            raise RequestError(
                "forbidden",
                "this route is closed, as the router has no admin key: start it with "
                "--admin-key-file or LORAPLEX_ADMIN_KEY",
            )
        # A page in a browser of this machine is not its operator.
        if origin is not None:
            raise RequestError(
                "forbidden",
                "requests from web pages need an admin key: start the router with "
                "--admin-key-file or LORAPLEX_ADMIN_KEY",
            )
        # A page whose own name now resolves to this machine sends no origin with a GET. A proxy
        # that gives the router a public name sends none at all.
        if host is not None and not is_loopback(_name_of(host)):
            raise RequestError(
                "forbidden",
                "requests for other hosts than this machine's loopback addresses need an admin "
                "key: start the router with --admin-key-file or LORAPLEX_ADMIN_KEY",
            )


def _name_of(host: str) -> str:
    """Returns the header without its port: `localhost:8080`, `127.0.0.1`, `[::1]:8080`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _digest(key: str) -> bytes:
    """Keys of any length compare in the same time."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def who(request: Request) -> str:
    """Names the caller, as far as is known, for people."""
    return "api" if request.client is None else f"api {request.client.host}"


class OperatorRoutes:
    """`guarded` wraps each of them. An endpoint may set `request.state.target` and `.tenant`."""

    def __init__(self, service: Service) -> None:
        self._tenancy = service.tenancy
        self._audit: Audit = service.tenancy.audit
        self._gate = AdminGate(service.config)
        self.body_limits = BodyLimits(MAX_BODY_BYTES, service.config.body_timeout_s)

    def check(self, request: Request) -> None:
        """Checks who asks for the route. Raises RequestError (unauthorized, forbidden)."""
        self._gate.check(request.headers)

    async def _admit(self, request: Request, right: Right | None) -> None:
        """Checks that a request comes from the operator, or from a key with the right. A key's
        request is noted in `request.state.caller`. Raises RequestError.
        """
        try:
            self.check(request)
        except RequestError:
            if right is None:
                raise
            caller = await self._tenancy.identify(request.headers.get("authorization"))
            if caller.key is None or right not in caller.key.rights:
                raise
            request.state.caller = caller

    def guarded(
        self,
        endpoint: Endpoint,
        *bodies: str,
        query: Collection[str] = (),
        right: Right | None = None,
    ) -> Endpoint:
        """Makes an endpoint that checks its caller, and records each change. bodies: methods whose
        body it reads. query: the parameters that it knows. right: keys that have it may call, too.
        """

        async def answer(request: Request) -> Response:
            status, dialect = 500, dialect_of_path(request.scope["path"])
            try:
                await self._admit(request, right)
                check_query(request.query_params.multi_items(), query)
                if request.method not in (*bodies, *_SAFE):
                    check_no_fields(await read_json_body(request, self.body_limits), query)
                response = await endpoint(request)
                status = response.status_code
                return response
            except AdapterError as error:
                failure = from_adapter_error(error)
                status = status_of(failure.cause, dialect)
                raise failure from error
            except RequestError as error:
                status = status_of(error.cause, dialect)
                raise
            finally:
                if request.method not in _SAFE:
                    self._record(request, status)

        return answer

    def _record(self, request: Request, status: int) -> None:
        target = getattr(request.state, "target", "") or next(
            iter(request.path_params.values()), ""
        )
        record = AuditRecord(
            at=now(),
            action=f"{request.method} {request.scope['path'][:300]}",
            target=str(target)[:300],
            tenant=getattr(request.state, "tenant", ""),
            status=status,
            remote=request.client.host if request.client else "",
            request_id=request.state.request_id,
        )
        self._audit.record(record)


def with_api_key(endpoint: Endpoint) -> Endpoint:
    """Lets a route take a key as `x-api-key`, too; `Authorization` comes first."""

    async def answer(request: Request) -> Response:
        key = request.headers.get(API_KEY_HEADER)
        if key is None or "authorization" in request.headers:
            return await endpoint(request)
        header = (b"authorization", f"Bearer {key}".encode("latin-1"))
        scope = {**request.scope, "headers": [*request.scope["headers"], header]}
        return await endpoint(Request(scope, request.receive))

    return answer
