"""Adapters with metrics of their own: bounded, honest in sum, and slow to change."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.names.served import OwnedName
from loraplex.router.telemetry.top_adapters import (
    BASE,
    COUNTS,
    MARGIN,
    OTHER,
    RANK_INTERVAL_S,
    TopAdapters,
)

SIZE = 3
NAMES = [OwnedName(f"a{i // 2}", "acme" if i % 2 else "") for i in range(8)]
NEW, BUSY = OwnedName("new"), OwnedName("busy")
TOKENS = COUNTS.index("generated_tokens")


def everyone(name: OwnedName) -> bool:
    return True


def values(top: TopAdapters) -> dict[str, float]:
    """By label."""
    return {label: value for (label,), value in top.rows("generated_tokens")}


turns = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from([*NAMES, BASE, OTHER]), st.integers(1, 50))),
        st.floats(0, 3 * RANK_INTERVAL_S),
        st.frozensets(st.sampled_from(NAMES)),  # of those the operator removed
    ),
    max_size=12,
)


@given(turns)
def test_rises_add_up_and_series_are_few(
    turns: list[tuple[list[tuple[OwnedName, int]], float, frozenset[OwnedName]]],
) -> None:
    top, now = TopAdapters(SIZE), 0.0
    before = values(top)
    for counted, seconds, removed in turns:
        for name, amount in counted:
            top.count(name, TOKENS, amount)
        now += seconds
        top.settle(now, lambda name, removed=removed: name not in removed)  # type: ignore[misc]
        after = values(top)
        assert {"_base", "_other"} <= after.keys()
        assert len(after) <= SIZE + 2
        assert all(after[name] >= before[name] for name in after.keys() & before.keys())
        rises = sum(after[name] - before.get(name, 0) for name in after)
        assert rises == sum(amount for _, amount in counted), "nothing is lost, nothing twice"
        before = after


def test_all_are_shown_while_there_is_room() -> None:
    top = TopAdapters(SIZE)
    for name in NAMES[:SIZE]:
        top.count(name, TOKENS, 7)
    top.settle(0.0, everyone)
    assert values(top) == {"_base": 0, "_other": 0, "a0": 7, "acme::a0": 7, "a1": 7}


def full(top: TopAdapters) -> None:
    for name in NAMES[:SIZE]:
        top.count(name, TOKENS, 100)
    top.settle(0.0, everyone)


@pytest.mark.parametrize(("tokens", "enters"), [(130, False), (170, True)])
def test_a_place_is_taken_by_who_is_clearly_busier(tokens: int, enters: bool) -> None:
    assert 130 < 100 * MARGIN < 170
    top = TopAdapters(SIZE)
    full(top)
    top.count(NEW, TOKENS, tokens)
    top.settle(1.0, everyone)
    top.settle(RANK_INTERVAL_S, everyone)
    assert (NEW in top.shown) == enters
    assert values(top)["_other"] == tokens, "what it had before it had a series"
    top.count(NEW, TOKENS, 5)
    top.settle(RANK_INTERVAL_S, everyone)
    assert values(top).get("new") == (5 if enters else None)


def test_two_alike_do_not_take_turns() -> None:
    top = TopAdapters(1)
    seen: set[OwnedName] = set()
    for turn in range(20):
        top.count(OwnedName("x"), TOKENS, 100 + turn % 2 * 20)
        top.count(OwnedName("y"), TOKENS, 110)
        top.settle(turn * RANK_INTERVAL_S, everyone)
        seen |= top.shown
    assert len(seen) == 1


def test_the_idle_make_place() -> None:
    top = TopAdapters(SIZE)
    full(top)
    for minute in range(1, 60):
        top.count(BUSY, TOKENS, 10)
        top.settle(60.0 * minute, everyone)
    assert BUSY in top.shown


def test_a_removed_name_loses_its_series() -> None:
    top = TopAdapters(SIZE)
    full(top)
    top.settle(RANK_INTERVAL_S, lambda name: name != NAMES[0])
    assert top.shown == set(NAMES[1:SIZE])


def test_what_is_remembered_is_bounded() -> None:
    top = TopAdapters(SIZE)
    for turn in range(3):
        for i in range(1000):
            top.count(OwnedName(f"n{i}"), TOKENS)
        top.settle(turn * RANK_INTERVAL_S, everyone)
    top.settle(3 * RANK_INTERVAL_S, everyone)
    assert len(top._score) <= 5 * SIZE
    assert not top._pending
