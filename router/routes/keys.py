"""Routes of keys, of what they used, and of what operators did."""

import secrets
import time

from starlette.requests import Request
from starlette.responses import Response

from loraplex.router.api.admin.adapters import parse_tenant
from loraplex.router.api.admin.keys import (
    AuditList,
    BucketQuery,
    CompletionsPage,
    CostPage,
    DeletedKey,
    KeyList,
    NewKeyObject,
    RecordList,
    UsageList,
    completions_bucket,
    cost_bucket,
    key_object,
    parse_buckets,
    parse_change,
    parse_count,
    parse_create,
    parse_days,
    parse_rotate,
)
from loraplex.router.api.request.body import check_query
from loraplex.router.call import RequestError
from loraplex.router.http.body import BodyLimits, read_json_body
from loraplex.router.routes.info import json_response
from loraplex.router.routes.operator import OperatorRoutes
from loraplex.router.service import Service
from loraplex.router.tenancy.keyring import Keyring
from loraplex.router.tenancy.keys import ApiKey
from loraplex.router.tenancy.usage import MAX_DAYS, UsageRow

_NOBODY_ASKS = "this router asks nobody for a key: start it with --auth keys"
_ENDS = "the key is gone when this router ends: --redis or --keys-file keep keys"


class KeyRoutes:
    """Each method answers one route; all want the admin key."""

    def __init__(self, service: Service, body_limits: BodyLimits) -> None:
        self._tenancy = service.tenancy
        self._keys: Keyring = service.tenancy.keyring
        self._body_limits = body_limits

    async def collection(self, request: Request) -> Response:
        if request.method != "POST":
            return json_response(KeyList([key_object(key) for key in self._keys.all()]))
        body = await read_json_body(request, self._body_limits)
        wanted = parse_create(body, f"key-{secrets.token_hex(6)}", time.time())
        _note_for_audit(request, wanted)
        made, key = await self._keys.create(wanted)
        hints = {_NOBODY_ASKS: not self._tenancy.needs_keys, _ENDS: not self._keys.is_shared}
        holding = tuple(hint for hint, holds in hints.items() if holds)
        return json_response(NewKeyObject(key, key_object(made), hints=holding), 201)

    async def one(self, request: Request) -> Response:
        key_id = request.path_params["id"]
        key = self._keys.get(key_id)
        _note_for_audit(request, key)
        if request.method == "DELETE":
            await self._keys.delete(key_id)
            return json_response(DeletedKey(key_id))
        if request.method == "PATCH":
            changes = parse_change(await read_json_body(request, self._body_limits))
            key = await self._keys.change(key_id, changes)
        return json_response(key_object(key))

    async def rotate(self, request: Request) -> Response:
        grace_s = parse_rotate(await read_json_body(request, self._body_limits))
        made, key = await self._keys.rotate(request.path_params["id"], grace_s)
        _note_for_audit(request, made)
        return json_response(NewKeyObject(key, key_object(made)))

    async def block(self, request: Request) -> Response:
        return await self._set_blocked(request, True)

    async def unblock(self, request: Request) -> Response:
        return await self._set_blocked(request, False)

    async def _set_blocked(self, request: Request, blocked: bool) -> Response:
        key = await self._keys.change(request.path_params["id"], {"blocked": blocked})
        _note_for_audit(request, key)
        return json_response(key_object(key))


class UsageRoutes:
    """Answers usage: a tenant's own with any of its keys, all with the admin key."""

    def __init__(self, service: Service, operator: OperatorRoutes) -> None:
        self._tenancy = service.tenancy
        self._operator = operator

    async def usage(self, request: Request) -> Response:
        """Answers the usage of some days. Query: start, end (days), tenant, key, adapter."""
        query = request.query_params
        check_query(query.multi_items(), ("start", "end", "tenant", "key", "adapter"))
        first, last = parse_days(query, int(time.time() // 86400))
        tenants = await self._tenants(await self._whose(request), first, last)
        rows = await self._tenancy.metering.usage(tenants, first, last)
        rows = [
            row
            for row in rows
            if query.get("key") in (None, row.key) and query.get("adapter") in (None, row.adapter)
        ]
        prices = self._tenancy.metering.prices
        currency = None if prices is None else prices.currency
        return json_response(UsageList(_date(first), _date(last), rows, currency))

    async def costs(self, request: Request) -> Response:
        """Answers costs by day, as OpenAI's route does."""
        query = parse_buckets("costs", request.query_params.multi_items(), time.time())
        whose, prices = await self._whose(request), self._tenancy.metering.prices
        if prices is None:
            raise RequestError("not_served", "nothing has a price here: start it with --prices")
        days = await self._days(whose, query)
        data = [cost_bucket(day, rows, query, prices.currency) for day, rows in days]
        return json_response(CostPage(data, query.next_page is not None, query.next_page))

    async def completions(self, request: Request) -> Response:
        """Answers usage by day, as OpenAI's route does."""
        query = parse_buckets("completions", request.query_params.multi_items(), time.time())
        days = await self._days(await self._whose(request), query)
        data = [completions_bucket(day, rows, query) for day, rows in days]
        return json_response(CompletionsPage(data, query.next_page is not None, query.next_page))

    async def _days(
        self, whose: str | None, query: BucketQuery
    ) -> list[tuple[int, list[UsageRow]]]:
        """Rows of each day that a caller asks for. whose: see `_whose`. Raises StoreDown."""
        tenants = await self._tenants(whose, query.days.start, query.days.stop - 1)
        metering = self._tenancy.metering
        return [(day, await metering.usage(tenants, day, day)) for day in query.days]

    async def requests(self, request: Request) -> Response:
        """Lists the latest requests, each. Query: limit, tenant."""
        check_query(request.query_params.multi_items(), ("limit", "tenant"))
        count = parse_count(request.query_params)
        today = int(time.time() // 86400)
        tenants = await self._tenants(await self._whose(request), today - MAX_DAYS, today)
        records = await self._tenancy.metering.latest(tenants, count)
        return json_response(RecordList(records))

    async def audit(self, request: Request) -> Response:
        """Lists the latest actions of operators. Query: limit. It wants the admin key."""
        count = parse_count(request.query_params)
        return json_response(AuditList(await self._tenancy.audit.newest(count)))

    async def _whose(self, request: Request) -> str | None:
        """The tenant whose use is shown to the caller; None = all tenants. Raises RequestError."""
        asked = parse_tenant(request.query_params)
        try:
            self._operator.check(request)
            return asked
        except RequestError as refusal:
            if not self._tenancy.needs_keys:
                raise
            try:
                caller = await self._tenancy.identify(request.headers.get("authorization"))
            except RequestError as error:
                raise (refusal if error.cause == "unauthorized" else error) from None
        if asked not in (None, caller.tenant):
            raise RequestError("forbidden", "a key shows its own tenant only", param="tenant")
        return caller.tenant

    async def _tenants(self, whose: str | None, first: int, last: int) -> list[str]:
        """Tenants with use to show in these days. whose: see `_whose`. Raises StoreDown."""
        if whose is not None:
            return [whose]
        used = await self._tenancy.metering.tenants(first, last)
        return sorted({"", *self._tenancy.keyring.tenants(), *used})


def _note_for_audit(request: Request, key: ApiKey) -> None:
    request.state.target, request.state.tenant = key.id, key.tenant


def _date(day: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(day * 86400))
