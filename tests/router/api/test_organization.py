"""Usage and costs by day, in OpenAI's shapes."""

import pytest

from loraplex.router.api.admin.keys import (
    DAY_S,
    completions_bucket,
    cost_bucket,
    parse_buckets,
)
from loraplex.router.call import RequestError
from loraplex.router.tenancy.usage import MAX_DAYS, UsageRow

TODAY = 20_000
NOW = TODAY * DAY_S + 5.0
ROWS = [
    UsageRow("acme", "k1", "sql", 2, 0, 0, 10, 4, 6, cost=0.5),
    UsageRow("acme", "k2", "", 1, 0, 0, 5, 0, 1, cost=0.25),
    UsageRow("other", "k3", "sql", 4, 0, 0, 20, 0, 8, cost=1.0),
]


def at(day: int) -> str:
    return str((TODAY + day) * DAY_S)


def test_pages_of_days() -> None:
    query = parse_buckets("costs", [("start_time", at(-9)), ("limit", "7")], NOW)
    assert (list(query.days), query.next_page) == (list(range(TODAY - 9, TODAY - 2)), "19998")
    more = [("start_time", at(-9)), ("limit", "7"), ("page", "19998")]
    query = parse_buckets("costs", more, NOW)
    assert (list(query.days), query.next_page) == ([TODAY - 2, TODAY - 1, TODAY], None)
    one = parse_buckets("costs", [("start_time", at(-3)), ("end_time", at(-2))], NOW)
    assert list(one.days) == [TODAY - 3], "the end is not included"
    assert not parse_buckets("costs", [("start_time", at(3))], NOW).days
    old = parse_buckets("costs", [("start_time", "0"), ("limit", "31")], NOW)
    assert old.days.start == TODAY - MAX_DAYS + 1


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ([], "start_time"),
        ([("start_time", "soon")], "start_time"),
        ([("start_time", at(0)), ("start_time", at(0))], "start_time"),
        ([("start_time", at(0)), ("bucket_width", "1h")], "bucket_width"),
        ([("start_time", at(0)), ("limit", "32")], "limit"),
        ([("start_time", at(0)), ("page", "1")], "page"),
        ([("start_time", at(0)), ("group_by", "user_id")], "group_by"),
        ([("start_time", at(0)), ("group_by[]", "model")], "group_by"),
        ([("start_time", at(0)), ("user_ids", "x")], "user_ids"),
    ],
)
def test_refused_queries(query: list[tuple[str, str]], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_buckets("costs", query, NOW)
    assert caught.value.param == param


def test_costs_by_group_and_filter() -> None:
    start = ("start_time", at(0))
    whole = cost_bucket(TODAY, ROWS, parse_buckets("costs", [start], NOW), "EUR")
    (result,) = whole.results
    assert (result.amount.value, result.amount.currency, result.project_id) == (1.75, "eur", None)
    groups = [("group_by[]", "project_id"), ("group_by[]", "line_item")]
    by = cost_bucket(TODAY, ROWS, parse_buckets("costs", [start, *groups], NOW), "EUR")
    found = [(r.project_id, r.line_item, r.amount.value) for r in by.results]
    assert found == [("acme", "", 0.25), ("acme", "sql", 0.5), ("other", "sql", 1.0)]
    wanted = [start, ("project_ids", "acme"), ("project_ids", "none")]
    some = cost_bucket(TODAY, ROWS, parse_buckets("costs", wanted, NOW), "EUR")
    assert [r.amount.value for r in some.results] == [0.75]


def test_completions_by_model() -> None:
    query = [("start_time", at(0)), ("group_by", "model"), ("api_key_ids", "k1")]
    bucket = completions_bucket(TODAY, ROWS, parse_buckets("completions", query, NOW))
    (one,) = bucket.results
    assert (one.model, one.input_tokens, one.input_cached_tokens) == ("sql", 10, 4)
    assert (one.output_tokens, one.num_model_requests, one.api_key_id) == (6, 2, None)
