"""The width of a step's drafts: what gives the most tokens a second, no more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.drafts.draft import Draft
from server.engine.drafts.widths import Acceptance, WidthTimes, choose_width, expected_by_length

FLAT = WidthTimes([1, 64], [0, 2, 4, 8], [[5.0, 5.0, 5.0, 5.0], [6.0, 9.0, 14.0, 25.0]])


def sums(*chances: float) -> list[float]:
    return expected_by_length(Draft([7] * len(chances), list(chances)))


def test_a_token_counts_only_if_those_before_it_are_right() -> None:
    assert sums(0.5, 0.5, 1.0) == [0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("rows", "drafts", "width"),
    [
        (1, [], 0),
        (1, [([], 1.0)], 0),
        (1, [(sums(0.1), 1.0)], 2),  # verifying is free
        (1, [(sums(*[0.9] * 8), 1.0)], 8),
        (64, [(sums(*[0.9] * 8), 1.0)], 0),  # one row's gain, the others' loss
        (64, [(sums(*[0.9] * 8), 1.0)] * 64, 2),
        (64, [(sums(*[0.9] * 8), 0.1)] * 64, 0),  # the others were seldom right
        (64, [(sums(*[0.1] * 8), 1.0)] * 64, 0),
        (64, [(sums(*[0.1] * 8), 9.0)] * 64, 2),  # more is accepted than was expected
    ],
)
def test_the_width_that_gives_the_most_tokens_a_second(
    rows: int, drafts: list[tuple[list[float], float]], width: int
) -> None:
    assert choose_width(rows, drafts, FLAT) == width


CHANCES = st.lists(st.floats(0.01, 1.0), max_size=8)


@given(st.lists(st.tuples(CHANCES, st.floats(0, 2)), min_size=1, max_size=70))
def test_no_other_width_gives_more(drafts: list[tuple[list[float], float]]) -> None:
    def tokens(width: int) -> float:
        found = 0.0
        for chances, ratio in drafts:
            product, likely = 1.0, 0.0
            for chance in chances[:width]:
                product *= chance
                likely += ratio * product
            found += min(likely, len(chances[:width]))
        return len(drafts) + found

    times = dict(zip(FLAT.widths, FLAT.of(len(drafts)), strict=True))
    chosen = choose_width(len(drafts), [(sums(*chances), ratio) for chances, ratio in drafts], FLAT)
    best = max(tokens(width) / ms for width, ms in times.items())
    assert tokens(chosen) / times[chosen] == pytest.approx(best)


@pytest.mark.parametrize(("rows", "ms"), [(1, 5.0), (22, 16 / 3), (64, 6.0), (200, 6.0)])
def test_times_between_two_measured_numbers_of_rows(rows: int, ms: float) -> None:
    assert FLAT.of(rows)[0] == pytest.approx(ms)


def test_one_measured_number_of_rows_holds_for_all() -> None:
    assert WidthTimes([8], [0, 1], [[5.0, 6.0]]).of(1) == [5.0, 6.0]


def test_acceptance_follows_what_came() -> None:
    acceptance = Acceptance()
    assert acceptance.ratio == 1.0
    for _ in range(50):
        acceptance.saw(2.0, 0)
    assert acceptance.ratio < 0.05
    for _ in range(100):
        acceptance.saw(2.0, 2)
    assert acceptance.ratio == pytest.approx(1.0, abs=0.02)
