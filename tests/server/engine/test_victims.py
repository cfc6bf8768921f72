"""Whom a placing evicts, and what it refuses, against the plain way of finding out: all are sorted,
and nothing is kept from one attempt to the next."""

import math
from collections.abc import Collection, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.server.engine.memory.residency import (
    MAX_DENSITY_LOG2,
    NEWEST_SHARE,
    AdapterArena,
    Worth,
    _half_life,
)
from tests.server.invariants import check_arena

EXTENTS = 48
DIGESTS = st.integers(0, 79).map(str)
KEEP = st.sets(DIGESTS, max_size=5)
Step = tuple[str, str | set[str], float | None]
STEPS = st.one_of(
    st.tuples(st.just("use"), DIGESTS, st.sampled_from([None, 0.001, 0.1, 1.0, 30.0])),
    st.tuples(st.just("use"), DIGESTS, st.just(1.0)),
    st.tuples(st.just("hold"), DIGESTS, st.none()),
    st.tuples(st.just("let go"), DIGESTS, st.none()),
    st.tuples(st.just("drop"), DIGESTS, st.none()),
    st.tuples(st.just("pin"), st.sets(DIGESTS, max_size=30), st.none()),
)
RUNS = st.sampled_from([(1,), (1,), (1, 1), (2, 1), (3,), (5, 1, 1), (12,), (1,) * 20, (30,)])


def plain_order(worth: Worth, digests: list[str], num_held: int) -> list[str]:
    half_life = _half_life(num_held)

    def of(digest: str) -> float:
        record = worth._records.get(digest)
        if record is None:
            return -math.inf
        dearness = 0.0
        if record.density is not None and worth._usual is not None:
            dearness = record.density - worth._usual
        dearness = min(max(dearness, -MAX_DENSITY_LOG2), MAX_DENSITY_LOG2)
        return math.log2(max(1.0, record.frequency)) + record.at / half_life + dearness

    split = len(digests) - len(digests) // NEWEST_SHARE
    return [*sorted(digests[:split], key=of), *digests[split:]]


def plain_victims(
    arena: AdapterArena, runs: Sequence[int], keep: Collection[str]
) -> list[str] | None:
    """As few of the cheapest as make room, then without those whose room is not needed."""
    idle = [d for d in arena.ready if not arena.leases(d) and d not in {*arena.pins, *keep}]
    order = plain_order(arena._worth, idle, arena.num_adapters)

    def fits(digests: Collection[str]) -> bool:
        return arena._try(runs, [arena._entries[d] for d in digests]) is not None

    count = next((n for n in range(len(order) + 1) if fits(order[:n])), None)
    if count is None:
        return None
    victims = order[:count]
    for digest in reversed(order[:count]):
        if fits([d for d in victims if d != digest]):
            victims.remove(digest)
    return victims


def plain_refusal(arena: AdapterArena, runs: Sequence[int]) -> bool:
    movable = [e for d, e in arena._entries.items() if d not in arena.pins]
    return sum(runs) > EXTENTS or bool(arena.pins and arena._try(runs, movable) is None)


def absent_after(arena: AdapterArena, what: str, whom: str | set[str]) -> bool:
    """Take one step; whether it is a use of what is not there."""
    if not isinstance(whom, str):
        arena.pin_only(whom)
    elif what == "hold":
        arena.acquire(whom)
    elif what == "let go" and arena.leases(whom):
        arena.release(whom)
    elif what == "drop" and arena.stage(whom) == "ready" and not arena.leases(whom):
        arena.drop(whom)
    elif what == "use":
        if arena.acquire(whom) is None:
            return True
        arena.release(whom)
    return False


@settings(max_examples=300)
@given(st.integers(3, EXTENTS), st.lists(st.tuples(STEPS, RUNS, KEEP), max_size=200))
def test_the_same_go_as_if_all_were_sorted(
    slots: int, steps: list[tuple[Step, tuple[int, ...], set[str]]]
) -> None:
    arena = AdapterArena(EXTENTS, 1, slots)
    for number in range(min(slots, 40)):  # so that there is somebody to choose from
        assert arena.place(str(number), (1,)) is not None
        arena.finish(str(number), 1.0)
    for (what, whom, load_s), runs, keep in steps:
        if not absent_after(arena, what, whom):
            continue
        refused, victims = plain_refusal(arena, runs), plain_victims(arena, runs, keep)
        assert (arena.refusal(runs) is not None) == refused
        placement = arena.place(str(whom), runs, keep)
        if refused or victims is None:
            assert placement is None
        else:
            assert placement is not None
            assert list(placement.evicted) == victims
            arena.finish(str(whom), load_s)
        check_arena(arena)
