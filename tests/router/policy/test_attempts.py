"""Who is blamed for a worker's death, and what it costs to try again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.policy.placement.attempts import (
    MAX_LOSSES,
    Attempts,
    Quarantine,
    RetryBudget,
)
from loraplex.server.protocol import ErrorCode, Evidence
from loraplex.server.worker.sequences import weigh


def lose(attempts: Attempts, accepted: int, evidence: Evidence | None = None) -> str:
    """Note a failure and return what follows; "probe" = again, as a suspect."""
    step = attempts.failed("engine_lost", accepted, evidence)
    return "probe" if step == "again" and attempts.is_suspect else step


# Deaths of engines that one of many, or of few, is convicted by.
MOST = 5
STRONG: list[Evidence | None] = ["strong"] * 3
WEAK: list[Evidence | None] = ["weak"] * 5
UNKNOWN: list[Evidence | None] = [None] * 10


@pytest.mark.parametrize(
    ("evidence", "steps"),
    [
        (STRONG, ["probe", "probe", "quarantine"]),
        (WEAK, ["again", "probe", "probe", "probe", "quarantine"]),
        (UNKNOWN, ["again", "again", *["probe"] * 7, "quarantine"]),
        # A stream, first; then it alone is begun when the engine dies.
        (["weak", "strong", "strong"], ["again", "probe", "quarantine"]),
        # One of a crowd until it is tried apart from others.
        (["weak", "weak", "strong", "strong"], ["again", "probe", "probe", "quarantine"]),
        (["none"] * 5, ["again"] * 5),
        (["strong", "none", "strong", "none", "weak"], [*["probe"] * 4, "quarantine"]),
    ],
)
def test_deaths_convict_by_what_they_say(evidence: list[Evidence | None], steps: list[str]) -> None:
    attempts = Attempts()
    assert [lose(attempts, 7, each) for each in evidence] == steps


def test_a_sequence_that_gets_on_is_no_suspect() -> None:
    attempts = Attempts()
    assert [lose(attempts, n, "weak") for n in range(3)] == ["again"] * 3
    assert [lose(attempts, n, "strong") for n in range(3, 6)] == ["probe"] * 3


def test_a_suspect_remains_one_where_there_is_no_room_until_it_gets_on() -> None:
    attempts = Attempts()
    assert [lose(attempts, 1, "weak") for _ in range(2)] == ["again", "probe"]
    assert attempts.failed("overloaded", 1) == "later"
    assert attempts.is_suspect
    assert attempts.failed("draining", 2) == "later"
    assert not attempts.is_suspect


def test_workers_that_a_router_cannot_hear_convict_nobody() -> None:
    attempts = Attempts()
    unheard = [attempts.failed("unheard", 0) for _ in range(3)]
    assert [*unheard, lose(attempts, 0, "weak")] == ["again"] * 4


def test_losses_are_bounded_all_the_same() -> None:
    attempts = Attempts()
    steps = [lose(attempts, n) for n in range(MAX_LOSSES + 1)]
    assert steps == [*["again"] * MAX_LOSSES, "fail"]


def test_losses_before_many_tokens_do_not_count() -> None:
    attempts = Attempts()
    assert {lose(attempts, n) for n in range(0, 4000, 100)} == {"again"}
    steps = [lose(attempts, 3901 + n) for n in range(MAX_LOSSES)]
    assert steps == [*["again"] * (MAX_LOSSES - 1), "fail"]


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


EVIDENCE: st.SearchStrategy[Evidence | None] = st.sampled_from(["none", "weak", "strong", None])


@given(st.lists(st.tuples(CODES, st.integers(0, 3), EVIDENCE), min_size=40, max_size=40))
def test_whatever_happens_it_ends(history: list[tuple[ErrorCode, int, Evidence | None]]) -> None:
    attempts = Attempts()
    steps = [attempts.failed(*each) for each in history]
    assert {"fail", "quarantine"} & set(steps[: MAX_LOSSES + 3])


@given(st.lists(st.tuples(st.integers(0, 2), EVIDENCE), min_size=1, max_size=MAX_LOSSES))
def test_only_what_was_there_at_each_of_several_deaths_is_convicted(
    history: list[tuple[int, Evidence | None]],
) -> None:
    """Tokens between two deaths acquit. Three deaths at least say something, ten are enough."""
    attempts = Attempts()
    accepted, said = 0, list[Evidence | None]()
    for tokens, evidence in history:
        said = list[Evidence | None]() if tokens else said
        said += [] if evidence == "none" else [evidence]
        accepted += tokens
        step = lose(attempts, accepted, evidence)
        weight = len(said) + said.count("weak") + 3 * said.count("strong")
        assert (step == "quarantine") == (weight >= 10)
        assert step != "quarantine" or 3 <= len(said) <= 10
        if step == "quarantine":
            return


@given(st.lists(st.sets(st.integers(1, 9)), min_size=MOST, max_size=MOST))
def test_a_killer_is_convicted_and_nobody_beside_it(beside: list[set[int]]) -> None:
    """Engines begin any others together with it, but two suspects. No engine gives a token."""
    killer, others = Attempts(), {number: Attempts() for number in range(1, 10)}
    for numbers in beside:
        apart = {n for n, one in others.items() if one.is_suspect and killer.is_suspect}
        evidence = weigh({0, *numbers - apart}, {0, *others}, True)
        steps = [one.failed("engine_lost", 0, evidence[n]) for n, one in others.items()]
        assert set(steps) == {"again"}
        if killer.failed("engine_lost", 0, evidence[0]) == "quarantine":
            return
    raise AssertionError("it kills on")


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
