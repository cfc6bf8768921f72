"""Usage and costs in OpenAI's shapes: buckets of a day, their sums by group. Pure.

A project is a tenant, a model an adapter's name, as `/v1/usage` has it ("" is the base).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec

from loraplex.router.api.request.body import check_query, require, whole_number
from loraplex.router.tenancy.usage import MAX_DAYS, UsageRow

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


QUERY = ("start_time", "end_time", "bucket_width", "limit", "page", *_LISTS)


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
