"""The scripts reach the numbers of the arithmetic, whatever happens in whatever order."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.router.policy.quota import Ask, Limits, QuotaAccount, Subject, admit, settle
from loraplex.router.shared.redis_link import RedisLink
from loraplex.router.shared.redis_store import RedisStore
from loraplex.router.shared.store import Settlement
from tests.router.shared.redis_server import RedisServer, running_redis

some = st.one_of(st.none(), st.integers(1, 2**31 - 1), st.integers(1, 30))
limits = st.builds(
    Limits,
    requests_per_minute=some,
    tokens_per_minute=some,
    concurrency=st.one_of(st.none(), st.integers(1, 3)),
    budget_tokens=st.one_of(st.none(), st.integers(1, 2**46), st.integers(1, 300)),
    budget_period_s=st.sampled_from([60, 86400, 2**31 - 1]),
)
# Tokens asked for, tokens used (None: it goes on), and ms that pass before.
steps = st.lists(
    st.tuples(
        st.one_of(st.just(0), st.integers(1, 200), st.integers(1, 2**31)),
        st.one_of(st.none(), st.integers(0, 400)),
        st.one_of(st.just(0), st.integers(0, 200_000)),
    ),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@contextmanager
def a_server(runner: asyncio.Runner) -> Iterator[RedisServer]:
    context = running_redis()
    server = runner.run(context.__aenter__())
    try:
        yield server
    finally:
        runner.run(context.__aexit__(None, None, None))


def test_scripts_agree_with_the_arithmetic(loop: asyncio.Runner) -> None:
    with a_server(loop) as server:
        link = RedisLink(server.url, timeout_s=240.0)

        @settings(max_examples=60, suppress_health_check=list(HealthCheck))
        @given(first=limits, second=limits, steps=steps)
        def agree(first: Limits, second: Limits, steps: list[tuple[int, int | None, int]]) -> None:
            loop.run(run(link, server, (first, second), steps))

        try:
            agree()
        finally:
            loop.run(link.close())


async def run(
    link: RedisLink,
    server: RedisServer,
    limits: tuple[Limits, Limits],
    steps: list[tuple[int, int | None, int]],
) -> None:
    await link.client.flushall()
    store = RedisStore(link, "p")
    subjects = (Subject("key:k", limits[0]), Subject("tenant:t", limits[1]))
    accounts = [QuotaAccount(leases={}), QuotaAccount(leases={})]
    keys = [f"p:{{quota:t}}:{subject.name}" for subject in subjects]
    for number, (tokens, used, passed_ms) in enumerate(steps):
        await let_pass(link, keys, accounts, passed_ms)
        lease = f"r{number // 2}"  # of every second that of a request that has its place already
        ask = Ask("t", subjects, lease, tokens, lease_ms=100_000)
        told = await store.admit(ask)
        assert told == admit(accounts, ask, told.now_ms)
        if told.reason is None and used is not None:
            await settle_both(store, accounts, Settlement(ask, told, used))


async def settle_both(
    store: RedisStore, accounts: list[QuotaAccount], settlement: Settlement
) -> None:
    ask, verdict = settlement.ask, settlement.verdict
    now_ms, counted = await store.settle(settlement)
    windows = [standing.window for standing in verdict.standings]
    assert settle(accounts, ask, windows, settlement.used, now_ms) == counted


async def let_pass(
    link: RedisLink, keys: list[str], accounts: list[QuotaAccount], passed_ms: int
) -> None:
    """Time goes on for both: what they remember becomes older."""
    for key, account in zip(keys, accounts, strict=True):
        for field in ("requests_at", "tokens_at"):
            if await link.client.hexists(key, field):
                await link.client.hincrby(key, field, -passed_ms)
        for lease in list(account.leases):
            await link.client.zincrby(f"{key}:leases", -passed_ms, lease)
            account.leases[lease] -= passed_ms
        account.requests_at -= passed_ms
        account.tokens_at -= passed_ms
