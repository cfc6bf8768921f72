"""What quotas let in, whatever is asked in whatever order."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from loraplex.router.policy.quota import (
    UNIT,
    Ask,
    Limits,
    QuotaAccount,
    Subject,
    Verdict,
    admit,
    is_idle,
    settle,
    share,
)

some = st.one_of(st.none(), st.integers(1, 50))
limits = st.builds(
    Limits,
    requests_per_minute=some,
    tokens_per_minute=st.one_of(st.none(), st.integers(1, 500)),
    concurrency=st.one_of(st.none(), st.integers(1, 4)),
    budget_tokens=st.one_of(st.none(), st.integers(1, 2000)),
    budget_period_s=st.sampled_from([60, 3600]),
)
# What happens: how many ms later, tokens asked for, and the share of them that will be used.
steps = st.lists(
    st.tuples(st.integers(0, 30_000), st.integers(1, 300), st.integers(0, 4)), max_size=60
)


def ask(limits: Limits, lease: str, tokens: int) -> Ask:
    return Ask("acme", (Subject("key:k", limits),), lease, tokens, lease_ms=45_000)


@given(limits, steps)
def test_no_more_is_let_in_than_the_limits_say(
    limits: Limits, steps: list[tuple[int, int, int]]
) -> None:
    account, now_ms = QuotaAccount(leases={}), 1_700_000_000_000
    admitted: list[tuple[int, int]] = []  # when, tokens
    running: list[int] = []  # ends of leases
    by_window: dict[int, int] = {}
    for number, (later, tokens, _) in enumerate(steps):
        now_ms += later
        running = [end for end in running if end > now_ms]
        verdict = admit([account], ask(limits, f"r{number}", tokens), now_ms)
        if verdict.reason is not None:
            assert verdict.retry_ms > 0
            continue
        admitted.append((now_ms, tokens))
        running.append(now_ms + 45_000)
        window = now_ms // (limits.budget_period_s * 1000)
        by_window[window] = by_window.get(window, 0) + tokens
    if limits.concurrency is not None:
        assert len(running) <= limits.concurrency
    if limits.budget_tokens is not None:
        assert all(used <= limits.budget_tokens for used in by_window.values())
    for since, _ in admitted:
        later_ones = [(at, tokens) for at, tokens in admitted if at >= since]
        passed = (later_ones[-1][0] - since) / 60_000
        if limits.requests_per_minute is not None:
            assert len(later_ones) <= limits.requests_per_minute * (1 + passed) + 1e-6
        if limits.tokens_per_minute is not None:
            # The last may be larger than what is left of a minute's worth only if it is alone.
            before_last = sum(tokens for _, tokens in later_ones[:-1])
            assert before_last <= limits.tokens_per_minute * (1 + passed) + later_ones[0][1]


@given(limits, steps)
def test_a_caller_who_waits_as_long_as_asked_is_let_in(
    limits: Limits, steps: list[tuple[int, int, int]]
) -> None:
    account, now_ms = QuotaAccount(leases={}), 1_700_000_000_000
    for number, (later, tokens, _) in enumerate(steps):
        now_ms += later
        one = ask(limits, f"r{number}", tokens)
        verdict = admit([account], one, now_ms)
        if limits.budget_tokens is not None and tokens > limits.budget_tokens:
            assert verdict.reason is not None
            continue
        for _ in range(4):
            if verdict.reason in (None, "concurrency"):
                break
            now_ms += verdict.retry_ms
            verdict = admit([account], one, now_ms)
        assert verdict.reason in (None, "concurrency")


@given(limits, steps)
def test_what_was_not_used_comes_back_once(
    limits: Limits, steps: list[tuple[int, int, int]]
) -> None:
    account, now_ms = QuotaAccount(leases={}), 1_700_000_000_000
    for number, (later, tokens, quarters) in enumerate(steps):
        now_ms += later
        one = ask(limits, f"r{number}", tokens)
        verdict = admit([account], one, now_ms)
        if verdict.reason is not None:
            continue
        used = tokens * quarters // 4
        before = account.used
        settle([account], one, [verdict.standings[0].window], used, now_ms)
        assert account.used == before - tokens + used
        assert one.lease not in account.leases
        level = account.tokens
        settle([account], one, [verdict.standings[0].window], used, now_ms)
        assert (account.tokens, account.used) == (level, before - tokens + used)


def test_a_request_larger_than_a_minute_is_let_in_alone_and_paid_off() -> None:
    account, limits = QuotaAccount(leases={}), Limits(tokens_per_minute=60)
    assert admit([account], ask(limits, "big", 180), 1000).reason is None
    refused = admit([account], ask(limits, "next", 1), 1000)
    assert (refused.reason, refused.retry_ms) == ("tokens", 121_000)
    assert admit([account], ask(limits, "next", 1), 61_000).reason == "tokens"


def test_a_request_takes_its_place_once_and_its_tokens_when_they_are_known() -> None:
    limits = Limits(requests_per_minute=2, tokens_per_minute=60, concurrency=1, budget_tokens=50)
    account = QuotaAccount(leases={})
    place, rest = ask(limits, "one", 0), ask(limits, "one", 40)
    assert admit([account], place, 0).reason is None
    assert admit([account], ask(limits, "two", 0), 0).reason == "concurrency"
    verdict = admit([account], rest, 0)
    assert (verdict.reason, verdict.standings[0].running) == (None, 1)
    assert (account.requests, account.tokens, account.used) == (UNIT, 20 * UNIT, 40)
    assert settle([account], rest, [verdict.standings[0].window], 50, 0) == 1
    assert (account.requests, account.used) == (UNIT, 50), "the place of the minute is used"
    assert admit([account], ask(limits, "three", 0), 0).reason == "budget", "not one token is left"


def test_who_has_a_place_may_be_refused_its_tokens_and_keeps_the_place() -> None:
    limits = Limits(requests_per_minute=9, tokens_per_minute=60)
    account = QuotaAccount(leases={})
    assert admit([account], ask(limits, "first", 50), 0).reason is None
    place = ask(limits, "one", 0)
    assert admit([account], place, 0).reason is None
    assert admit([account], ask(limits, "one", 40), 0).reason == "tokens"
    assert (account.requests, account.tokens) == (7 * UNIT, 10 * UNIT)
    assert settle([account], place, [0], 0, 0) == 1
    assert (account.tokens, list(account.leases)) == (10 * UNIT, ["first"])


def test_a_place_that_was_lost_is_taken_anew() -> None:
    limits, account = Limits(requests_per_minute=2, concurrency=1), QuotaAccount(leases={})
    assert admit([account], ask(limits, "one", 0), 0).reason is None
    assert admit([account], ask(limits, "one", 40), 50_000).reason is None
    assert (account.leases, account.requests) == ({"one": 95_000}, UNIT)


def test_what_is_full_again_may_be_forgotten() -> None:
    account, limits = QuotaAccount(leases={}), Limits(requests_per_minute=60, concurrency=1)
    one = ask(limits, "r", 1)
    verdict = admit([account], one, 1000)
    assert not is_idle(account, limits, 1500)
    settle([account], one, [verdict.standings[0].window], 0, 1500)
    assert not is_idle(account, limits, 1999)
    assert is_idle(account, limits, 2000)


def test_the_worst_obstacle_is_reported() -> None:
    slow, fast = Limits(requests_per_minute=1), Limits(requests_per_minute=60)
    both = Ask("acme", (Subject("key:k", fast), Subject("tenant:acme", slow)), "r", 1)
    accounts = [QuotaAccount(leases={}), QuotaAccount(leases={})]
    assert admit(accounts, both, 0).reason is None
    refused = admit(accounts, replace(both, lease="another"), 0)
    assert refused == Verdict(0, refused.standings, "requests", 1, 60_000)
    assert accounts[0].requests == 59 * UNIT


@given(limits, st.integers(1, 8))
def test_shares_are_no_more_than_the_whole(limits: Limits, parts: int) -> None:
    part = share(limits, parts)
    for name in ("requests_per_minute", "tokens_per_minute", "concurrency", "budget_tokens"):
        whole, one = getattr(limits, name), getattr(part, name)
        assert (whole is None) == (one is None)
        assert whole is None or 1 <= one <= max(1, whole / parts)
