"""Residency: tables for each operation, and a state machine against a plain model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.server.engine.memory.residency import AdapterArena, Placement
from tests.server.invariants import check_arena


def ready(arena: AdapterArena, digest: str, runs: tuple[int, ...]) -> Placement:
    placement = arena.place(digest, runs)
    assert placement is not None
    arena.finish(digest)
    return placement


def test_life_of_an_adapter() -> None:
    arena = AdapterArena(4, 1024, 2)
    assert arena.stage("a") == "absent"
    assert arena.acquire("a") is None
    placement = arena.place("a", (1, 1))
    assert placement is not None
    assert len(set(placement.extents)) == 2
    assert arena.stage("a") == "loading"
    assert arena.loading == ("a",)
    assert arena.acquire("a") is None, "not before its bytes are there"
    arena.finish("a")
    assert arena.acquire("a") == placement == arena.placement("a")
    assert arena.leases("a") == 1
    arena.release("a")
    arena.drop("a")
    assert arena.stage("a") == "absent"
    assert arena.placement("a") is None
    assert arena.leases("a") == 0
    assert arena.free_extents == 4
    check_arena(arena)


def test_evicts_the_least_recently_used_and_only_as_many_as_needed() -> None:
    arena = AdapterArena(6, 1, 8)
    for digest in "abc":
        ready(arena, digest, (1, 1))
    arena.acquire("a")
    arena.release("a")
    assert "".join(arena.ready) == "bca"
    assert arena.place("d", (1, 1)) is not None
    assert "".join(arena.ready) == "ca"
    assert arena.evictions == {"bytes": 1}


@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.lists(st.integers(1, 4), min_size=1, max_size=12),
)
def test_runs_lie_where_a_search_of_the_whole_arena_finds_them(
    taken: list[bool], runs: list[int]
) -> None:
    """Long ones first fit, single ones from the end."""
    arena = AdapterArena(len(taken), 1, 1)
    arena._map[:] = bytes(not t for t in taken)
    free, expected = [not t for t in taken], [-1] * len(runs)
    for i in sorted(range(len(runs)), key=lambda i: -runs[i]):
        holes = [at for at in range(len(free)) if free[at : at + runs[i]] == [True] * runs[i]]
        if holes:
            expected[i] = holes[-1] if runs[i] == 1 else holes[0]
            free[expected[i] : expected[i] + runs[i]] = [False] * runs[i]
    placement = arena.place("a", runs)
    assert (placement is None) == (-1 in expected)
    assert placement is None or placement.extents == tuple(expected)


def test_spares_a_small_old_adapter_when_a_larger_one_must_go_anyway() -> None:
    arena = AdapterArena(5, 1, 8)
    ready(arena, "small", (1,))
    ready(arena, "large", (1, 1, 1, 1))
    assert arena.place("new", (1, 1, 1)) is not None
    assert arena.ready == ("small",)


def test_many_small_adapters_go_for_a_large_one() -> None:
    arena = AdapterArena(8, 1, 8)
    for digest in "abcdefgh":
        ready(arena, digest, (1,))
    assert arena.place("large", (1, 1, 1, 1, 1)) is not None
    assert "".join(arena.ready) == "fgh"


def test_leased_loading_and_kept_adapters_stay() -> None:
    arena = AdapterArena(3, 1, 3)
    ready(arena, "leased", (1,))
    arena.acquire("leased")
    assert arena.place("loading", (1,)) is not None
    ready(arena, "kept", (1,))
    assert arena.place("new", (1,), keep={"kept"}) is None
    assert not arena.evictions
    assert arena.place("new", (1,)) is not None
    assert arena.stage("kept") == "absent"
    assert arena.stage("leased") == "ready"


def test_slots_bound_the_number_of_adapters() -> None:
    arena = AdapterArena(10, 1, 1)
    ready(arena, "a", (1,))
    arena.acquire("a")
    assert arena.place("b", (1,)) is None
    arena.release("a")
    assert arena.place("b", (1,)) is not None
    assert arena.ready == ()


def test_forms_a_contiguous_run_by_evicting_neighbours() -> None:
    arena = AdapterArena(6, 1, 6)
    at = {d: ready(arena, d, (1,)).extents[0] for d in "abcdef"}
    by_extent = sorted(at, key=lambda d: at[d])
    for digest in (by_extent[0], by_extent[3]):
        arena.acquire(digest)
    placement = arena.place("long", (2,))
    assert placement is not None
    first = placement.extents[0]
    assert {first, first + 1} in ({1, 2}, {4, 5})
    assert arena.evictions == {"bytes": 2}, "those beside the run stay"
    check_arena(arena)


def test_no_room_for_a_run_between_leased_adapters() -> None:
    arena = AdapterArena(5, 1, 5)
    at = {d: ready(arena, d, (1,)).extents[0] for d in "abcde"}
    for digest, extent in at.items():
        if extent % 2:
            arena.acquire(digest)
    assert arena.place("long", (2,)) is None
    assert not arena.evictions
    leased = [d for d, x in at.items() if x % 2]
    assert not arena.would_fit((2,), ())
    assert arena.would_fit((2,), leased[:1])
    assert arena.would_fit((3,), leased[:1])


@pytest.mark.parametrize(
    ("runs", "slots", "word"),
    [
        ((5,), 1, "only 4096"),
        ((1,) * 5, 1, "adapter memory"),
        ((1,), 0, "slots"),
        ((0,), 1, "run"),
    ],
)
def test_permanent_refusals_say_why(runs: tuple[int, ...], slots: int, word: str) -> None:
    arena = AdapterArena(4, 1024, slots)
    message = arena.refusal(runs)
    assert message is not None
    assert word in message
    assert arena.place("x", runs) is None


def test_misuse_is_refused() -> None:
    arena = AdapterArena(4, 1, 4)
    ready(arena, "a", (1,))
    with pytest.raises(ValueError, match="already ready"):
        arena.place("a", (1,))
    with pytest.raises(ValueError, match="ready already"):
        arena.finish("a")
    with pytest.raises(ValueError, match="no lease"):
        arena.release("a")
    arena.acquire("a")
    with pytest.raises(ValueError, match="in use"):
        arena.drop("a")


def test_what_fits_beside_the_pinned_follows_them() -> None:
    arena = AdapterArena(4, 1, 4)
    arena.pin_only({"pinned"})
    for _ in range(2):
        assert arena.refusal((1, 1, 1)) is None
        ready(arena, "pinned", (1, 1))
        assert arena.refusal((1, 1, 1)) is not None
        arena.drop("pinned")
    ready(arena, "pinned", (1, 1))
    arena.pin_only({"other"})
    assert arena.refusal((1, 1, 1)) is None


def test_pinned_adapters_stay_and_count_against_what_fits() -> None:
    arena = AdapterArena(4, 1024, 4)
    arena.pin_only({"pinned", "never here"})
    ready(arena, "pinned", (1, 1))
    ready(arena, "other", (1, 1))
    assert arena.refusal((1, 1)) is None
    assert arena.place("new", (1, 1)) is not None
    assert arena.ready == ("pinned",)
    message = arena.refusal((1, 1, 1))
    assert message is not None
    assert "3072 bytes" in message
    assert "pinned" in message
    assert not arena.would_fit((1, 1, 1), {"pinned", "new"})
    assert arena.place("large", (1, 1, 1)) is None
    arena.pin_only(())
    assert arena.refusal((1, 1, 1)) is None


def test_pins_can_take_every_slot() -> None:
    arena = AdapterArena(4, 1024, 1)
    ready(arena, "a", (1,))
    arena.pin_only("a")
    assert "all 1 adapter slots hold pinned" in str(arena.refusal((1,)))


DIGESTS = st.sampled_from("abcdefgh")
RUNS = st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=1, max_size=5).map(tuple)


class ArenaMachine(RuleBasedStateMachine):
    """Any order of operations conserves extents and slots, and never takes from a user."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = AdapterArena(12, 1, 4)
        self.leases: dict[str, int] = {}
        self.where: dict[str, Placement] = {}

    @rule(digest=DIGESTS, runs=RUNS, keep=st.sets(DIGESTS, max_size=2))
    def place(self, digest: str, runs: tuple[int, ...], keep: set[str]) -> None:
        if self.arena.stage(digest) != "absent":
            return
        before = (self.arena.free_extents, self.arena.ready, self.arena.loading)
        placement = self.arena.place(digest, runs, keep)
        if placement is None:
            assert before == (self.arena.free_extents, self.arena.ready, self.arena.loading)
            idle = not self.arena.loading and not any(self.leases.values()) and not keep
            idle = idle and not self.pinned_here
            assert not (idle and self.arena.refusal(runs) is None), "an idle arena has room"
            return
        assert (keep | self.arena.pins) & set(before[1]) <= set(self.arena.ready)
        self.where[digest] = placement

    @property
    def pinned_here(self) -> set[str]:
        return {d for d in self.arena.pins if self.arena.stage(d) != "absent"}

    @rule(pins=st.sets(DIGESTS, max_size=2))
    def pin(self, pins: set[str]) -> None:
        self.arena.pin_only(pins)

    @rule(digest=DIGESTS)
    def finish(self, digest: str) -> None:
        if self.arena.stage(digest) == "loading":
            self.arena.finish(digest)

    @rule(digest=DIGESTS)
    def acquire(self, digest: str) -> None:
        if self.arena.acquire(digest) is not None:
            self.leases[digest] = self.leases.get(digest, 0) + 1

    @precondition(lambda self: any(self.leases.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(d for d, n in self.leases.items() if n)))
        self.arena.release(digest)
        self.leases[digest] -= 1

    @rule(digest=DIGESTS)
    def drop(self, digest: str) -> None:
        if self.arena.stage(digest) != "absent" and not self.leases.get(digest):
            self.arena.drop(digest)

    @invariant()
    def holds(self) -> None:
        check_arena(self.arena)
        for digest, count in self.leases.items():
            if count:
                assert self.arena.stage(digest) == "ready", "evicted while in use"
                assert self.arena.placement(digest) == self.where[digest], "moved while in use"


ArenaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestArena = ArenaMachine.TestCase
