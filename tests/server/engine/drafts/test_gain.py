"""How much of a draft pays, and what a token costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.engine.drafts.gain import Acceptance, Patience, TokenPrice, worth

CHANCES = st.lists(st.floats(0, 1), max_size=12)


@pytest.mark.parametrize(
    ("chances", "ratio", "price", "count", "expected"),
    [
        ([], 1.0, 0.0, 0, 0.0),
        ([0.5, 0.5, 0.5], 1.0, 0.0, 3, 0.875),
        ([0.5, 0.5, 0.5], 1.0, 0.2, 2, 0.75),
        ([0.5, 0.5, 0.5], 0.5, 0.2, 1, 0.5),
        ([0.5, 0.5, 0.5], 0.1, 0.2, 0, 0.0),
        ([0.9, 0.0, 0.9], 1.0, 0.0, 1, 0.9),
        ([0.9], 1.0, 1.0, 0, 0.0),
    ],
)
def test_a_draft_goes_on_while_it_pays(
    chances: list[float], ratio: float, price: float, count: int, expected: float
) -> None:
    found = worth(chances, ratio, price)
    assert found[0] == count
    assert found[1] == pytest.approx(expected)


@given(CHANCES, st.floats(0, 2), st.floats(0, 1), st.floats(0, 1))
def test_a_dearer_token_makes_no_longer_draft(
    chances: list[float], ratio: float, price: float, more: float
) -> None:
    count, expected = worth(chances, ratio, price)
    assert 0 <= expected <= count <= len(chances)
    assert worth(chances, ratio, price + more)[0] <= count


def test_acceptance_follows_what_came() -> None:
    seen = Acceptance()
    assert seen.ratio == 1
    for _ in range(40):
        seen.saw(4.0, 0)
    assert seen.ratio < 0.1
    for _ in range(100):
        seen.saw(4.0, 4)
    assert seen.ratio == pytest.approx(1, abs=0.05)


def prices(ms: dict[int, float]) -> TokenPrice:
    price = TokenPrice()
    for _ in range(20):
        for tokens, each in ms.items():
            price.saw(tokens, each / 1e3)
    return price


@pytest.mark.parametrize(
    ("ms", "tokens", "expected"),
    [
        ({}, 4, 0.0),  # nothing is known
        ({4: 5.0}, 4, 0.0),  # nor is it from steps of one size
        ({1: 5.0, 9: 5.0}, 4, 0.0),  # a token is free
        ({1: 5.0, 9: 4.0}, 4, 0.0),
        ({1: 1.0, 9: 9.0}, 4, 1.0),  # nothing but tokens costs
        ({1: 5.0, 11: 15.0}, 4, 0.5),  # 4 + 1 ms a token, 4 tokens in 8 ms
    ],
)
def test_a_token_costs_what_others_would_give(
    ms: dict[int, float], tokens: int, expected: float
) -> None:
    assert prices(ms).of(tokens) == pytest.approx(expected, abs=1e-6)


@given(st.dictionaries(st.integers(1, 64), st.floats(0.1, 100)), st.integers(1, 64))
def test_a_price_is_between_nothing_and_a_token(ms: dict[int, float], tokens: int) -> None:
    assert 0 <= prices(ms).of(tokens) <= 1 + 1e-9


def test_looks_in_vain_become_rare() -> None:
    patience, looks = Patience(), []
    for tokens in range(60):
        if patience.is_over(tokens):
            patience.looked(tokens, found=tokens == 40)
            looks.append(tokens)
    assert looks == [0, 1, 3, 7, 15, 23, 31, 39, 47, 55]
    patience.looked(60, found=True)
    assert patience.is_over(60)
    patience.looked(60, found=False)
    assert [patience.is_over(tokens) for tokens in (60, 61)] == [False, True]


@pytest.mark.parametrize(("before", "ratio"), [(1.7, 1.0), (0.8, 0.8), (0.1, 0.5)])
def test_an_answer_begins_with_what_earlier_ones_gave(before: float, ratio: float) -> None:
    assert Acceptance(before).ratio == pytest.approx(ratio)
