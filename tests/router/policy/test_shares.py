"""Who uses more than its share: by what it has, and by what it has had for a while."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.policy.queue.waiting import TenantShares


def shares_of(running: dict[str, int], weights: dict[str, float] | None = None) -> TenantShares:
    shares = TenantShares()
    for tenant, count in running.items():
        shares.asks(tenant, 0.0, (weights or {}).get(tenant, 1.0))
        for _ in range(count):
            shares.begins(tenant)
    return shares


def live(shares: TenantShares, seconds: float, start: float = 0.0) -> None:
    for tick in range(int(4 * seconds)):
        shares.age(start + 0.25 * (tick + 1))


def test_alone_nobody_is_over() -> None:
    assert not shares_of({"a": 50}).is_over("a")


def test_a_little_more_is_no_sign_of_wanting_more() -> None:
    """Sixteen are a share; twenty-four, two roots above it, are the limit."""
    rest = {"b": 8, "c": 16, "d": 16}
    assert not shares_of({**rest, "a": 24}).is_over("a")
    assert shares_of({**rest, "a": 30}).is_over("a")


def test_rows_that_are_kept_free_are_part_of_what_is_shared() -> None:
    """Eleven are no more than a share of 48 rows, though they are of the 40 in use."""
    for rows, is_over in ((48, False), (40, True), (8, True)):
        shares = shares_of({"a": 11, "b": 10, "c": 10, "d": 9})
        shares.rows = rows
        live(shares, 5.0)
        assert shares.is_over("a") == is_over


def test_a_little_more_for_a_while_is() -> None:
    shares = shares_of({"a": 20, "b": 12, "c": 16, "d": 16})
    live(shares, 5.0)
    assert shares.is_over("a")
    assert not shares.is_over("b")
    assert not shares.is_over("c")


def test_who_has_no_more_than_its_share_now_is_not_over_for_what_was() -> None:
    shares = shares_of({"a": 60, "b": 4})
    live(shares, 5.0)
    for _ in range(56):
        shares.ends("a")
    assert not shares.is_over("a")


def test_a_weight_is_a_larger_share() -> None:
    running = {"a": 30, "b": 10}
    even = shares_of(running)
    live(even, 5.0)
    assert even.is_over("a")
    weighted = shares_of(running, {"a": 3.0})
    live(weighted, 5.0)
    assert not weighted.is_over("a")


def test_tenants_that_left_have_no_share() -> None:
    shares = shares_of({"gone": 0, "a": 30})
    assert shares.is_over("a")
    shares.asks("a", 11.0)
    assert not shares.is_over("a")


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 40), min_size=2),
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([0.1, 1.0, 3.0, 10.0])),
    st.integers(0, 10),
    st.integers(0, 300),
)
def test_never_is_everybody_over(
    running: dict[str, int], weights: dict[str, float], seconds: int, rows: int
) -> None:
    """Rows that are kept for those within their share must have somebody to be kept for."""
    shares = shares_of(running, weights)
    shares.rows = rows
    live(shares, seconds)
    assert not all(shares.is_over(tenant) for tenant in running)


@pytest.mark.parametrize("seconds", [0.0, 20.0])
def test_what_has_ended_is_forgotten(seconds: float) -> None:
    shares = shares_of({"a": 9, "b": 3})
    live(shares, seconds)
    for tenant, count in (("a", 9), ("b", 3)):
        for _ in range(count):
            shares.ends(tenant)
    live(shares, 60.0, seconds)
    assert shares.__dict__["_running"] == {}
    assert shares.__dict__["_means"] == {}
