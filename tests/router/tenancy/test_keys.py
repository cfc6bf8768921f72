"""Keys, what they open, how they are written in a file, and callers' errors."""

import msgspec
import pytest

from loraplex.adapters.ref import parse_ref
from loraplex.router.call import AdapterChoice, RequestError
from loraplex.router.policy.quota import UNIT, Limits, Standing, Subject, Verdict
from loraplex.router.tenancy.keys import (
    NOBODY,
    ApiKey,
    Caller,
    KeysFileError,
    Tenant,
    check_key,
    check_scope,
    names_of,
    read_keys,
)
from loraplex.router.tenancy.rate_headers import duration, rate_headers
from loraplex.router.tenancy.usage import OTHER, Pending, UsageRecord, rows_of

DIGEST, OLD = "a" * 64, "b" * 64


def choice(text: str) -> AdapterChoice:
    return AdapterChoice(text, parse_ref(text))


def caller(*models: str) -> Caller:
    return Caller(ApiKey("k", "acme", DIGEST, models=models))


@pytest.mark.parametrize(
    ("key", "digest", "why"),
    [
        (None, DIGEST, "no such key"),
        (ApiKey("k", "t", DIGEST, blocked=True), DIGEST, "blocked"),
        (ApiKey("k", "t", DIGEST, expires_at=1000), DIGEST, "expired"),
        (ApiKey("k", "t", DIGEST, previous=OLD, previous_until=1000), OLD, "replaced"),
    ],
)
def test_keys_that_are_not_good(key: ApiKey | None, digest: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as refused:
        check_key(key, digest, 1000)
    assert refused.value.cause == "unauthorized"


def test_keys_that_are_still_good() -> None:
    key = ApiKey("k", "t", DIGEST, expires_at=1000, previous=OLD, previous_until=1000)
    assert check_key(key, DIGEST, 999.9) is key
    assert check_key(key, OLD, 999.9) is key


@pytest.mark.parametrize(
    ("patterns", "text", "opens"),
    [
        (["*"], "anything", True),
        ([], "sql", False),
        (["sql"], "sql", True),
        (["sql"], "sql2", False),
        (["SQL"], "sql", False),
        (["sql-*"], "sql-v2", True),
        (["hub:acme/*"], "acme/lora", True),
        (["hub:acme/*"], "hub:acme/lora@main", True),
        (["hub:acme/lora"], "hub:acme/lora@main", True),
        (["hub:acme/lora@main"], "hub:acme/lora@other", False),
        (["hub:acme/*"], "hub:other/lora", False),
        (["acme/*"], "acme/lora", False),
        (["*"], "local:/srv/adapters/x", True),
        (["local:/srv/acme/*"], "local:/srv/other/x", False),
    ],
)
def test_patterns_open_names(patterns: list[str], text: str, opens: bool) -> None:
    assert caller(*patterns).may_use(names_of(choice(text), lambda _: None)) is opens
    assert NOBODY.may_use(names_of(choice(text), lambda _: None))


def test_a_registered_adapter_is_opened_by_its_name_alone() -> None:
    def registered(choice: AdapterChoice) -> str | None:
        return "sql"

    one = choice("sql")
    check_scope(caller("sql"), one, (), registered, "model")
    with pytest.raises(RequestError, match="does not open 'sql'") as refused:
        check_scope(caller("hub:acme/*"), one, (), registered, "model")
    assert (refused.value.cause, refused.value.param) == ("forbidden", "model")


def test_the_base_is_opened_by_one_of_its_names() -> None:
    check_scope(caller("org/llama"), None, ("llama", "org/llama"), lambda _: None, "model")
    with pytest.raises(RequestError, match="base model"):
        check_scope(caller("sql"), None, ("llama", "org/llama"), lambda _: None, "model")


FILE = f"""
tenants: [{{name: acme, limits: {{tokens_per_minute: 1000}}, weight: 2.5, priority: low}}]
keys:
  - id: app
    tenant: acme
    sha256: {DIGEST}
    models: [sql, "hub:acme/*"]
    limits: {{requests_per_minute: 10}}
    priority: high
    expires_at: 2030-01-01T00:00:00Z
  - {{id: other, sha256: "{OLD}"}}
"""


def test_a_file_is_read() -> None:
    keys, tenants = read_keys(FILE.encode())
    assert tenants == [Tenant("acme", Limits(tokens_per_minute=1000), 2.5, "low")]
    assert keys[0] == ApiKey(
        *("app", "acme", DIGEST),
        models=("sql", "hub:acme/*"),
        limits=Limits(requests_per_minute=10),
        priority="high",
        expires_at=1893456000,
        origin="file",
    )
    assert (keys[1].tenant, keys[1].models) == ("default", ("*",))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("app", "ap p"), "of the form"),
        (("id: other", "id: app"), "a id is there twice"),
        ((OLD, DIGEST), "a sha256 is there twice"),
        (("requests_per_minute", "request_per_minute"), "request_per_minute"),
        (("requests_per_minute: 10", "requests_per_minute: 0"), ">= 1"),
        (("00:00:00Z", "00:00:00"), "time zone"),
        (("weight: 2.5", "weight: 0"), ">= 0.01"),
        (("keys:", "key:"), "`key`: unknown field; known: keys, tenants"),
        (
            ("priority: high", "priority: top"),
            "`keys.0..priority`: expected one of high, low, normal; got 'top'",
        ),
        ((DIGEST, "lpx_the-key-itself"), "`keys.0..sha256`: expected `str` of the form"),
    ],
)
def test_a_file_with_a_fault_is_refused_whole(change: tuple[str, str], why: str) -> None:
    with pytest.raises(KeysFileError, match=why):
        read_keys(FILE.replace(*change).encode())


def test_headers_are_of_the_subject_with_the_least_left() -> None:
    subjects = (
        Subject("key:k", Limits(requests_per_minute=60, tokens_per_minute=600)),
        Subject("tenant:t", Limits(requests_per_minute=100)),
    )
    standings = (
        Standing(59 * UNIT, -5 * UNIT, 0, 0, 1),
        Standing(10 * UNIT + 7, 0, 0, 0, 1),
    )
    assert rate_headers(subjects, Verdict(0, standings)) == {
        "x-ratelimit-limit-requests": "100",
        "x-ratelimit-remaining-requests": "10",
        "x-ratelimit-reset-requests": "54s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m0.5s",
    }


def test_durations_read_as_openais() -> None:
    told = [duration(ms) for ms in (0, 20, 1000, 1500, 90_000, 3_661_001)]
    assert told == ["0s", "20ms", "1s", "1.5s", "1m30s", "1h1m1.001s"]


def record(adapter: str, tokens: int, day: int = 1) -> UsageRecord:
    return UsageRecord(day * 86400.0, "r", "acme", "k", adapter, None, "ok", tokens, 0, 2, 0.1)


def test_usage_adds_up_over_days_and_survives_what_could_not_be_written() -> None:
    pending = Pending()
    for one in (record("sql", 5), record("sql", 7), record("", 1), record("sql", 3, day=2)):
        pending.add(one)
    books = {}
    while (taken := pending.take()) is not None:
        books[taken[0]] = taken[1]
    assert sorted(books) == ["usage:1:acme", "usage:2:acme"]
    rows = rows_of("acme", books.values())
    assert [(row.adapter, row.requests, row.prompt_tokens) for row in rows] == [
        ("", 1, 1),
        ("sql", 3, 15),
    ]
    pending.give_back("usage:1:acme", books["usage:1:acme"])
    pending.add(record("sql", 1))
    assert pending.take() == (
        "usage:1:acme",
        books["usage:1:acme"]
        | {"k|sql|prompt_tokens": 13, "k|sql|requests": 3, "k|sql|completion_tokens": 6},
    )


def test_small_costs_add_up() -> None:
    """Each is less than half of what a counter counts in."""
    pending, costs = Pending(), [4e-7, 1e-7] * 500
    books = []
    for number, cost in enumerate(costs):
        pending.add(msgspec.structs.replace(record("sql", 5), cost=cost, device_s=cost / 2))
        if number % 100 == 99:  # as they are written
            taken = pending.take()
            assert taken is not None
            books.append(taken[1])
    (row,) = rows_of("acme", books)
    assert row.cost == pytest.approx(sum(costs), abs=1e-6)
    assert row.device_s == pytest.approx(sum(costs) / 2, abs=1e-6)


def test_usage_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.router.tenancy.usage.MAX_PENDING", 6)
    pending = Pending()
    for number in range(10):
        pending.add(record(f"a{number}", 5))
    taken = pending.take()
    assert taken is not None
    rows = {row.adapter: row for row in rows_of("acme", [taken[1]])}
    assert sorted(rows) == [OTHER, "a0", "a1"]
    assert sum(row.requests for row in rows.values()) == 10
