"""Who is blamed for a worker's death, and what it costs to try again."""

from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.policy.placement.attempts import MAX_LOSSES, Attempts, Quarantine, RetryBudget
from loraplex.server.protocol import ErrorCode


def lose(attempts: Attempts, accepted: int) -> str:
    return attempts.failed("engine_lost", accepted)


def test_a_suspect_is_tried_apart_from_others_before_it_is_convicted() -> None:
    attempts = Attempts()
    assert [lose(attempts, 5) for _ in range(3)] == ["again", "probe", "quarantine"]


def test_a_sequence_that_gets_on_is_no_suspect() -> None:
    attempts = Attempts()
    assert [lose(attempts, n) for n in range(3)] == ["again"] * 3


def test_workers_that_a_router_cannot_hear_convict_nobody() -> None:
    attempts = Attempts()
    unheard = [attempts.failed("unheard", 0) for _ in range(3)]
    assert [*unheard, lose(attempts, 0)] == ["again"] * 4
    assert [lose(attempts, 0) for _ in range(2)] == ["probe", "quarantine"]


def test_losses_are_bounded_all_the_same() -> None:
    attempts = Attempts()
    steps = [lose(attempts, n) for n in range(MAX_LOSSES + 1)]
    assert steps == [*["again"] * MAX_LOSSES, "fail"]


def test_refusals_cost_nothing_and_other_errors_end_it() -> None:
    attempts = Attempts()
    for _ in range(100):
        assert attempts.failed("overloaded", 0) == "later"
        assert attempts.failed("draining", 0) == "later"
    assert attempts.failed("internal", 0) == "fail"
    assert attempts.number == 201


def test_an_adapter_that_cannot_be_brought_is_tried_twice_more() -> None:
    attempts = Attempts()
    steps = [attempts.failed("adapter_unavailable", 0) for _ in range(3)]
    assert steps == ["again", "again", "fail"]


CODES: st.SearchStrategy[ErrorCode] = st.sampled_from(
    ["engine_lost", "unheard", "adapter_unavailable", "internal", "out_of_memory"]
)


@given(st.lists(st.tuples(CODES, st.integers(0, 3)), min_size=40, max_size=40))
def test_whatever_happens_it_ends(history: list[tuple[ErrorCode, int]]) -> None:
    attempts = Attempts()
    steps = [attempts.failed(code, accepted) for code, accepted in history]
    assert {"fail", "quarantine"} & set(steps[: MAX_LOSSES + 3])


def test_the_quarantine_is_bounded_and_forgets() -> None:
    quarantine = Quarantine(ttl_s=10, most=2)
    for mark in (b"a", b"b", b"c"):
        quarantine.add(mark, 0)
    assert len(quarantine) == 2
    assert not quarantine.holds(b"a", 1)
    assert quarantine.holds(b"c", 9.9)
    assert not quarantine.holds(b"c", 10)
    assert len(quarantine) == 1


def test_retries_beyond_the_budget_are_spread_in_time() -> None:
    budget = RetryBudget(share=0.5, per_s=10, burst=2, now=0)
    assert [budget.take(0) for _ in range(4)] == [0, 0, 0.1, 0.2]
    for _ in range(4):
        budget.request()
    assert budget.take(0) == 0.1
    assert budget.take(100) == 0


@given(st.lists(st.floats(0, 0.5), min_size=1, max_size=200))
def test_no_more_retries_go_out_than_are_paid_for(pauses: list[float]) -> None:
    budget = RetryBudget(share=0.2, per_s=10, burst=5, now=0)
    now, sent = 0.0, []
    for pause in pauses:
        now += pause
        sent.append(now + budget.take(now))
    for moment in sent:
        assert sum(at <= moment for at in sent) <= 5 + 10 * moment + 1e-6
