"""Shared by the operator's routes: the admin key before anything, an audit record afterwards."""

from collections.abc import Awaitable, Callable, Collection

from starlette.requests import Request
from starlette.responses import Response

from loraplex.adapters.errors import AdapterError
from loraplex.router.api.errors import dialect_of_path, from_adapter_error, status_of
from loraplex.router.api.request.body import check_no_fields, check_query
from loraplex.router.call import RequestError
from loraplex.router.http.body import BodyLimits, read_json_body
from loraplex.router.routes.admin_gate import AdminGate
from loraplex.router.service import Service
from loraplex.router.tenancy.audit import Audit, now
from loraplex.router.tenancy.records import AuditRecord

MAX_BODY_BYTES = 64 << 10
# They change nothing (RFC 9110 section 9.2.1); what has one of them has both.
_SAFE = ("GET", "HEAD")

Endpoint = Callable[[Request], Awaitable[Response]]


def who(request: Request) -> str:
    """Who asks, as far as is known, for people."""
    return "api" if request.client is None else f"api {request.client.host}"


class OperatorRoutes:
    """`guarded` wraps each of them. An endpoint may set `request.state.target` and `.tenant`."""

    def __init__(self, service: Service) -> None:
        self._audit: Audit = service.tenancy.audit
        self._gate = AdminGate(service.config)
        self.body_limits = BodyLimits(MAX_BODY_BYTES, service.config.body_timeout_s)

    def check(self, request: Request) -> None:
        """Raises RequestError (unauthorized, forbidden)."""
        headers = request.headers
        self._gate.check(headers.get("authorization"), headers.get("origin"), headers.get("host"))

    def guarded(self, endpoint: Endpoint, *bodies: str, query: Collection[str] = ()) -> Endpoint:
        """bodies: methods whose body it reads. query: the parameters that it knows."""

        async def answer(request: Request) -> Response:
            status, dialect = 500, dialect_of_path(request.scope["path"])
            try:
                self.check(request)
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
