"""Shares of a step's time add up, and follow tokens and bytes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.server.engine.executor import ExecutorLimits
from loraplex.server.engine.memory.residency import AdapterArena
from loraplex.server.engine.plan import SeqSlice, StepPlan
from loraplex.server.engine.scheduling.device_shares import DeviceShares
from loraplex.server.engine.scheduling.sequence import Precedence, Sequence, State
from tests.server.engine.harness import limits, make_request

LIMITS = limits(weight_bytes=1000, token_bytes=1, num_devices=2)


def arena() -> AdapterArena:
    arena = AdapterArena(8, 100, 4)
    for digest, extents in (("a", 1), ("b", 4)):
        arena.place(digest, (extents,), ())
        arena.finish(digest)
    return arena


def sequence(adapter: str | None, state: State = State.RUNNING) -> Sequence:
    made = Sequence(0, make_request([1], adapter=adapter), Precedence(0, 0), 9, None)
    made.state = state
    return made


def step(*sizes: tuple[int, int, int]) -> StepPlan:
    """sizes: adapter slot, start and tokens of each slice."""
    slices = [SeqSlice("decode", 0, start, new, [], slot, True) for slot, start, new in sizes]
    return StepPlan(1, slices, [], [], [])


def shares(plan: StepPlan, *sequences: Sequence, of: ExecutorLimits = LIMITS) -> list[float]:
    DeviceShares(of, arena()).took(plan, sequences, 1.0)
    return [round(sequence.device_s, 3) for sequence in sequences]


def test_equal_sequences_pay_alike() -> None:
    plan = step((-1, 5, 1), (-1, 5, 1))
    assert shares(plan, sequence(None), sequence(None)) == [1.0, 1.0], "of two devices"


def test_tokens_contexts_and_adapters_are_paid_by_whose_they_are() -> None:
    base = sequence(None)
    # 2 tokens share the weights: 500 bytes each, and one byte for each token of context.
    assert shares(step((-1, 0, 1), (-1, 498, 1)), base, sequence(None)) == [0.668, 1.332]
    # 100 bytes of `a` beside 400 of `b`, and `b` is read once for two of its tokens.
    plan = step((0, 49, 1), (1, 49, 1), (1, 49, 1), (-1, 49, 1))
    found = shares(plan, sequence("a"), sequence("b"), sequence("b"), sequence(None))
    assert found == [round(2 * part / 1700, 3) for part in (400, 500, 500, 300)]
    # A prompt's arithmetic costs by its tokens.
    prompt, decode = shares(step((-1, 0, 1023), (-1, 0, 1)), sequence(None), sequence(None))
    assert prompt > 1000 * decode


def test_what_has_ended_pays_nothing_more() -> None:
    over, other = sequence("a", State.FINISHED), sequence("b")
    assert shares(step((0, 9, 1), (1, 9, 1)), over, other) == [0.0, 2.0]
    alone = DeviceShares(LIMITS, arena())
    alone.took(step((0, 9, 1)), [over], 1.0)
    assert alone.use.late == 2.0


def test_a_copy_is_paid_by_the_first_who_waited() -> None:
    first, second, none = sequence("a"), sequence("a"), DeviceShares(LIMITS, arena())
    none.usable("a", [first, second])
    none.copied("a", 0.5)
    none.copied("b", 0.25)
    assert (first.copy_s, second.copy_s, none.use.copies) == (1.0, 0.0, 1.5)


_SLICE = st.tuples(st.sampled_from([-1, 0, 1]), st.integers(0, 900), st.integers(1, 600))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.tuples(_SLICE, st.booleans()), min_size=1), min_size=1, max_size=5))
def test_all_shares_add_up(steps: list[list[tuple[tuple[int, int, int], bool]]]) -> None:
    found, given_s, everybody = DeviceShares(LIMITS, arena()), 0.0, list[Sequence]()
    for number, slices in enumerate(steps):
        sequences = [
            sequence({-1: None, 0: "a", 1: "b"}[slot], State.FINISHED if over else State.RUNNING)
            for (slot, _, _), over in slices
        ]
        found.took(step(*(size for size, _ in slices)), sequences, 0.1 * number)
        given_s += 0.2 * number
        everybody += sequences
    use = found.use
    assert abs(use.adapters + use.base + use.late - given_s) < 1e-9
    assert abs(sum(one.device_s for one in everybody) + use.late - given_s) < 1e-9
