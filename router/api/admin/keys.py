"""Bodies and answers of `/v1/keys`, `/v1/usage` and `/v1/audit`, and usage and costs in OpenAI's
shapes: buckets of a day, their sums by group. Pure.

To OpenAI a project is a tenant, a model an adapter's name, as `/v1/usage` has it ("" is the base).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loraplex.router.api.request.body import check_query, decode_body, require, whole_number
from loraplex.router.call import RequestError
from loraplex.router.policy.quota import Limits
from loraplex.router.tenancy.keys import (
    DEFAULT_TENANT,
    MAX_MODELS,
    ApiKey,
    KeyOrigin,
    Label,
    ModelPattern,
    Priority,
    Right,
    Word,
)
from loraplex.router.tenancy.records import AuditRecord
from loraplex.router.tenancy.usage import MAX_DAYS, UsageRecord, UsageRow

MAX_GRACE_S = 7 * 86400
MAX_LISTED = 1000

Seconds = Annotated[int, Meta(ge=1, le=2**33)]

DAY_S = 86400
_DEFAULT_BUCKETS, MOST_BUCKETS = 7, 31
NEWEST_S = 1 << 33  # since 1970, the latest that a time may say

# Rows are grouped and chosen by these, by OpenAI's names.
_FIELDS: dict[str, Callable[[UsageRow], str]] = {
    "project_id": lambda row: row.tenant,
    "api_key_id": lambda row: row.key,
    "model": lambda row: row.adapter,
}
_FILTERS = {"project_ids": "project_id", "api_key_ids": "api_key_id", "models": "model"}
_GROUPS = {"costs": {"line_item": "model"}, "completions": {"model": "model"}}
_LISTS = ("group_by", *_FILTERS)

Route = Literal["costs", "completions"]
R = TypeVar("R")

QUERY = ("start_time", "end_time", "bucket_width", "limit", "page", *_LISTS)


class CreateKeyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a request for a new key. id: made up if absent. expires_at: Unix seconds. models:
    patterns of names; absent = all. rights: what it opens beside answers.
    """

    id: Word | None = None
    tenant: Word = DEFAULT_TENANT
    label: Label = ""
    models: list[ModelPattern] | None = None
    limits: Limits = Limits()
    expires_at: Seconds | None = None
    priority: Priority | None = None
    rights: list[Right] = []


class ChangeKeyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a request to change a key. Absent fields stay. expires_at: null = never. priority:
    null = the tenant's.
    """

    label: Label | UnsetType = UNSET
    models: list[ModelPattern] | UnsetType = UNSET
    limits: Limits | UnsetType = UNSET
    expires_at: Seconds | None | UnsetType = UNSET
    priority: Priority | None | UnsetType = UNSET
    rights: list[Right] | UnsetType = UNSET


class RotateKeyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a request to replace a key by a new one. grace_s: how long the old key is
    good still.
    """

    grace_s: Annotated[int, Meta(ge=0, le=MAX_GRACE_S)] = 0


class KeyObject(msgspec.Struct, frozen=True):
    """A key without the key itself; times are Unix seconds."""

    id: str
    tenant: str
    label: str
    models: list[str]
    limits: Limits
    expires_at: int | None
    blocked: bool
    created_at: int
    origin: KeyOrigin
    priority: Priority | None
    rights: list[Right]
    object: Literal["key"] = "key"


class NewKeyObject(msgspec.Struct, frozen=True):
    """Answer that shows a new key. key: it is shown this once and kept nowhere. hints: what its
    maker may not expect.
    """

    key: str
    data: KeyObject
    object: Literal["new_key"] = "new_key"
    hints: tuple[str, ...] = ()


class KeyList(msgspec.Struct, frozen=True):
    data: list[KeyObject]
    object: Literal["list"] = "list"


class DeletedKey(msgspec.Struct, frozen=True):
    id: str
    deleted: Literal[True] = True
    object: Literal["key"] = "key"


class UsageList(msgspec.Struct, frozen=True):
    """Answer that lists the usage of some days. start, end: the days, both included, as YYYY-MM-DD
    in UTC. currency: of costs; null = nothing has a price.
    """

    start: str
    end: str
    data: list[UsageRow]
    currency: str | None = None
    object: Literal["list"] = "list"


class RecordList(msgspec.Struct, frozen=True):
    """Answer that lists requests, the newest first."""

    data: list[UsageRecord]
    object: Literal["list"] = "list"


class AuditList(msgspec.Struct, frozen=True):
    """Answer that lists operators' actions, the newest first."""

    data: list[AuditRecord]
    object: Literal["list"] = "list"


def parse_create(body: bytes, made_up: str, now: float) -> ApiKey:
    """Reads a request for a key, still without digest. now: Unix seconds. Raises RequestError."""
    wanted, _ = decode_body(body or b"{}", CreateKeyBody)
    is_over = wanted.expires_at is not None and wanted.expires_at <= now
    require(not is_over, "lies in the past: the key would never be good", "expires_at")
    return ApiKey(
        id=wanted.id or made_up,
        tenant=wanted.tenant,
        digest="",
        label=wanted.label,
        models=_models(wanted.models),
        limits=wanted.limits,
        expires_at=wanted.expires_at,
        priority=wanted.priority,
        rights=tuple(wanted.rights),
    )


def parse_change(body: bytes) -> dict[str, object]:
    """Fields of ApiKey. Raises RequestError."""
    wanted, _ = decode_body(body, ChangeKeyBody)
    changes = {name: getattr(wanted, name) for name in ChangeKeyBody.__struct_fields__}
    changes = {name: value for name, value in changes.items() if value is not UNSET}
    if "models" in changes:
        changes["models"] = _models(changes["models"])
    if "rights" in changes:
        changes["rights"] = tuple(wanted.rights or ())
    return changes


def parse_rotate(body: bytes) -> int:
    """Seconds of grace. Raises RequestError."""
    return decode_body(body, RotateKeyBody)[0].grace_s if body else 0


def parse_days(query: Mapping[str, str], today: int) -> tuple[int, int]:
    """Reads from the query the first and last day since 1970-01-01, both included; today if absent.
    Raises RequestError.
    """
    last = _day(query, "end", today)
    first = _day(query, "start", last)
    require(first <= last, "lies after `end`", "start")
    require(last - first < MAX_DAYS, f"expected at most {MAX_DAYS} days", "start")
    return first, last


def parse_count(query: Mapping[str, str], name: str = "limit", default: int = 100) -> int:
    """Reads from the query how many items to list. Raises RequestError."""
    return whole_number(query.get(name, str(default)), 1, MAX_LISTED, name)


def key_object(key: ApiKey) -> KeyObject:
    return msgspec.convert(key, KeyObject, from_attributes=True)


def _models(models: list[str] | None) -> tuple[str, ...]:
    if models is None:
        return ("*",)
    require(len(models) <= MAX_MODELS, f"expected at most {MAX_MODELS} patterns", "models")
    return tuple(models)


def _day(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    try:
        return int(msgspec.convert(f"{text}T00:00:00Z", datetime).timestamp() // 86400)
    except (msgspec.ValidationError, ValueError, OverflowError):
        message = f"`{name}`: expected YYYY-MM-DD, got {text[:40]!r}"
        raise RequestError("invalid", message, param=name) from None


class Amount(msgspec.Struct, frozen=True):
    value: float
    currency: str


class CostResult(msgspec.Struct, frozen=True):
    """Costs of one group; null = of all. line_item: an adapter."""

    amount: Amount
    line_item: str | None = None
    project_id: str | None = None
    api_key_id: str | None = None
    object: Literal["organization.costs.result"] = "organization.costs.result"


class CompletionsResult(msgspec.Struct, frozen=True):
    """Usage of one group; null = of all. batch, user_id, service_tier: always null."""

    input_tokens: int
    output_tokens: int
    input_cached_tokens: int
    num_model_requests: int
    project_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    input_audio_tokens: Literal[0] = 0
    output_audio_tokens: Literal[0] = 0
    user_id: None = None
    batch: None = None
    service_tier: None = None
    object: Literal["organization.usage.completions.result"] = (
        "organization.usage.completions.result"
    )


class CostBucket(msgspec.Struct, frozen=True):
    """Costs of a day. Times are Unix seconds."""

    start_time: int
    end_time: int
    results: list[CostResult]
    object: Literal["bucket"] = "bucket"


class CompletionsBucket(msgspec.Struct, frozen=True):
    """Usage of a day. Times are Unix seconds."""

    start_time: int
    end_time: int
    results: list[CompletionsResult]
    object: Literal["bucket"] = "bucket"


class CostPage(msgspec.Struct, frozen=True):
    """Some days' costs. next_page: for the query `page`."""

    data: list[CostBucket]
    has_more: bool
    next_page: str | None
    object: Literal["page"] = "page"


class CompletionsPage(msgspec.Struct, frozen=True):
    """Some days' usage. next_page: for the query `page`."""

    data: list[CompletionsBucket]
    has_more: bool
    next_page: str | None
    object: Literal["page"] = "page"


class BucketQuery(msgspec.Struct, frozen=True):
    """Days since 1970-01-01 that are asked for: `first`, and those before `end`. groups: OpenAI's
    names of groups, with ours. wanted: by our names; none = all.
    """

    first: int
    end: int
    limit: int
    groups: dict[str, str]
    wanted: dict[str, frozenset[str]]

    @property
    def days(self) -> range:
        return range(self.first, min(self.end, self.first + self.limit))

    @property
    def next_page(self) -> str | None:
        return str(self.days.stop) if self.days.stop < self.end else None


def parse_buckets(route: Route, query: Sequence[tuple[str, str]], now: float) -> BucketQuery:
    """Reads a query; lists come as `group_by=a&group_by=b` or with `[]`. now: Unix seconds. Raises
    RequestError.
    """
    pairs = [(name.removesuffix("[]"), value) for name, value in query]
    check_query((pair for pair in pairs if pair[0] not in _LISTS), QUERY)
    said: dict[str, list[str]] = {}
    for name, value in pairs:
        said.setdefault(name, []).append(value)
    require("start_time" in said, "is needed, in Unix seconds", "start_time")
    require(said.get("bucket_width", ["1d"]) == ["1d"], "only 1d is kept", "bucket_width")
    last = int(now) // DAY_S
    first = _whole(said, "start_time", 0, 0, NEWEST_S) // DAY_S
    end = -(-_whole(said, "end_time", int(now), 0, NEWEST_S) // DAY_S)
    first = min(max(first, last - MAX_DAYS + 1), last + 1)  # what is older is not kept
    first = _whole(said, "page", first, first, last + 1)
    limit = _whole(said, "limit", _DEFAULT_BUCKETS, 1, MOST_BUCKETS)
    known = {"project_id": "project_id", "api_key_id": "api_key_id", **_GROUPS[route]}
    for name in said.get("group_by", ()):
        require(name in known, f"expected some of {', '.join(known)}", "group_by")
    groups = {name: known[name] for name in said.get("group_by", ())}
    wanted = {ours: frozenset(said[name]) for name, ours in _FILTERS.items() if name in said}
    return BucketQuery(first, min(end, last + 1), limit, groups, wanted)


def cost_bucket(
    day: int, rows: Iterable[UsageRow], query: BucketQuery, currency: str
) -> CostBucket:
    def result(found: Sequence[UsageRow], groups: Mapping[str, str]) -> CostResult:
        made = CostResult(Amount(sum(row.cost for row in found), currency.lower()))
        return msgspec.structs.replace(made, **groups)

    return CostBucket(day * DAY_S, (day + 1) * DAY_S, _grouped(rows, query, result))


def completions_bucket(day: int, rows: Iterable[UsageRow], query: BucketQuery) -> CompletionsBucket:
    def result(found: Sequence[UsageRow], groups: Mapping[str, str]) -> CompletionsResult:
        made = CompletionsResult(
            input_tokens=sum(row.prompt_tokens for row in found),
            output_tokens=sum(row.completion_tokens for row in found),
            input_cached_tokens=sum(row.cached_tokens for row in found),
            num_model_requests=sum(row.requests for row in found),
        )
        return msgspec.structs.replace(made, **groups)

    return CompletionsBucket(day * DAY_S, (day + 1) * DAY_S, _grouped(rows, query, result))


def _grouped(
    rows: Iterable[UsageRow],
    query: BucketQuery,
    result: Callable[[Sequence[UsageRow], Mapping[str, str]], R],
) -> list[R]:
    """Results of each group that has rows, in order."""
    groups: dict[tuple[str, ...], list[UsageRow]] = {}
    for row in rows:
        if all(_FIELDS[ours](row) in values for ours, values in query.wanted.items()):
            place = tuple(_FIELDS[ours](row) for ours in query.groups.values())
            groups.setdefault(place, []).append(row)
    return [
        result(groups[place], dict(zip(query.groups, place, strict=True)))
        for place in sorted(groups)
    ]


def _whole(said: Mapping[str, list[str]], name: str, default: int, least: int, most: int) -> int:
    return default if name not in said else whole_number(said[name][0], least, most, name)
